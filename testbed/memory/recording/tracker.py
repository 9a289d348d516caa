"""Measures how many bytes of storages are alive in a step, by what they are for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.memory.host import is_on_host
from testbed.memory.recording.storages import (
    LiveStorages,
    allocated_bytes,
    is_question,
    is_sum_of_gradients,
    tensors_in,
)

CATEGORIES: Final = (
    "weights",
    "optimizer",
    "gradients",
    "activations",
    "temporary",
    "communication",
)
HOST = "host"


class Tracker(TorchDispatchMode):
    """Every storage that is alive while the mode is on, and the moment at which most bytes are.

    What is made in a forward pass counts as activations, in a backward pass or in the optimizer's
    step as temporary until it turns out to be a gradient or the optimizer's state; what is made
    `elsewhere` as communication. Storages outside the device do not count for the peak.

    Args:
        model: that is trained.
        optimizer: of its parameters.
        communication: tensors that are kept for exchanging: buckets, residuals.

    Attributes:
        peak_bytes: largest number of bytes alive at once.
        peak: the same by category.
        curve: bytes of each category after every event.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        communication: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.peak = dict.fromkeys(CATEGORIES, 0)
        self.curve: list[tuple[int, ...]] = []
        self._optimizer = optimizer
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self._now = dict.fromkeys((*CATEGORIES, HOST), 0)
        self._entries: dict[int, tuple[str, int]] = {}
        self._is_stepping = False
        self._category = "activations"
        self._storages = LiveStorages(self._on_birth, self._on_death)
        self._lock = self._storages.lock
        self._handles: list[Any] = []
        self._see([*self._parameters, *model.buffers()], "weights")
        self._see((p.grad for p in self._parameters if p.grad is not None), "gradients")
        self._see(communication, "communication")
        self._see_state()

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(self._now[category] for category in CATEGORIES)

    def __enter__(self) -> Any:
        self._handles = [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in self._parameters
            if p.requires_grad
        ]
        self._handles += [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._storages.settle_sum()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_question(func):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if is_sum_of_gradients(func, args):
            with self._lock:
                self._count_as(self._category_now())
                self._storages.see_sum(result, args)
            return result
        is_mapped = func is torch.ops.aten.from_file.default
        self.saw(tensors_in(result), HOST if is_mapped else self._category_now())
        return result

    def saw(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """An operator has made these, or changed them."""
        with self._lock:
            self._count_as(category)
            self._storages.see_all(tensors)

    def elsewhere(self) -> TorchDispatchMode:
        """A mode for another thread, whose storages count as communication."""
        return _Elsewhere(self)

    def _count_as(self, category: str) -> None:
        self._storages.settle_sum()  # a sum that is not counted yet is of the category before
        self._category = category

    def _category_now(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        return "temporary" if self._is_stepping or in_backward else "activations"

    def _see(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        with self._lock:
            for tensor in tensors:
                there = HOST if is_on_host(tensor, self._device) else category
                self._count_as(there)
                self._move(self._storages.see(tensor), there)

    def _see_state(self) -> None:
        state = self._optimizer.state.values()
        self._see(tensors_in([list(each.values()) for each in state]), "optimizer")

    def _move(self, number: int, category: str) -> None:
        before, num_bytes = self._entries[number]
        if before != category and before != HOST:
            self._now[before] -= num_bytes
            self._now[category] += num_bytes
            self._entries[number] = (category, num_bytes)

    def _on_birth(self, number: int, storage: torch.UntypedStorage) -> None:
        category = self._category
        if storage.device.type != self._device.type:
            category = HOST
        num_bytes = allocated_bytes(storage)
        self._entries[number] = (category, num_bytes)
        self._now[category] += num_bytes
        self._note()

    def _on_death(self, number: int) -> None:
        category, num_bytes = self._entries.pop(number)
        self._now[category] -= num_bytes
        self._note()

    def _note(self) -> None:
        level = tuple(self._now[category] for category in CATEGORIES)
        self.curve.append(level)
        if sum(level) > self.peak_bytes:
            self.peak_bytes = sum(level)
            self.peak = dict(zip(CATEGORIES, level, strict=True))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._see([parameter.grad], "gradients")

    def _before_step(self, *ignored: Any) -> None:
        self._is_stepping = True

    def _after_step(self, *ignored: Any) -> None:
        self._is_stepping = False
        self._see_state()


class _Elsewhere(TorchDispatchMode):
    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_question(func):
            self._tracker.saw(tensors_in(result), "communication")
        return result


_STATUS = Path("/proc/self/status")


class ResidentPeak:
    """The largest anonymous resident set of this process while the context is open, sampled.

    Mapped files and shared memory are not in it. On systems without /proc nothing is measured.

    Attributes:
        peak_bytes: largest value seen.
        allocated_bytes: most that was in use of the C library's allocator; None: it does not tell.
    """

    def __init__(self) -> None:
        self.peak_bytes, self.allocated_bytes = anonymous_bytes(), allocated_from_c()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="resident", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while self.peak_bytes is not None and not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes() or 0)
            if self.allocated_bytes is not None:
                self.allocated_bytes = max(self.allocated_bytes, allocated_from_c() or 0)


def anonymous_bytes() -> int | None:
    """The anonymous resident set of this process; None: the system does not tell."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _MALLINFO]


def allocated_from_c() -> int | None:
    """What this process holds of the C library's allocator, freed blocks left out.

    Returns:
        Bytes; None: the library is not glibc 2.33 or later, and does not tell.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo
    told = libc.mallinfo2()
    return int(told.uordblks + told.hblkhd)
