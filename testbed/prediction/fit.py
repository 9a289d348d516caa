"""Fits start-up time and time per byte to measured times, robustly; pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from testbed.base.errors import UsageError
from testbed.base.link import Link, Piece

Floats = NDArray[np.float64]

MAX_PIECES = 3
MIN_SIZES_PER_PIECE = 3
MAX_BREAKS = 20
# Relative error of a size that is taken for noise; smaller ones show no switch of the protocol.
TOLERANCE = 0.03
SHARE_WEIGHT = 10.0
MANY = 10  # from so many samples on, a tenth is left out at each end


@dataclass(frozen=True)
class _Sizes:
    """The distinct sizes, ascending; for each its median time and that median's relative error."""

    num_bytes: Floats
    time_s: Floats
    error: Floats
    samples: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Line:
    latency_s: float
    seconds_per_byte: float
    cost: float


def fit_link(
    backend: str,
    num_workers: int,
    samples: Sequence[tuple[float, float]],
    shares: Mapping[float, float] | None = None,
) -> Link:
    """The start-up and per-byte time that explain measured times best, in one to three pieces.

        minimise  sum over sizes of rho(((a + b M) / t_M - 1) / e_M),   a, b >= 0

    t_M is the median of a size's samples (of 10 or more the mean without the tenth at each end: the
    time of a step is a sum, to which slow messages add) and e_M its relative standard error
    together with a tolerance of 3 %, over 1 + 10 w_M where it takes a share w_M of a step's time;
    rho is soft L1, under which a disturbed size pulls no harder however far off it is. Relative
    misses make 4 KiB and 64 MiB count alike, medians make outliers harmless within a size, soft L1
    across sizes.

    Pieces: where the library changes its protocol, start-up and slope jump, so each piece has a
    line of its own and nothing forces neighbours to meet. Among all ways to cut the sizes into one
    to three pieces of at least three sizes the one with the least cost + p ln(n) is taken (Schwarz'
    criterion with known errors; n sizes, p = 2 for each line and 1 for each cut). A cut lies at
    the geometric mean of the sizes around it. `Link.latency_s` and `seconds_per_byte` are always
    those of one line through all sizes: the papers' rules know no pieces.

    Args:
        backend: named in the link.
        num_workers: of the measurement; for one everything is free.
        samples: (bytes, seconds) of single messages, any number for each size.
        shares: size -> the share of a step's communication that messages of this size take; None =
            nothing is known of a step.

    Returns:
        A link with the fit's residuals under the key `fit` of `Link.extra`.

    Raises:
        UsageError: fewer than two sizes, or a size or time that is not above 0.

    Example:
        >>> link = fit_link("x", 2, [(m, 1e-4 + 1e-9 * m) for m in (1e4, 1e5, 1e6, 1e7)])
        >>> f"{link.latency_s:.3g} {link.seconds_per_byte:.3g} {link.pieces}"
        '0.0001 1e-09 None'

    Reference:
        Shi, Chu and Li, 2019, INFOCOM (MG-WFBP), fit one line by ordinary least squares. Departs:
        robust, relative and piecewise, because absolute misses would let the largest sizes decide
        the start-up time. Schwarz, 1978, Annals of Statistics.
    """
    if num_workers == 1:
        return Link(backend=backend, num_workers=1, latency_s=0.0, seconds_per_byte=0.0)
    sizes = _group(samples, shares or {})
    whole = _fit_line(sizes, 0, len(sizes.num_bytes))
    cuts, lines = _best_pieces(sizes, whole)
    limits = [math.sqrt(sizes.num_bytes[c - 1] * sizes.num_bytes[c]) for c in cuts]
    pieces = tuple(
        Piece(max_bytes=limit, latency_s=line.latency_s, seconds_per_byte=line.seconds_per_byte)
        for limit, line in zip([*limits, None], lines, strict=True)
    )
    link = Link(
        backend=backend,
        num_workers=num_workers,
        latency_s=whole.latency_s,
        seconds_per_byte=whole.seconds_per_byte,
        pieces=pieces if len(pieces) > 1 else None,
    )
    return msgspec.structs.replace(link, extra={"fit": _residuals(link, sizes)})


