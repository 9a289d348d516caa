"""Selection of the largest elements, whose indices are to be sent.

A threshold from a sample, one scan in cache, an exact choice among the few that are left. Ties go
to the lower index, so that all implementations agree. `largest_plainly` and `above_plainly` are the
slow references.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from testbed.compression.sparse import set_places

# Of a scan: elements whose magnitudes and marks stay in a cache between the three operations.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
_SMALL = 1 << 15  # below this the library's own selection is as fast
_STRIDE = 100  # of the sample: 1 %, as in DGC


def above(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices (int64) of all |value| >= threshold; one pass over the memory.

    Example:
        >>> above(torch.tensor([1.0, -3.0, 2.0]), 2.0).tolist()
        [1, 2]
    """
    found = _above(values, threshold, values.numel())
    assert found is not None
    return found


def _above(values: torch.Tensor, threshold: float, at_most: int) -> torch.Tensor | None:
    """See `above`; None: they are more than `at_most`, which is noticed before all are listed."""
    scan = _scan_numpy if _fits_numpy(values) else _scan
    found: list[torch.Tensor] = []
    for places in scan(values, float(threshold), _chunk_of(values)):
        at_most -= places.numel()
        if at_most < 0:
            return None
        found.append(places)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def _chunk_of(values: torch.Tensor) -> int:
    return max(1, min(values.numel(), _CHUNK.get(values.device.type, 1 << 20)))


def _scan(values: torch.Tensor, threshold: float, size: int) -> Iterator[torch.Tensor]:
    magnitudes = torch.empty(size, dtype=values.dtype, device=values.device)
    marks = torch.empty(size, dtype=torch.bool, device=values.device)
    for start in range(0, values.numel(), size):
        chunk = values[start : start + size]
        magnitude, mark = magnitudes[: chunk.numel()], marks[: chunk.numel()]
        torch.abs(chunk, out=magnitude)
        torch.ge(magnitude, threshold, out=mark)
        yield set_places(mark) + start


