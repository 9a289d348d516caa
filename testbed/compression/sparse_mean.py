"""The mean of sparse payloads: added in rank order, so that it is identical on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from testbed.compression.sparse import above, pack_sparse, set_places, sparse_count, unpack_sparse

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

    Equal places stand beside each other when they are sorted; payloads are ascending, so that
    sorting merges runs.
    """
    width, total = like.element_size(), like.numel()
    counts = [sparse_count(payload.numel(), total, width) for payload in payloads]
    if sum(counts) * _SPARSE > total:
        return None
    unpacked = [unpack_sparse(payload, like) for payload in payloads]
    places = np.concatenate([indices.numpy() for indices, _ in unpacked])
    order = np.argsort(places, kind="stable")
    in_order = places[order]
    first = np.empty(len(order), bool)
    first[:1] = True
    np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
    slots = np.empty(len(order), np.int64)
    slots[order] = np.cumsum(first) - 1
    union = torch.from_numpy(in_order[first])
    means = torch.zeros(union.numel(), dtype=like.dtype)
    begin = 0
    for (_, selected), count in zip(unpacked, counts, strict=True):
        means.index_add_(0, torch.from_numpy(slots[begin : begin + count]), selected)
        begin += count
    means.div_(len(payloads))
    kept = set_places(means.abs() >= _least(means))
    if kept.numel() < union.numel():
        union, means = union[kept], means[kept]
    return pack_sparse(union, means, total)


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
