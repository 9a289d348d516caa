"""How long operators take here, and what they need beside their arguments and results."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from testbed.memory.host import zeros_on_host
from testbed.memory.planning.lifetimes import Costs
from testbed.memory.recording.storages import allocated_bytes, tensors_in

SMALL_BYTES: Final = 1 << 16
"""Operators that read and write fewer bytes are not measured."""


NO_MEMORY: Final = "can't allocate memory"  # PyTorch's words for a CPU, in a plain RuntimeError


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def make(self) -> torch.Tensor:
        """A tensor of this form: uniform numbers, or zeros of a dtype that has none."""
        sizes = zip(self.shape, self.stride, strict=True)
        last = sum((size - 1) * stride for size, stride in sizes)
        flat = torch.empty(0 if 0 in self.shape else last + 1, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            flat.uniform_(-1.0, 1.0)
        else:
            flat.zero_()
        return flat.as_strided(self.shape, self.stride)  # elements of an expanded one share memory


class OperatorSpec:
    """One run of an operator, told by the forms of its arguments.

    Args:
        func: the operator.
        args: of the run.
        kwargs: of the run.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, tree = tree_flatten((args, kwargs))
        self.func = func
        self._leaves = [TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self._tree = tree
        self.key = (str(func), repr(self._leaves))

    @property
    def num_bytes(self) -> int:
        """Of the tensors that it is given."""
        return sum(leaf.num_bytes for leaf in self._leaves if isinstance(leaf, TensorSpec))

    @property
    def has_seed(self) -> bool:
        """Whether it is given a single integer in a tensor, as the seed of a GPU's attention.

        Where that lies is not known of a recording: a kernel reads a seed on the host or on the
        device, as the pass before has put it, and ends the process if it is not there.
        """
        specs = [leaf for leaf in self._leaves if isinstance(leaf, TensorSpec)]
        return any(not s.shape and not s.dtype.is_floating_point for s in specs)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of these forms."""
        leaves = [leaf.make() if isinstance(leaf, TensorSpec) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs


@dataclass(frozen=True)
class Measured:
    """Of one operator and the forms of its arguments.

    Attributes:
        time_s: what it takes, after a first run.
        workspace_bytes: most that it holds while it runs, beside arguments and results.
    """

    time_s: float
    workspace_bytes: int


def calibrate(
    calls: Iterable[OperatorSpec],
) -> tuple[dict[tuple[str, str], Measured], tuple[str, ...]]:
    """Run each operator with made-up arguments of the same forms.

    No more than one operator's arguments, results and workspace exist at once.

    Args:
        calls: those of a step; equal ones are run once.

    Returns:
        What was measured, and the names of operators that cannot be run with made-up values.

    Raises:
        RuntimeError: there is no memory for an operator.

    Example:
        >>> adding = OperatorSpec(torch.ops.aten.add.Tensor, (torch.ones(1 << 15), 1.0), {})
        >>> found, failed = calibrate([adding, adding])
        >>> len(found), failed
        (1, ())
    """
    large = {call.key: call for call in calls if call.num_bytes >= SMALL_BYTES}
    distinct = {key: call for key, call in large.items() if not call.has_seed}
    random_state = torch.get_rng_state()
    found: dict[tuple[str, str], Measured] = {}
    failed: dict[str, None] = {str(call.func): None for call in large.values() if call.has_seed}
    try:
        with torch.no_grad():
            for key, call in distinct.items():
                measured = _measure(call)
                if measured is None:
                    failed[str(call.func)] = None
                else:
                    found[key] = measured
    finally:
        torch.set_rng_state(random_state)
        give_back_pages()  # else the training's memory hides in what was freed here
    return found, tuple(failed)


def _measure(call: OperatorSpec) -> Measured | None:
    try:
        args, kwargs = call.arguments()
        device = next((t.device for t in tensors_in(args, kwargs)), torch.device("cpu"))
        given = {t.untyped_storage()._cdata for t in tensors_in(args, kwargs)}
        meter = _meter(device)
        result = call.func(*args, **kwargs)
        held_bytes = meter()
        fresh = {
            t.untyped_storage()._cdata: allocated_bytes(t.untyped_storage())
            for t in tensors_in(result)
        }
        made_bytes = sum(size for key, size in fresh.items() if key not in given)
        del result
        times = []
        for _ in range(2):
            began_s = time.perf_counter()
            call.func(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began_s)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise
        return None  # it depends on values: it keeps its estimate
    return Measured(min(times), max(0, held_bytes - made_bytes))


MOVED_BYTES: Final = 64 << 20  # of a copy whose time tells the rate


def moving_costs(device: torch.device) -> Costs:
    """What moving between a device and the host takes here: measured on a GPU.

        rate = bytes / max(time to the host, time back)

    A GPU's copies through pinned memory are made by an engine of its own, so that computing loses
    nothing to them. What a CPU's take is not measured.

    Example:
        >>> moving_costs(torch.device("cpu")) == Costs()
        True
    """
    if device.type != "cuda":
        return Costs()
    here = torch.zeros(MOVED_BYTES, dtype=torch.uint8, device=device)
    there = zeros_on_host(MOVED_BYTES, torch.uint8, device)
    slowest_s = max(_copy_s(here, there), _copy_s(there, here))
    return Costs(host_bytes_per_s=MOVED_BYTES / slowest_s, copy_share=0.0)


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one copy on the device; the least of a few."""
    found = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream((source if source.is_cuda else target).device)
        begin.record(stream)
        target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) * 1e-3)
    return min(found)


# What is held at most from now on: of the device's allocator, or of the process.

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def _meter(device: torch.device) -> Callable[[], int]:
    """Begins to watch; returns what tells the largest growth since then, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before, _ = asked_bytes(device)
        return lambda: asked_bytes(device)[1] - before
    if not _CLEAR.exists():
        return lambda: 0
    give_back_pages()  # so that what it needs is taken from the system anew
    _CLEAR.write_text("5")
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def asked_bytes(device: torch.device) -> tuple[int, int]:
    """What PyTorch's allocator was asked for on a GPU and holds: now, and at most since a reset.

    What it has handed out (`torch.cuda.memory_allocated`) is more: a free block that is up to a
    mebibyte larger than what is asked for is handed out whole, which depends on what came before.
    """
    found = torch.cuda.memory_stats(device)
    return found["requested_bytes.all.current"], found["requested_bytes.all.peak"]


def give_back_pages() -> None:
    """Let the C library's allocator return what was freed to the system, where it can (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def times_of(
    calls: Mapping[int, OperatorSpec],
    found: Mapping[tuple[str, str], Measured],
    estimated: list[float],
) -> list[float]:
    """Seconds of each operator: measured, or estimated times what measuring showed of these.

    Args:
        calls: by number.
        found: what was measured.
        estimated: seconds of each operator.
    """
    known = [(found[c.key].time_s, estimated[n]) for n, c in calls.items() if c.key in found]
    theirs = sum(estimate for _, estimate in known)
    factor = sum(measured for measured, _ in known) / theirs if theirs else 1.0
    return [
        found[calls[n].key].time_s if n in calls and calls[n].key in found else seconds * factor
        for n, seconds in enumerate(estimated)
    ]