def _scan_numpy(values: torch.Tensor, threshold: float, size: int) -> Iterator[torch.Tensor]:
    """As `_scan`; NumPy compares eight times as fast on a CPU."""
    array = values.numpy()
    if threshold > float(np.finfo(array.dtype).max):  # nothing reaches it
        return
    magnitudes, marks = np.empty(size, array.dtype), np.empty(size, bool)
    for start in range(0, len(array), size):
        chunk = array[start : start + size]
        magnitude, mark = magnitudes[: len(chunk)], marks[: len(chunk)]
        np.abs(chunk, out=magnitude)
        np.greater_equal(magnitude, threshold, out=mark)
        yield torch.from_numpy(np.flatnonzero(mark) + start)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices (int64) of the `count` largest magnitudes, exactly; ties: lower index.

    A threshold that surely lies below the wanted one comes from a strided sample; what one scan
    finds above it (some 6 % too many at 1 %) is sorted out exactly. A sample that misled costs
    more scans, never a wrong answer. Nothing is made that grows with n rather than with `count`,
    unless n is below 32 768 or `count` above n / 4.

    Args:
        values: [n], finite.
        count: 0 .. n.

    Example:
        >>> largest(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
        [1, 2]
    """
    total = values.numel()
    if count >= total:
        return torch.arange(total, device=values.device)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if total >= _SMALL and count * 4 <= total:
        sample = values[::_STRIDE].abs()
        wanted = count * sample.numel() / total
        rank = math.ceil(wanted + 3 * math.sqrt(wanted) + 3)
        if rank < sample.numel():
            threshold = _kth_largest(sample, rank)
            candidates = _above(values, threshold, 2 * _STRIDE * rank)
            if candidates is not None and candidates.numel() >= count:
                return candidates[_exactly(values[candidates].abs(), count)]
        return largest_by_counting(values, count)
    return _exactly(values.abs(), count)


def largest_by_counting(values: torch.Tensor, count: int) -> torch.Tensor:
    """`largest` of any values: the `count`-th magnitude's bits are found 16 at a time.

    Magnitudes are ordered as their bits are, read as integers. A scan counts, of those that begin
    with the bits that are known, how often each next 16 occur; the last one lists the places.

    Args:
        values: [n], finite.
        count: 1 .. n.

    Example:
        >>> largest_by_counting(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
        [1, 2]

    Reference:
        Knuth, 1973 (distribution counting, radix exchange).
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    chunks = torch.split(values, _chunk_of(values))
    known, left = 0, count  # left: wanted of those that begin with the known bits
    width = 8 * values.element_size()
    for shift in range(width - 16, -1, -16):
        counts = torch.zeros(1 << 16, dtype=torch.int64, device=values.device)
        for chunk in chunks:
            bits = (chunk.abs().view(whole) >> shift).to(torch.int64)
            if shift < width - 16:
                bits = bits[bits >> 16 == known]
            counts += torch.bincount(bits & 0xFFFF, minlength=1 << 16)
        reached = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(reached, left))
        left -= int(reached[place - 1]) if place else 0
        known = (known << 16) + (1 << 16) - 1 - place
    found = []
    for number, chunk in enumerate(chunks):
        bits = chunk.abs().view(whole)
        mark = bits > known
        equal = set_places(bits == known)[:left]
        left -= equal.numel()
        mark[equal] = True
        found.append(set_places(mark) + number * chunks[0].numel())
    return torch.cat(found)


def sampled(values: torch.Tensor, count: int, offset: int) -> torch.Tensor:
    """Ascending indices of about `count` largest magnitudes, by a sampled threshold.

    The threshold is that of a 1 % strided sample. Between 0.8 and 1.3 times `count` is taken as
    it is; more is cut down to `count` exactly; less multiplies the threshold by 0.8 and looks
    again, at most 10 times.

    Args:
        values: [n], finite.
        count: wanted, 0 .. n.
        offset: where the sample starts, 0 .. 99; let it vary from step to step.

    Reference:
        Lin et al., 2018, ICLR (DGC). Departs: below 32 768 elements, or where ten corrections
        did not help, the selection is exact.

    Example:
        >>> sampled(torch.tensor([1.0, -3.0, 2.0]), 1, 0).tolist()
        [1]
    """
    total = values.numel()
    if total < _SMALL or count * 4 > total:
        return largest(values, count)
    sample = values[offset % _STRIDE :: _STRIDE].abs()
    threshold = _kth_largest(sample, max(1, round(count * sample.numel() / total)))
    for _ in range(11):
        if threshold <= 0:
            break
        found = _above(values, threshold, 4 * count)
        if found is None:
            break
        if found.numel() > 1.3 * count:
            return found[_exactly(values[found].abs(), count)]
        if found.numel() >= 0.8 * count:
            return found
        threshold *= 0.8
    return largest(values, count)


def _exactly(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending places of the `count` largest of [n] magnitudes, 1 <= count <= n."""
    if count == magnitudes.numel():
        return torch.arange(count, device=magnitudes.device)
    threshold = _kth_largest(magnitudes, count)
    places = set_places(magnitudes >= threshold)
    surplus = places.numel() - count
    if surplus == 0:
        return places
    equal = (magnitudes[places] == threshold).nonzero().view(-1)
    keep = torch.ones(places.numel(), dtype=torch.bool, device=magnitudes.device)
    keep[equal[equal.numel() - surplus :]] = False
    return places[keep]


def _kth_largest(magnitudes: torch.Tensor, count: int) -> float:
    """The `count`-th largest of [n], 1 <= count <= n."""
    if _fits_numpy(magnitudes):
        place = magnitudes.numel() - count
        return float(np.partition(magnitudes.numpy(), place)[place])
    return float(torch.topk(magnitudes, count, sorted=False).values.min())


def _fits_numpy(values: torch.Tensor) -> bool:
    """Whether NumPy can work on it."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def largest_plainly(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` largest magnitudes; ties: lower index.

    Example:
        >>> largest_plainly(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
        [1, 2]
    """
    order = torch.argsort(values.abs(), descending=True, stable=True)
    return order[:count].sort().values


def above_plainly(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices of all |value| >= threshold.

    Example:
        >>> above_plainly(torch.tensor([1.0, -3.0, 2.0]), 2.0).tolist()
        [1, 2]
    """
    return (values.abs() >= threshold).nonzero().view(-1)