def fit_slowdown(link: Link, samples: Sequence[tuple[int, float, float]]) -> tuple[float, ...]:
    """By how much k messages at once slow each other's transfer, k = 1, 2, ...

        T_k = a + s_k (T_1 - a)   =>   s_k = (T_k - a) / (T_1 - a),   s_1 = 1

    Start-ups overlap and are not slowed (Shi, Chu and Li, 2021, INFOCOM: two messages take
    a + 1.5 b M on 10 Gbit/s). For each k the median over sizes of the ratio of median times. A
    factor is at least that of one message less: more messages do not make each faster.

    Args:
        link: gives a; at least half of T_1 is taken for transfer, whatever the fit says.
        samples: (k, bytes of each message, seconds until the last of the k has ended), for
            k = 1 to the largest and the same sizes for all.

    Raises:
        UsageError: a k between 1 and the largest is missing for a size.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1.0, seconds_per_byte=1.0)
        >>> fit_slowdown(link, [(1, 10, 11.0), (2, 10, 16.0), (3, 10, 21.0)])
        (1.0, 1.5, 2.0)
    """
    times: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for count, num_bytes, time_s in samples:
        times[num_bytes][count].append(time_s)
    largest = max((count for count, _, _ in samples), default=1)
    factors = [1.0]
    for count in range(2, largest + 1):
        ratios = [_ratio(link, size, of_size, count) for size, of_size in times.items()]
        factors.append(max(factors[-1], median(ratios)))
    return tuple(factors)


def _ratio(link: Link, num_bytes: float, times: dict[int, list[float]], count: int) -> float:
    for needed in (1, count):
        if not times[needed]:
            raise UsageError(
                f"no time of {needed} message(s) of {num_bytes:g} bytes at once; expected samples "
                "of 1, 2, ... messages for each size"
            )
    alone_s = median(times[1])
    startup_s = min(link.piece(num_bytes).latency_s, alone_s / 2)
    return (median(times[count]) - startup_s) / (alone_s - startup_s)


def _group(samples: Sequence[tuple[float, float]], shares: Mapping[float, float]) -> _Sizes:
    times: dict[float, list[float]] = defaultdict(list)
    for num_bytes, time_s in samples:
        if not (num_bytes > 0 and 0 < time_s < math.inf):
            raise UsageError(
                f"a sample is {num_bytes:g} bytes in {time_s:g} s; expected both above 0 and finite"
            )
        times[num_bytes].append(time_s)
    if len(times) < 2:
        raise UsageError(
            f"samples of {len(times)} size(s) were given; expected at least 2, to tell start-up "
            "time from time per byte"
        )
    sizes = sorted(times)
    middle = [_middle(times[s]) for s in sizes]
    errors = [_error_of_median(times[s], m) for s, m in zip(sizes, middle, strict=True)]
    return _Sizes(
        np.array(sizes, dtype=float),
        np.array(middle),
        np.hypot(errors, TOLERANCE) / [1 + SHARE_WEIGHT * shares.get(s, 0.0) for s in sizes],
        tuple(tuple(times[s]) for s in sizes),
    )


def _middle(times_s: Sequence[float]) -> float:
    if len(times_s) < MANY:
        return median(times_s)
    from scipy.stats import trim_mean  # half a second to load; only rank 0 of a job fits

    return float(trim_mean(times_s, 0.1))


def _error_of_median(times_s: Sequence[float], middle_s: float) -> float:
    """Relative standard error of a median, from the median absolute deviation."""
    deviation = 1.4826 * median(abs(t - middle_s) for t in times_s)
    return 1.2533 * deviation / middle_s / math.sqrt(len(times_s))


