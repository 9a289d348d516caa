"""The mean of sparse payloads: added in rank order, so that it is identical on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from testbed.base.listed import sparse_tensor
from testbed.compression.selection import above
from testbed.compression.sparse import (
    pack_sparse,
    set_places,
    sparse_count,
    unpack_sparse,
)

_SPARSE = 4  # elements for each one that was sent, above which a pass over all costs more


class SparseMeans:
    """A `Merger`'s means as sparse payloads.

    On a server the merged payload holds the union of all selections: it grows with the ranks
    until it is dense, which a ring's gather never does.
    """

    def pack_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """See `Merger.pack_mean`: what is not zero, or all of it."""
        indices = above(mean, _least(mean))
        return pack_sparse(indices, mean[indices], mean.numel())

    def unpack_mean(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Merger.unpack_mean`."""
        return add_sparse(torch.zeros_like(like), payload)


@dataclass(frozen=True)
class SparseMerger(SparseMeans):
    """See `Merger`; for payloads made by `pack_sparse`."""

    def combine(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """See `Merger.combine`.

        Example:
            >>> parts = (pack_sparse(torch.tensor([3]), torch.tensor([4.0]), 6),) * 2
            >>> SparseMerger().combine(parts, torch.zeros(6)).tolist()
            [0.0, 0.0, 0.0, 4.0, 0.0, 0.0]
        """
        return self.place(payloads, torch.empty_like(like))

    def place(self, payloads: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """See `Placing.place`."""
        total, places = _sum(payloads, out.zero_())
        if places is None:
            return total.div_(len(payloads))
        total[places] = total[places].div_(len(payloads))  # the same at places that came twice
        return total

    def place_mean(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See `Placing.place_mean`."""
        return add_sparse(out.zero_(), payload)

    def cut(
        self, payload: torch.Tensor, like: torch.Tensor, bounds: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        """See `Cutting.cut`.

        Example:
            >>> whole = pack_sparse(torch.tensor([1, 600]), torch.tensor([2.0, 4.0]), 1000)
            >>> _, second = SparseMerger().cut(whole, torch.zeros(1000), (0, 500, 1000))
            >>> unpack_sparse(second, torch.zeros(500))
            (tensor([100]), tensor([4.]))
        """
        width = like.element_size()
        if payload.numel() == like.numel() * width:
            return tuple(payload[low * width : high * width] for low, high in pairwise(bounds))
        indices, selected = unpack_sparse(payload, like)
        ends = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
        return tuple(
            pack_sparse(indices[first:end] - low, selected[first:end], high - low)
            for (first, end), (low, high) in zip(pairwise(ends), pairwise(bounds), strict=True)
        )

    def list_mean(
        self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor
    ) -> torch.Tensor | None:
        """See `Listing.list_mean`.

        Example:
            >>> parts = (pack_sparse(torch.tensor([3]), torch.tensor([4.0]), 600),) * 2
            >>> SparseMerger().list_mean(parts, torch.zeros(600))._values()
            tensor([4.])
        """
        few = _few(payloads, like)
        return None if few is None else sparse_tensor(*few, like.numel())

    def list_packed(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """See `Listing.list_packed`: a mean is packed as any other payload."""
        return self.list_mean((payload,), like)

    def unite(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """See `Uniting.unite`: where they are few, only elements that somebody sent are looked at.

        Example:
            >>> parts = (pack_sparse(torch.tensor([3]), torch.tensor([4.0]), 600),) * 2
            >>> SparseMerger().unite(parts, torch.zeros(600)).equal(parts[0])
            True
        """
        if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
            united = unite_few(payloads, like)
            if united is not None:
                return united
        return self.unite_densely(payloads, like)

    def unite_densely(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """`unite`, by way of a tensor of the message's size."""
        total, named = _sum(payloads, torch.zeros_like(like))
        if named is None:
            return self.pack_mean(total.div_(len(payloads)))
        marks = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
        marks[named] = True
        places = set_places(marks)
        means = total[places].div_(len(payloads))
        kept = set_places(means.abs() >= _least(means))
        return pack_sparse(places[kept], means[kept], like.numel())


def unite_few(payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor | None:
    """`SparseMerger.unite` where few elements were sent, of which alone it needs memory; or None.

    Args:
        payloads: of all ranks.
        like: on a CPU.
    """
    few = _few(payloads, like)
    if few is None:
        return None
    union, means = few
    kept = set_places(means.abs() >= _least(means))
    if kept.numel() < union.numel():
        union, means = union[kept], means[kept]
    return pack_sparse(union, means, like.numel())


def _few(
    payloads: tuple[torch.Tensor, ...], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ascending places that payloads name, and the means there; None: they are too many."""
    width, total = like.element_size(), like.numel()
    counts = [sparse_count(payload.numel(), total, width) for payload in payloads]
    if sum(counts) * _SPARSE > total:
        return None
    unpacked = [unpack_sparse(payload, like) for payload in payloads]
    if len(unpacked) == 1:
        ((union, selected),) = unpacked
        return union, torch.zeros_like(selected).add_(selected)
    union, slots = _union([indices for indices, _ in unpacked])
    means = torch.zeros(union.numel(), dtype=like.dtype, device=like.device)
    for (_, selected), mine in zip(unpacked, torch.split(slots, counts), strict=True):
        means.index_add_(0, mine, selected)
    return union, means.div_(len(payloads))


def _union(places: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """All distinct places, ascending, and for each given one its number among them.

    Equal places stand beside each other when they are sorted; those of each payload ascend, so that
    sorting merges runs, which NumPy does several times as fast.
    """
    together = torch.cat(places)
    if together.device.type != "cpu":
        union, slots = torch.unique(together, return_inverse=True)
        return union, slots
    order = np.argsort(together.numpy(), kind="stable")
    in_order = together.numpy()[order]
    first = np.empty(len(order), bool)
    first[:1] = True
    np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
    slots = np.empty(len(order), np.int64)
    slots[order] = np.cumsum(first) - 1
    return torch.from_numpy(in_order[first]), torch.from_numpy(slots)


def _sum(
    payloads: tuple[torch.Tensor, ...], total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add to zeros [n] in rank order; also the places that the payloads name, None: too many."""
    count = 0
    named: list[torch.Tensor] = []
    for payload in payloads:
        indices, selected = unpack_sparse(payload, total)
        count += indices.numel()
        if count * _SPARSE <= total.numel():
            named.append(indices)
        else:
            named.clear()
        _add(total, indices, selected)
    few = bool(named) and count * _SPARSE <= total.numel()
    return total, torch.cat(named) if few else None


def _least(values: torch.Tensor) -> float:
    """The smallest number above 0 that the dtype has."""
    return torch.finfo(values.dtype).smallest_normal * torch.finfo(values.dtype).eps


def add_sparse(total: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
    """Add a sparse payload to a dense tensor [n], in place.

    Example:
        >>> add_sparse(torch.ones(3), pack_sparse(torch.tensor([1]), torch.tensor([4.0]), 3))
        tensor([1., 5., 1.])
    """
    return _add(total, *unpack_sparse(payload, total))


def _add(total: torch.Tensor, indices: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    if indices.numel() == total.numel():
        return total.add_(selected)
    # Indices are distinct, so this equals an addition at each of them, in any order.
    return total.index_add_(0, indices, selected)
