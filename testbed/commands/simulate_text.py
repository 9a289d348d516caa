"""What `testbed simulate` prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf

from msgspec import UNSET

from testbed.base.link import Link
from testbed.base.units import format_seconds
from testbed.prediction.nominal import kind_of
from testbed.records.simulation import Simulation, compressed_table, pays_table, simulation_table
from testbed.records.tables import (
    break_even_table,
    by_workers,
    factors_table,
    held_out_text,
    workers_of,
    workers_table,
)
from testbed.reporting.drawing import LEGEND, Chart, draw, end_of, html_page, svg_page, text_chart
from testbed.simulation import Outcome, Wanted


def report(wanted: Wanted, simulation: Simulation, outcomes: Sequence[Outcome]) -> str:
    """All tables and drawings."""
    several = len(wanted.links) > 1
    parts = [_head(wanted)]
    parts += [held_out_text(wanted.held_out)] if wanted.held_out else []
    parts += _over_workers(simulation) if several else _timelines(simulation, outcomes)
    if simulation.compressed is not UNSET:
        parts.append(compressed_table(simulation.compressed))
    if simulation.pays is not UNSET:
        parts.append(pays_table(simulation.pays, _bits_per_s(wanted), wanted.codecs_note))
    if simulation.factors is not UNSET:
        told = {(found.scheduler, found.num_workers) for found in simulation.factors}
        asked = [(r.scheduler, r.num_workers) for r in simulation.results]
        parts.append(
            factors_table(simulation.factors, [each for each in asked if each not in told])
        )
    if simulation.break_even is not UNSET:
        parts.append(break_even_table(simulation.break_even, _bits_per_s(wanted)))
    return "\n\n".join(parts) + "\n"


def curves_page(wanted: Wanted, simulation: Simulation, suffix: str) -> str:
    """Iteration time, scaling factor and speed-up over the number of workers, as HTML or SVG."""
    results = simulation.results
    labels = [str(n) for n in workers_of(results)]
    iteration_ms = by_workers(results, lambda r: r.iteration_s * 1e3)
    scaling = by_workers(results, lambda r: r.scaling_factor)
    speedup = by_workers(results, lambda r: r.speedup)
    ideal = {"ideal": [float(n) for n in workers_of(results)]}
    charts = [
        Chart("Iteration time", "workers", "ms", labels, iteration_ms, log_y=True),
        Chart("Scaling factor", "workers", "of ideal throughput", labels, scaling),
        Chart("Speed-up", "workers", "times one worker", labels, speedup | ideal, log_y=True),
    ]
    if suffix == ".svg":
        return svg_page(charts)
    return html_page(f"Predicted: {wanted.trace.name}", charts, [_head(wanted)])


def _head(wanted: Wanted) -> str:
    trace, link = wanted.trace, wanted.links[0]
    text = (
        f"{trace.name} on {trace.device}, batch {trace.batch_size} for each worker; link of "
        f"{link.backend}"
    )
    if wanted.extrapolated:
        text += f" at other numbers of workers as {wanted.algorithm_words}"
    elif link.num_workers > 1:
        text += (
            f", {link.num_workers} workers: {format_seconds(link.latency_s)} + "
            f"{link.seconds_per_byte * 1e9:.3g} ns a byte for a message"
        )
    return f"{text}; predictions are {_kind_words(wanted.measured)}"


def _kind_words(link: Link) -> str:
    """The kind of all predictions, and in words what it stands on."""
    kind = kind_of(link)
    return f"{kind} (nominal rate and latency)" if kind == "null" else f"{kind} (a fitted link)"


def _timelines(simulation: Simulation, outcomes: Sequence[Outcome]) -> list[str]:
    """The table and the drawings, both fastest first."""
    results = simulation.results
    parts = [simulation_table(results), LEGEND]
    until_s = max(end_of(predicted) for _, predicted in outcomes)
    for index in sorted(range(len(results)), key=lambda i: results[i].iteration_s):
        plan, predicted = outcomes[index]
        head = results[index].scheduler + (f": {plan.reason}" if plan.reason else "")
        parts.append(f"{head}\n{draw(predicted, until_s=until_s)}")
    return parts


def _over_workers(simulation: Simulation) -> list[str]:
    results = simulation.results
    labels = [str(n) for n in workers_of(results)]
    chart = text_chart(labels, by_workers(results, lambda r: r.scaling_factor))
    return [
        workers_table("iteration", results, lambda r: r.iteration_s, format_seconds),
        workers_table("scaling factor", results, lambda r: r.scaling_factor, "{:.3f}".format),
        workers_table("speed-up", results, lambda r: r.speedup, "{:.1f}".format),
        f"scaling factor over workers\n{chart}",
    ]


def _bits_per_s(wanted: Wanted) -> Callable[[int, float], float]:
    """From the time per byte of a message to the rate of each interface, which a node's share."""

    def bits_per_s(num_workers: int, seconds_per_byte: float) -> float:
        node, count = wanted.node, num_workers
        if node is not None and num_workers > node.num_ranks:
            count = ceil(num_workers / node.num_ranks)
            seconds_per_byte -= node.link.seconds_per_byte
        bits = 8 * wanted.algorithm.transfers(count)
        return bits / seconds_per_byte if seconds_per_byte > 0 else inf

    return bits_per_s
