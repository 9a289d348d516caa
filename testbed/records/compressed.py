"""Part of `testbed.simulation/1`: what compressors are predicted to cost and to gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from testbed.base.units import format_bytes
from testbed.prediction.compressed import CompressedTimeline
from testbed.records.text import aligned, rate_text, time_text


class CompressedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler's plan under one compressor; seconds and bytes of one rank and iteration.

    Attributes:
        compressor: specification.
        scheduler: specification.
        num_workers: n.
        iteration_s: steady-state time of one whole iteration.
        exposed_s: end of the last decoding minus end of backward; null for schedulers that cross
            the iteration boundary.
        encode_s: sum over messages.
        communication_s: while any message is under way; several at once count once.
        decode_s: sum over messages.
        sent_bytes: payload handed over.
        dense_bytes: of the gradients.
        speedup: time of the best dense schedule over this one's.
    """

    compressor: str
    scheduler: str
    num_workers: int
    iteration_s: float
    exposed_s: float | None
    encode_s: float
    communication_s: float
    decode_s: float
    sent_bytes: float
    dense_bytes: int
    speedup: float

    @classmethod
    def of(
        cls,
        compressor: str,
        scheduler: str,
        num_workers: int,
        found: CompressedTimeline,
        dense_s: float,
    ) -> CompressedResult:
        """The record of a timeline; `dense_s` is the best dense schedule's iteration."""
        return cls(
            compressor=compressor,
            scheduler=scheduler,
            num_workers=num_workers,
            iteration_s=found.iteration_s,
            exposed_s=found.exposed_s,
            encode_s=found.encode_s,
            communication_s=found.communication_s,
            decode_s=found.decode_s,
            sent_bytes=found.sent_bytes,
            dense_bytes=found.dense_bytes,
            speedup=dense_s / found.iteration_s if found.iteration_s > 0 else 1.0,
        )


class CompressorPays(msgspec.Struct, frozen=True, kw_only=True):
    """Below which bandwidth a compressor gains 1 % or more on the best dense schedule.

    Attributes:
        compressor: specification.
        num_workers: n.
        scheduler: the best one under it at the link's bandwidth.
        dense_scheduler: the best one of dense messages there.
        gain: time of the best dense schedule over the best under the compressor, less 1.
        pays: `below` a bandwidth, at `any` one looked at, or `never`.
        seconds_per_byte: of a dense message; with more than this it pays; null unless `below`.
    """

    compressor: str
    num_workers: int
    scheduler: str
    dense_scheduler: str
    gain: float
    pays: str
    seconds_per_byte: float | None


def compressed_table(results: Sequence[CompressedResult]) -> str:
    """One line per compressor, scheduler and number of workers, the fastest first."""
    rows = [
        (
            *("compressor", "scheduler", "workers", "iteration", "exposed", "encode"),
            *("communicate", "decode", "sent", "of", "to best dense"),
        )
    ]
    for each in sorted(results, key=lambda r: (r.num_workers, r.iteration_s)):
        rows.append(
            (
                each.compressor,
                each.scheduler,
                str(each.num_workers),
                time_text(each.iteration_s),
                "crosses" if each.exposed_s is None else time_text(each.exposed_s),
                time_text(each.encode_s),
                time_text(each.communication_s),
                time_text(each.decode_s),
                format_bytes(round(each.sent_bytes)),
                format_bytes(each.dense_bytes),
                f"{each.speedup:.2f} x",
            )
        )
    return aligned(rows)


def pays_table(
    found: Sequence[CompressorPays], bits_per_s: Callable[[int, float], float], note: str
) -> str:
    """One line per compressor and number of workers.

    Args:
        found: to be shown.
        bits_per_s: of each network interface, from the number of workers and the time per byte.
        note: what compressing is taken to cost.
    """
    rows = [("pays", "workers", "below", "at this bandwidth", "with", "best dense")]
    for each in found:
        below = each.pays
        if each.seconds_per_byte is not None:
            below = rate_text(bits_per_s(each.num_workers, each.seconds_per_byte))
        rows.append(
            (
                each.compressor,
                str(each.num_workers),
                below,
                f"{each.gain:+.1%}",
                each.scheduler,
                each.dense_scheduler,
            )
        )
    return (
        aligned(rows)
        + "\n(bandwidth of each interface below which the best schedule under a compressor is 1 % "
        f"or more faster than the best\nschedule of dense messages. {note})"
    )
