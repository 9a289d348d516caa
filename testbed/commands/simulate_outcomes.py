"""The simulation that `testbed simulate` is asked for, on every link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from testbed.commands.simulate_inputs import Wanted

if TYPE_CHECKING:
    from testbed.prediction.link import Link
    from testbed.prediction.timeline import Timeline
    from testbed.records.simulation import BreakEven, FactorsOf, Simulation
    from testbed.scheduling.plan import Plan

Outcome = tuple["Plan", "Timeline"]


def at_workers(wanted: Wanted) -> tuple[Simulation, list[Outcome]]:
    """Every scheduler on every link, in the order of the links; and the plans with timelines.

    Raises:
        UnknownName: no such scheduler.
        UsageError: an option that a scheduler does not have.
    """
    from msgspec import UNSET

    from testbed.commands.simulate_compressed import compressed_outlook
    from testbed.records.simulation import Simulation, SimulationResult
    from testbed.scheduling.outlook import plan_and_predict

    alone_s = wanted.trace.forward_s + wanted.trace.backward_s
    results, outcomes = [], []
    for link in wanted.links:
        for spec in wanted.specs:
            outcome = plan_and_predict(spec, wanted.slowest, link)
            outcomes.append(outcome)
            results.append(SimulationResult.of(spec, outcome[1], link.num_workers, alone_s))
    compressed, pays = compressed_outlook(wanted) if wanted.codecs else (UNSET, UNSET)
    simulation = Simulation(
        results=tuple(results),
        compressed=compressed,
        pays=pays,
        break_even=_break_even(wanted) if wanted.break_even else UNSET,
        factors=_factors(wanted, outcomes) if wanted.factors else UNSET,
    )
    return simulation, outcomes


def _break_even(wanted: Wanted) -> tuple[BreakEven, ...]:
    from testbed.prediction.extrapolate import at_bandwidth
    from testbed.records.simulation import BreakEven
    from testbed.scheduling.outlook import break_even

    def per_byte(link: Link, factor: float | None) -> float | None:
        return None if factor is None else at_bandwidth(link, factor, wanted.node).seconds_per_byte

    return tuple(
        BreakEven(
            scheduler=worth.scheduler,
            num_workers=link.num_workers,
            best_gain=worth.best_gain,
            best_seconds_per_byte=at_bandwidth(
                link, worth.best_factor, wanted.node
            ).seconds_per_byte,
            slowest_seconds_per_byte=per_byte(link, worth.from_factor),
            fastest_seconds_per_byte=per_byte(link, worth.to_factor),
        )
        for link in wanted.links
        for worth in break_even(wanted.specs, wanted.slowest, link, wanted.node)
    )


def _factors(wanted: Wanted, outcomes: Sequence[Outcome]) -> tuple[FactorsOf, ...]:
    """Of the schedulers whose messages follow one another on one channel within backward.

    Others (priorities, halves, several channels, messages that wait for a tick or for the end of
    backward) have other reasons for what they take; the table names them.
    """
    from testbed.prediction.factors import factors
    from testbed.records.simulation import FactorsOf
    from testbed.scheduling.grouping import serial_stops

    found = []
    for number, (plan, _) in enumerate(outcomes):
        link = wanted.links[number // len(wanted.specs)]
        spec = wanted.specs[number % len(wanted.specs)]
        stops = serial_stops(plan)
        waits = plan.tick_s is not None or (plan.after_backward and len(plan.messages) > 1)
        if stops is not None and not waits:
            terms = factors(wanted.slowest, stops, link, wanted.overlap_slowdown)
            found.append(FactorsOf.of(spec, link.num_workers, terms))
    return tuple(found)
