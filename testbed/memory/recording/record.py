"""Records one step of a model with its loss and optimizer, before anything is trained."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from testbed.base.errors import UsageError
from testbed.memory.planning.lifetimes import Lifetimes
from testbed.memory.recording.calibrate import calibrate, times_of
from testbed.memory.recording.capture import Rates, Recording
from testbed.memory.recording.storages import LiveStorages, allocated_bytes, is_question, tensors_in

Loss = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


class _Loss(torch.nn.Module):
    """The loss of a model as a module, so that other tensors can stand for its parameters."""

    def __init__(self, model: torch.nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The loss."""
        return self._loss(self.model, batch)


def record(
    model: torch.nn.Module,
    loss: Loss,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer | None = None,
    rates: Rates | None = None,
    *,
    calibrated: bool = False,
) -> Lifetimes:
    """The lifetimes of one step of training, without computing or allocating anything.

    Args:
        model: that is trained; left as it is: what its modules hold, in lists and dictionaries
            too, is restored. One on the device `meta` stands for one on the batch's device.
        loss: `loss(model, batch)`, a tensor of one element.
        batch: samples of one step (of one micro-batch, where gradients are accumulated).
        optimizer: of its parameters; None: nothing is kept between steps.
        rates: how fast operators run.
        calibrated: run each operator once with made-up values, to measure its time and workspace.

    Raises:
        UsageError: the step cannot be run without values, or leaves tensors without values where
            they are not found again.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> step = record(model, lambda m, batch: m(*batch).sum(), (torch.zeros(2, 4),))
        >>> step.units[:3], [v.num_bytes for v in step.values if v.uses]
        (('0', '1', '2'), [64])
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((t.device for t in batch), torch.device("cpu"))

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return fake.from_tensor(tensor)
        with fake:
            return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)

    named = {name: without_values(p) for name, p in model.named_parameters()}
    kept = {**named, **{name: without_values(b) for name, b in model.named_buffers()}}
    given = tuple(fake.from_tensor(t) for t in batch)
    trained = [(n, named[n]) for n, p in model.named_parameters() if p.requires_grad]
    recording = Recording(trained, rates or Rates())
    weight_bytes = recording.sources(list(kept.values()))
    sample_bytes = recording.sources(given)
    wrapped = _Loss(model, loss)
    standing_in: dict[str, torch.Tensor] = {f"model.{n}": tensor for n, tensor in kept.items()}
    with restored({"model": model}, fake), fake:
        try:
            recording.run(model, lambda: torch.func.functional_call(wrapped, standing_in, (given,)))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UsageError(
                f"the memory of a step cannot be foreseen: {error} depends on the values of "
                "tensors; expected a model whose shapes and branches do not"
            ) from error
        except NotImplementedError as error:  # storages of sparse gradients
            sparse = [n for n, m in model.named_modules() if getattr(m, "sparse", False)]
            raise UsageError(
                f"the memory of a step cannot be foreseen: {error}; expected dense tensors, as are "
                f"exchanged; build embeddings with sparse=False ({', '.join(sparse) or 'none'} of "
                "the model's modules are sparse)"
            ) from error
    step = recording.lifetimes(weight_bytes, sample_bytes)
    if calibrated:
        step = _calibrated(step, recording)
    if optimizer is None:
        return step
    with restored({"optimizer": optimizer}, fake):
        state_bytes, update_bytes, share = _of_optimizer(optimizer, model, fake, device)
    return msgspec.structs.replace(
        step, optimizer_bytes=state_bytes, update_bytes=update_bytes, update_share=share
    )


@contextlib.contextmanager
def restored(holders: dict[str, Any], fake: FakeTensorMode) -> Iterator[None]:
    """Afterwards objects, and the modules in a model, hold the attributes that they held before.

    Args:
        holders: by name; code of theirs runs on fake tensors meanwhile, and may keep some.
        fake: that makes these.

    Raises:
        UsageError: fake tensors are left in another object; names it.

    Example:
        >>> model = torch.nn.Identity()
        >>> with restored({"model": model}, FakeTensorMode()):
        ...     model.count = 1
        >>> hasattr(model, "count")
        False
    """
    before: list[tuple[Any, Any]] = []
    for holder in holders.values():
        for part in holder.modules() if isinstance(holder, torch.nn.Module) else [holder]:
            before += [(held, held.copy()) for held in _containers(vars(part))]
    try:
        yield
    finally:
        for held, contents in before:
            held.clear()
            held.extend(contents) if isinstance(held, list | deque) else held.update(contents)
    left = _fake_in(holders, fake)
    if left is not None:
        raise UsageError(
            f"a tensor without values is left in {left} and cannot be put back, so that training "
            "would go on with it; keep tensors from step to step in attributes of modules, lists "
            "or dictionaries, or use --memory none"
        )


def _containers(first: Any) -> list[Any]:
    """What can be changed in place, with what lies in it."""
    found: dict[int, Any] = {}
    left = [first]
    while left:
        held = left.pop()
        if id(held) in found:
            continue
        if isinstance(held, dict):
            left += held.values()
        elif isinstance(held, list | deque | tuple):
            left += held
        elif not isinstance(held, set):
            continue
        found[id(held)] = held
    return [held for held in found.values() if not isinstance(held, tuple)]


NOT_STATE: Final = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)


def _fake_in(holders: dict[str, Any], fake: FakeTensorMode) -> str | None:
    """Where a fake tensor of a mode is held; None: nowhere."""
    seen: set[int] = set()
    left: list[tuple[str, Any]] = list(holders.items())
    while left:
        where, held = left.pop()
        if isinstance(held, FakeTensor) and held.fake_mode is fake:
            return where
        if id(held) in seen or isinstance(held, NOT_STATE):
            continue
        seen.add(id(held))
        if isinstance(held, dict):
            left += [(f"{where}[{key!r}]", value) for key, value in list(held.items())]
        elif isinstance(held, list | deque | tuple | set):
            left += [(f"{where}[{n}]", value) for n, value in enumerate(list(held))]
        elif type(held).__dictoffset__:
            left += [(f"{where}.{name}", value) for name, value in list(vars(held).items())]
    return None


def _calibrated(step: Lifetimes, recording: Recording) -> Lifetimes:
    """With measured times and workspaces instead of estimates."""
    calls = [call for call, _, _ in recording.calls]
    found, failed = calibrate(calls)
    seconds = times_of(dict(enumerate(calls)), found, [time_s for _, _, time_s in recording.calls])
    workspaces = [found[c.key].workspace_bytes if c.key in found else 0 for c in calls]
    workspace, passed = [0] * step.num_positions, [0.0] * step.num_positions
    for (_, position, _), needed, took_s in zip(recording.calls, workspaces, seconds, strict=True):
        workspace[position], passed[position] = needed, took_s
    return msgspec.structs.replace(
        step,
        ops=tuple(
            msgspec.structs.replace(op, time_s=seconds[n], workspace_bytes=workspaces[n])
            for n, op in enumerate(step.ops)
        ),
        time_s=tuple(itertools.accumulate(passed)),
        workspace=tuple(workspace),
        estimated=failed,
    )


def _of_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    fake: FakeTensorMode,
    device: torch.device,
) -> tuple[int, int, float]:
    """What an optimizer of this kind keeps, and needs beside that in a step.

    Args:
        optimizer: of the model's parameters.
        model: that is trained.
        fake: makes tensors without values.
        device: that a model on the device `meta` stands for one on.

    Returns:
        Bytes of its state; bytes beside it in a step over all parameters; the same for one
        parameter alone, over the parameter's bytes.
    """
    with fake, _Numbers():  # type: ignore[no-untyped-call]
        twins = {
            id(p): torch.nn.Parameter(_like(p, device), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        twin = _twin(optimizer, twins)
        gradients = {p: torch.empty_like(p) for p in twins.values() if p.requires_grad}
        largest = max(gradients, key=lambda p: p.nbytes, default=None)
        if largest is None or not largest.nbytes:
            return 0, 0, 0.0
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        try:
            twin.step()
            watch = Peak([*twins.values(), *gradients.values()])
            kept = [list(kept.values()) for kept in twin.state.values()]
            state_bytes = watch.see(tensors_in(kept))
            with watch:
                twin.step()
                all_bytes = watch.peak_bytes
                for parameter in gradients:
                    parameter.grad = gradients[parameter] if parameter is largest else None
                watch.peak_bytes = 0
                twin.step()
        except Exception as error:
            raise UsageError(
                f"what {type(optimizer).__name__} keeps cannot be foreseen: its step on tensors "
                f"without values raises {type(error).__name__}: {error}; expected an optimizer "
                "whose step() needs no argument and no values; use another one, or --memory none"
            ) from error
    return state_bytes, all_bytes, watch.peak_bytes / largest.nbytes


def _twin(
    optimizer: torch.optim.Optimizer, twins: dict[int, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer with the same options for other parameters; nothing is hooked to its step.

    Args:
        optimizer: that trains.
        twins: parameters by the identity of those that they stand for.
    """
    kind = type(optimizer)
    twin = kind.__new__(kind)
    # Not its constructor, whose arguments are its own; nor methods that a schedule has wrapped.
    vars(twin).update((k, v) for k, v in vars(optimizer).items() if not hasattr(kind, k))
    twin.state = defaultdict(dict)  # some have theirs before the first step
    for parameter, kept in optimizer.state.items():
        if id(parameter) in twins:
            there = twins[id(parameter)]
            like = functools.partial(_like, device=there.device)
            twin.state[there] = tree_map_only(torch.Tensor, like, kept)
    twin.param_groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, name, OrderedDict())
    return twin


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device if tensor.is_meta else tensor.device)


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A number that is read from a tensor is 1: sizes of an optimizer's state depend on none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """The most bytes that are made and alive at once while the mode is on.

    Args:
        there: tensors that do not count.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._level = 0
        self._bytes: dict[int, int] = {}
        self._storages = LiveStorages(self._on_birth, self._on_death)
        self.see(there)

    def see(self, tensors: Iterable[torch.Tensor]) -> int:
        """These are there before; returns their bytes."""
        self._storages.see_all(tensors)
        there_bytes, self._level, self.peak_bytes = self._level, 0, 0
        self._bytes.clear()
        return there_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_question(func):
            self._storages.see_all(tensors_in(result))
        return result

    def _on_birth(self, number: int, storage: torch.UntypedStorage) -> None:
        self._bytes[number] = allocated_bytes(storage)
        self._level += self._bytes[number]
        self.peak_bytes = max(self.peak_bytes, self._level)

    def _on_death(self, number: int) -> None:
        self._level -= self._bytes.pop(number, 0)
