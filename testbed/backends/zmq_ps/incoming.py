"""Parts of other workers as they come in, slice by slice, of sizes not known before."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from testbed.backends.zmq_ps.buffers import TORCH_DTYPES, bytes_of, copy_in
from testbed.backends.zmq_ps.wire import Header


class IncomingParts:
    """One part from each source; the first slice of a part tells its size.

    Args:
        sources: the workers from which a part is to come, if only an empty one.
    """

    def __init__(self, sources: Iterable[int]) -> None:
        self._parts: dict[int, torch.Tensor] = {}
        self._missing = dict.fromkeys(sources, 1)

    @property
    def complete(self) -> bool:
        """Whether all elements of all parts are here."""
        return not any(self._missing.values())

    def take(self, header: Header, payload: memoryview) -> None:
        """A slice of the part of worker `header.root`.

        Raises:
            KeyError: no part is expected from there.
        """
        source = header.root
        if source not in self._parts:
            dtype = TORCH_DTYPES[header.dtype]
            self._parts[source] = torch.empty(header.total_elements, dtype=dtype)
            self._missing[source] = header.total_elements
        copy_in(bytes_of(self._parts[source]), header.offset * header.element_size, payload)
        self._missing[source] -= header.num_elements

    def with_own(self, rank: int, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All parts in rank order, this rank's own among them."""
        parts = {**self._parts, rank: own}
        return tuple(parts[r] for r in sorted(parts))
