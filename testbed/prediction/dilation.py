"""Links of a cluster that runs slower than the one it stands for; pure."""

from __future__ import annotations

from typing import Any

from testbed.prediction.link import Link, Piece


def stretched_link(link: Link, factor: float) -> Link:
    """The link with every time multiplied: 1 / dilation makes the emulated cluster's of a real one.

    The figures of its fit (`Link.extra["fit"]`) go with it; slow-downs are ratios and stay.

    Example:
        >>> slow = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=8e-9)
        >>> stretched_link(slow, 0.5).time_s(1000) == slow.time_s(1000) / 2
        True
    """
    extra = dict(link.extra)
    if "fit" in extra:
        extra["fit"] = {**extra["fit"], "sizes": [_row(r, factor) for r in extra["fit"]["sizes"]]}
    if "missing_s" in extra:
        extra["missing_s"] = [time_s * factor for time_s in extra["missing_s"]]
    return Link(
        backend=link.backend,
        num_workers=link.num_workers,
        latency_s=link.latency_s * factor,
        seconds_per_byte=link.seconds_per_byte * factor,
        concurrency_slowdown=link.concurrency_slowdown,
        pieces=None if link.pieces is None else tuple(_piece(p, factor) for p in link.pieces),
        extra=extra,
    )


def _piece(piece: Piece, factor: float) -> Piece:
    return Piece(
        max_bytes=piece.max_bytes,
        latency_s=piece.latency_s * factor,
        seconds_per_byte=piece.seconds_per_byte * factor,
    )


def _row(row: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**row, "time_s": row["time_s"] * factor, "fitted_s": row["fitted_s"] * factor}