def _fit_line(sizes: _Sizes, first: int, end: int) -> _Line:
    """The best line through the sizes first .. end - 1; its cost is the minimised sum."""
    from scipy.optimize import least_squares  # half a second to load, as in `_middle`

    num_bytes, time_s = sizes.num_bytes[first:end], sizes.time_s[first:end]
    weights = 1.0 / (time_s * sizes.error[first:end])
    # In units of the data's own magnitude both unknowns are about 1.
    unit_s, unit_bytes = float(np.median(time_s)), float(np.median(num_bytes))
    columns = np.column_stack([np.ones(end - first), num_bytes / unit_bytes]) * unit_s
    design = columns * weights[:, None]
    target = time_s * weights

    def misses(unknowns: Floats) -> Floats:
        result: Floats = design @ unknowns - target
        return result

    found = least_squares(
        misses, np.array([0.5, 0.5]), jac=lambda _: design, bounds=(0.0, np.inf), loss="soft_l1"
    )
    a, b = _polish(design, target, found.x)
    cost = float(np.sum(2 * (np.sqrt(1 + (design @ np.array([a, b]) - target) ** 2) - 1)))
    return _Line(a * unit_s, b * unit_s / unit_bytes, cost)


def _polish(design: Floats, target: Floats, found: Floats) -> tuple[float, float]:
    """The best of the solver's answer and the bounds a = 0 and b = 0, which it only approaches."""
    candidates = [found]
    for fixed in (0, 1):
        free = 1 - fixed
        column = design[:, free]
        weight = 1 / np.sqrt(1 + (column * found[free] - target) ** 2)
        edge = np.zeros(2)
        edge[free] = max(0.0, float((weight * column) @ target / ((weight * column) @ column)))
        candidates.append(edge)
    costs = [float(np.sum(np.sqrt(1 + (design @ c - target) ** 2))) for c in candidates]
    best = candidates[int(np.argmin(costs))]
    return float(best[0]), float(best[1])


def _best_pieces(sizes: _Sizes, whole: _Line) -> tuple[tuple[int, ...], list[_Line]]:
    """The cuts (index of the first size behind each) and the line of each piece."""
    count = len(sizes.num_bytes)
    lines: dict[tuple[int, int], _Line] = {(0, count): whole}
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    places = range(MIN_SIZES_PER_PIECE, count - MIN_SIZES_PER_PIECE + 1)
    places = places[:: max(1, -(-len(places) // MAX_BREAKS))]
    for num_cuts in range(MAX_PIECES):
        for cuts in combinations(places, num_cuts):
            spans = list(zip((0, *cuts), (*cuts, count), strict=True))
            if any(end - first < MIN_SIZES_PER_PIECE for first, end in spans) and cuts:
                continue
            for first, end in spans:
                if (first, end) not in lines:
                    lines[first, end] = _fit_line(sizes, first, end)
            cost = sum(lines[span].cost for span in spans)
            score = cost + (2 * len(spans) + num_cuts) * math.log(count)
            best = min(best, (score, cuts))
    cuts = best[1]
    spans = list(zip((0, *cuts), (*cuts, count), strict=True))
    return cuts, [lines[span] for span in spans]


def _residuals(link: Link, sizes: _Sizes) -> dict[str, Any]:
    """Measured over fitted time less 1, for each size and for all samples."""
    rows = []
    everything: list[float] = []
    for num_bytes, middle_s, times in zip(
        sizes.num_bytes.tolist(), sizes.time_s.tolist(), sizes.samples, strict=True
    ):
        fitted_s = link.time_s(num_bytes)
        residuals = [t / fitted_s - 1 for t in times]
        everything += residuals
        rows.append(
            {
                "num_bytes": num_bytes,
                "num_samples": len(times),
                "time_s": middle_s,
                "fitted_s": fitted_s,
                "relative_residual_median": median(residuals),
                "relative_residual_max": max(residuals, key=abs),
            }
        )
    return {
        "relative_residual_median": median(map(abs, everything)),
        "relative_residual_max": max(everything, key=abs),
        "sizes": rows,
    }
