"""`ddp`: PyTorch's DistributedDataParallel, measured as a row of the same tables."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from testbed.backends.protocol import Group
from testbed.backends.torch_groups.backend import (
    GLOO_THREADS,
    TorchBackend,
    dist,
    let_go,
    make_gloo,
    refuse_without_gloo,
)
from testbed.backends.torch_groups.ddp_options import DdpOptions, exact_plan
from testbed.backends.torch_groups.ddp_plan import limits_mib, limits_of
from testbed.backends.torch_groups.nccl import check_ranks, end_nccl, make_nccl, probe_nccl
from testbed.base.errors import Unavailable, UsageError
from testbed.base.plan import Plan, check_plan
from testbed.base.recorder import Recorder
from testbed.base.types import Traffic


@dataclass(frozen=True)
class _Transport:
    """Whose collectives the wrapper uses.

    Attributes:
        device_type: where the tensors of its ops live.
        make: makes a process group.
        end: lets go of one.
        kind: as torch names it.
    """

    device_type: str
    make: Callable[[Group, Any], Any]
    end: Callable[[Any], None]
    kind: Any


def _transport(over: str, group: Group) -> _Transport:
    kinds = dist.ProcessGroup.BackendType
    if over == "gloo":
        refuse_without_gloo("ddp")
        return _Transport("cpu", make_gloo, let_go, kinds.GLOO)
    if problem := probe_nccl():
        raise Unavailable("backend", "ddp:over=nccl", *problem)
    check_ranks(group)
    return _Transport("cuda", make_nccl, end_nccl, kinds.NCCL)


class DdpBackend(TorchBackend):
    """See `Backend` and `ExternalFramework`; its ops have connections beside the wrapper's own.

    The model is wrapped in `torch.nn.parallel.DistributedDataParallel` as it comes: buckets in the
    order in which gradients became ready in the first step, all-reduced as they fill.

    Args:
        group: the job.
        options: what the wrapper is told.

    Raises:
        Unavailable: this torch has no Gloo or NCCL, no GPU is visible, or its wrapper takes no list
            of sizes.
        UsageError: the plan's file cannot be read, or DDP cannot carry the plan out as it is.

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed).
    """

    def __init__(self, group: Group, options: DdpOptions) -> None:
        self._transport = _transport(options.over, group)
        self._plan = None if options.plan is None else exact_plan(options.plan)
        known = inspect.signature(DistributedDataParallel).parameters
        if self._plan is not None and "bucket_cap_mb_list" not in known:
            reason = f"torch {torch.__version__} takes no bucket_cap_mb_list, which plan= needs"
            raise Unavailable("backend", "ddp", reason, "install torch 2.13 or later")
        transport = self._transport
        super().__init__(group, "ddp", transport.device_type, transport.make, transport.end)
        self._group = group
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self._low_rank: Any = None
        self._sent_low_rank = 0
        self._built: list[int] | None = None
        self._connections: Any = None
        self._exchanged = Traffic()

    @property
    def fixed_graph(self) -> bool:
        """See `ExternalFramework.fixed_graph`."""
        return self._options.static_graph

    @property
    def raises_late(self) -> bool:
        """See `ExternalFramework.raises_late`: Gloo does; NCCL's operations the GPU waits for."""
        return self._options.over == "gloo"

    def wrap(self, model: torch.nn.Module, timeout_s: float) -> torch.nn.Module:
        """See `ExternalFramework.wrap`."""
        if self._group.recorder is not None and any(p.is_cuda for p in model.parameters()):
            raise UsageError(
                "--timeline cannot stand beside ddp on a GPU: torch tells when its operations were "
                "queued, not when they ran; leave out --timeline, or use another backend"
            )
        # Connections of its own, with a timeout of their own; requests have the deadline of `wait`.
        self._connections = self._transport.make(
            self._group, dist.PrefixStore(f"{self._group.name}/ddp", self._store)
        )
        self.set_timeout(timeout_s)
        process_group = dist.ProcessGroup(self._store, self.rank, self.size)
        if self._group.recorder is not None:
            process_group = RecordedGroup(self._connections, self._group.recorder)
        # Of a model on a GPU Gloo takes tensors from both.
        for device in {self._transport.device_type, *(p.device.type for p in model.parameters())}:
            process_group._register_backend(
                torch.device(device), self._transport.kind, self._connections
            )
        process_group._set_default_backend(self._transport.kind)
        wrapper: Any = DistributedDataParallel
        sizes = {}
        if self._plan is not None:
            _check_model(self._plan, model)
            sizes["bucket_cap_mb_list"] = limits_mib(limits_of(self._plan))
        # Any number here, even its default of 25, would be the first bucket's size too.
        self._wrapped = wrapper(
            model,
            process_group=process_group,
            bucket_cap_mb=self._options.bucket_mib,
            gradient_as_bucket_view=self._options.bucket_view,
            static_graph=self._options.static_graph,
            **sizes,
        )
        self._hook(process_group)
        return self._wrapped

    def _hook(self, process_group: Any) -> None:
        """Torch's own hook, with torch's own defaults but for what the options say."""
        assert self._wrapped is not None
        if self._options.hook == "fp16":
            self._wrapped.register_comm_hook(process_group, default_hooks.fp16_compress_hook)
        elif self._options.hook == "powersgd":
            self._low_rank = PowerSGDState(
                process_group,
                matrix_approximation_rank=self._options.rank,
                start_powerSGD_iter=self._options.start,
            )
            self._wrapped.register_comm_hook(self._low_rank, powerSGD_hook)

    def hold_back(self) -> AbstractContextManager[None]:
        """See `ExternalFramework.hold_back`."""
        assert self._wrapped is not None
        held: AbstractContextManager[None] = self._wrapped.no_sync()
        return held

    def set_timeout(self, timeout_s: float) -> None:
        """See `ExternalFramework.set_timeout`."""
        if self.raises_late:  # NCCL's own would end the process without a word of ours
            self._connections._set_default_timeout(timedelta(seconds=timeout_s))

    def broke(self, error: BaseException) -> bool:
        """See `ExternalFramework.broke`; Gloo's errors name the line of its source."""
        told = "/gloo/" in str(error) or isinstance(error, dist.DistBackendError)
        return isinstance(error, RuntimeError) and told

    def count_step(self) -> None:
        """See `ExternalFramework.count_step`; counted as a ring's traffic, as all of torch's is.

        Raises:
            UsageError: DDP has built other buckets than the plan's.
        """
        moved = 2 * (self.size - 1) * self._step_bytes() // self.size
        self._exchanged += Traffic(moved, moved)
        if self._plan is not None and self._built is None:
            self._check_buckets(self._plan)

    def _step_bytes(self) -> int:
        """What the step's all-reduces summed, after the hook's compression."""
        assert self._wrapped is not None
        trained = [p for p in self._wrapped.parameters() if p.requires_grad]
        if self._options.hook == "fp16":
            return sum(2 * p.numel() for p in trained)
        if self._low_rank is not None:
            sent: int = self._low_rank.total_numel_after_compression
            sent, self._sent_low_rank = sent - self._sent_low_rank, sent
            if sent:
                return sent * max(p.element_size() for p in trained)
        return sum(p.numel() * p.element_size() for p in trained)

    def _check_buckets(self, plan: Plan) -> None:
        """DDP tells its buckets a few steps after it has built them anew."""
        assert self._wrapped is not None
        told = self._wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes")  # type: ignore[no-untyped-call]
        if not told:
            return
        self._built = [int(size) for size in told.split(",")]
        of = dict(self._wrapped.module.named_parameters())
        wanted = [
            sum(of[plan.names[part.tensor]].nbytes for part in message.parts)
            for message in plan.messages
        ]
        if self._built != wanted:
            raise UsageError(
                f"ddp:plan={self._options.plan}: DDP built buckets of {told} bytes, and the plan's "
                f"messages have {','.join(map(str, wanted))}: gradients became ready in another "
                "order than in the plan's trace; record a trace of this model (testbed profile) "
                "and plan from it"
            )

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        return super().traffic() + self._exchanged

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`."""
        connections, self._wrapped, self._connections = self._connections, None, None
        if connections is not None:
            self._transport.end(connections)
        super().close(timeout_s)


class RecordedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group that notes its all-reduces, and is otherwise torch's own.

    Gloo tells when an all-reduce has ended, and runs two at a time in the order in which they were
    asked for: one began when it was asked for, or when all but one of those before it had ended.

    Gloo is asked itself, for everything that DDP asks of it: torch calls what a class derived from
    `ProcessGroup` does not define with the interpreter held, and one of Gloo's threads, which holds
    Gloo's queue while it lets go of an all-reduce that was asked for from Python, needs the
    interpreter for it: both would wait for ever.

    Args:
        gloo: Gloo's group of these workers.
        recorder: takes the events.
    """

    def __init__(self, gloo: Any, recorder: Recorder) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._recorder = recorder
        self._step, self._number = -1, 0
        self._lock = threading.Lock()
        self._ends_s = [0.0] * GLOO_THREADS  # when each of Gloo's threads was free

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        """See `ProcessGroup.allreduce`."""
        queued_s, recorder = time.perf_counter(), self._recorder
        work = self._gloo.allreduce(tensors, *options)
        if recorder.step != self._step:
            self._step, self._number = recorder.step, 0
        of_it = (recorder.step, 0, sum(tensor.nbytes for tensor in tensors))
        number, self._number = self._number, self._number + 1

        def ended(future: Any) -> None:
            end_s, name = time.perf_counter(), f"bucket {number}"
            if recorder.resumed_s > queued_s:  # the interpreter was busy when it ended
                end_s = min(end_s, recorder.resumed_s)
            with self._lock:
                free = self._ends_s.index(min(self._ends_s))
                begin_s, self._ends_s[free] = max(queued_s, self._ends_s[free]), end_s
            recorder.add("queued", name, queued_s, queued_s, *of_it, message=number)
            recorder.add("send", name, begin_s, end_s, *of_it, message=number)

        work.get_future().add_done_callback(ended)
        return work

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        """See `ProcessGroup.broadcast`: of buffers and of the buckets' order."""
        return self._gloo.broadcast(tensors, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """See `ProcessGroup.allgather`: of shapes, before training."""
        return self._gloo.allgather(outputs, inputs, *options)

    def barrier(self, *options: Any) -> Any:
        """See `ProcessGroup.barrier`."""
        return self._gloo.barrier(*options)


def _check_model(plan: Plan, model: torch.nn.Module) -> None:
    """Sizes of buckets are in bytes: dtypes have to be those of the plan, too."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_plan(plan, list(trained), [p.numel() for p in trained.values()])
    for name, planned in zip(plan.names, plan.dtypes, strict=True):
        found = str(trained[name].dtype).removeprefix("torch.")
        if found != planned:
            raise UsageError(
                f"plan of {plan.scheduler!r}: tensor {name!r} is {planned} in the plan and {found} "
                "in the model; make the plan from this model's own trace"
            )
