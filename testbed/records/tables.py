"""What a simulation at several numbers of workers, or at several bandwidths, says in tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from testbed.base.units import format_seconds
from testbed.prediction.extrapolate import HeldOut
from testbed.records.simulation import BreakEven, FactorsOf, SimulationResult
from testbed.records.text import aligned, rate_text


def by_workers(
    results: Sequence[SimulationResult], value: Callable[[SimulationResult], float]
) -> dict[str, list[float]]:
    """One value of each scheduler over the numbers of workers, in the order of the results."""
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(result.scheduler, []).append(value(result))
    return found


def workers_of(results: Sequence[SimulationResult]) -> list[int]:
    """The numbers of workers, in the order of the results."""
    return list(dict.fromkeys(result.num_workers for result in results))


def workers_table(
    title: str,
    results: Sequence[SimulationResult],
    value: Callable[[SimulationResult], float],
    shown: Callable[[float], str],
) -> str:
    """One line per scheduler, one column per number of workers."""
    head = [title, *map(str, workers_of(results))]
    rows = [[name, *map(shown, values)] for name, values in by_workers(results, value).items()]
    return aligned([head, *rows])


def factors_table(found: Sequence[FactorsOf], left_out: Sequence[tuple[str, int]] = ()) -> str:
    """One line per scheduler and number of workers: which factor costs what.

    Args:
        found: to be shown.
        left_out: schedulers and numbers of workers that these factors do not explain.
    """
    head = ["scheduler", "workers", "iteration", "scaling", "start-ups", "bandwidth", "head delay"]
    rows = [[*head, "tail", "slowdown"]]
    rows += [
        [
            each.scheduler,
            str(each.num_workers),
            format_seconds(each.iteration_s),
            f"{each.scaling_factor:.3f}",
            *map(
                format_seconds,
                (each.startup_s, each.bandwidth_s, each.head_delay_s, each.tail_s, each.slowdown_s),
            ),
        ]
        for each in found
    ]
    words = "\n(seconds that would be gone without that factor alone; they need not add up)"
    if left_out:
        counts: dict[str, list[str]] = {}
        for scheduler, num_workers in left_out:
            counts.setdefault(scheduler, []).append(str(num_workers))
        names = [f"{scheduler} ({', '.join(counts[scheduler])} workers)" for scheduler in counts]
        words += (
            f"\n(not of {', '.join(names)}: their messages go by priority, in halves, on several "
            "channels, or wait for a tick or for the end of backward)"
        )
    return aligned(rows) + words


def break_even_table(found: Sequence[BreakEven], bits_per_s: Callable[[int, float], float]) -> str:
    """One line per scheduler and number of workers.

    Args:
        found: to be shown.
        bits_per_s: of each network interface, from the number of workers and the time per byte.
    """
    rows = [["worth it", "workers", "from", "to", "best gain", "at"]]
    for each in found:

        def rate(seconds_per_byte: float | None, end: str, n: int = each.num_workers) -> str:
            return end if seconds_per_byte is None else rate_text(bits_per_s(n, seconds_per_byte))

        worth = each.best_gain >= 0.01
        rows.append(
            [
                each.scheduler,
                str(each.num_workers),
                rate(each.slowest_seconds_per_byte, "any") if worth else "never",
                rate(each.fastest_seconds_per_byte, "any") if worth else "",
                f"{each.best_gain:+.1%}" if worth else "",
                rate(each.best_seconds_per_byte, "") if worth else "",
            ]
        )
    return (
        aligned(rows)
        + "\n(bandwidth of each interface where a method is 1 % or more faster than the best of "
        "sequential, wfbp and bucket)"
    )


def held_out_text(held_out: Sequence[HeldOut]) -> str:
    """One line per link that was measured and predicted."""
    return "\n".join(
        f"held out: {each.measured.num_workers} workers: start-up predicted "
        f"{format_seconds(each.predicted.latency_s)}, measured "
        f"{format_seconds(each.measured.latency_s)} ({each.latency_error:+.0%}); per byte "
        f"{each.predicted.seconds_per_byte:.3g} s and "
        f"{each.measured.seconds_per_byte:.3g} s ({each.seconds_per_byte_error:+.0%})"
        for each in held_out
    )
