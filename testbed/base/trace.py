"""`testbed.trace/1`: how long each tensor's layer computes, and how large its gradient is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES

TRACE_SCHEMA: Final = "testbed.trace/1"


class TraceTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One gradient.

    Attributes:
        name: the parameter's name.
        num_elements: its size.
        dtype: of the gradient as it travels.
        forward_s: forward time of its layer that this tensor accounts for.
        backward_s: time from the previous gradient's readiness (in backward order) to its own.
    """

    name: str
    num_elements: int
    dtype: str = "float32"
    forward_s: float
    backward_s: float

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.num_elements * ELEMENT_BYTES[self.dtype]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded or derived training step, tensors in **forward** order.

    Attributes:
        name: of the workload.
        device: where it was recorded.
        batch_size: samples per worker.
        tensors: in forward order; backward runs from the last to the first.
        consumers: for each tensor the indices of tensors whose layer reads its layer's output
            (the DAG); None = a chain.
        extra: keys of the file that this version does not know, kept for a round trip.
    """

    name: str
    device: str
    batch_size: int
    tensors: tuple[TraceTensor, ...]
    consumers: tuple[tuple[int, ...], ...] | None = None
    extra: dict[str, Any] = {}

    @classmethod
    def from_backward(
        cls,
        backward_s: Sequence[float],
        num_elements: Sequence[int],
        forward_s: Sequence[float] | None = None,
        dtypes: Sequence[str] | None = None,
        name: str = "example",
    ) -> Trace:
        """A trace from one value per gradient, in **backward** order, as the papers list them.

        Args:
            backward_s: backward time of each gradient, seconds.
            num_elements: of each gradient.
            forward_s: forward time of each, seconds; None = 0.
            dtypes: of each; None = `uint8`, so that an element is a byte.
            name: of the trace.

        Example:
            >>> trace = Trace.from_backward([2, 1], num_elements=[4, 8])
            >>> [(t.name, t.num_bytes, t.backward_s) for t in trace.tensors]
            [('t0', 8, 1), ('t1', 4, 2)]
        """
        rows = zip(
            backward_s,
            num_elements,
            forward_s or [0.0] * len(num_elements),
            dtypes or ["uint8"] * len(num_elements),
            strict=True,
        )
        tensors = tuple(
            TraceTensor(
                name=f"t{index}",
                num_elements=size,
                dtype=dtype,
                forward_s=forward,
                backward_s=backward,
            )
            for index, (backward, size, forward, dtype) in enumerate(reversed(list(rows)))
        )
        return cls(name=name, device="cpu", batch_size=1, tensors=tensors)

    @property
    def forward_s(self) -> float:
        """Time of the whole forward pass."""
        return sum(t.forward_s for t in self.tensors)

    @property
    def backward_s(self) -> float:
        """Time of the whole backward pass."""
        return sum(t.backward_s for t in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(t.num_bytes for t in self.tensors)

    def stretched(self, factor: float) -> Trace:
        """The trace with all times multiplied.

        Example:
            >>> Trace.from_backward([2, 1], num_elements=[4, 8]).stretched(10.0).backward_s
            30.0
        """
        tensors = tuple(
            msgspec.structs.replace(
                t, forward_s=factor * t.forward_s, backward_s=factor * t.backward_s
            )
            for t in self.tensors
        )
        return msgspec.structs.replace(self, tensors=tensors)

    def delayed(self, late_s: Mapping[str, float]) -> Trace:
        """The trace with gradients that are ready later than in it.

        Args:
            late_s: by the tensor's name, by how much; one that is not there is as late as the
                gradient before it.

        Example:
            >>> trace = Trace.from_backward([2, 1], num_elements=[4, 8])
            >>> trace.delayed({"t1": 5.0}).ready_s()
            [8.0, 7.0]
        """
        tensors, before_s = [], 0.0
        for tensor in reversed(self.tensors):
            now_s = max(before_s, late_s.get(tensor.name, before_s))
            longer_s = tensor.backward_s + now_s - before_s
            tensors.append(msgspec.structs.replace(tensor, backward_s=longer_s))
            before_s = now_s
        return msgspec.structs.replace(self, tensors=tuple(reversed(tensors)))

    def ready_s(self) -> list[float]:
        """When each gradient (in forward order) is ready, from the start of backward.

        Example:
            >>> tensors = (TraceTensor(name="a", num_elements=1, forward_s=0, backward_s=2),
            ...            TraceTensor(name="b", num_elements=1, forward_s=0, backward_s=1))
            >>> Trace(name="t", device="cpu", batch_size=1, tensors=tensors).ready_s()
            [3.0, 1.0]
        """
        ready: list[float] = []
        now_s = 0.0
        for tensor in reversed(self.tensors):
            now_s += tensor.backward_s
            ready.append(now_s)
        return ready[::-1]
