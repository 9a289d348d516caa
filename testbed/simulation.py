"""What `testbed simulate` is asked for, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import UNSET, UnsetType

from testbed.base.axes import BACKENDS
from testbed.base.errors import UsageError
from testbed.base.files import find_trace, write_atomically
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.spec import split_specs
from testbed.base.trace import Trace
from testbed.prediction.algorithms import (
    Algorithm,
    Server,
    algorithm_by,
    parse_algorithm,
    run_on,
)
from testbed.prediction.codec import CodecCost, encode_codecs, load_codecs, sped_up
from testbed.prediction.extrapolate import (
    HeldOut,
    Node,
    at_bandwidth,
    extrapolate,
    hold_out,
    over_nodes,
    slowed,
)
from testbed.prediction.factors import factors
from testbed.prediction.nominal import kind_of, read_link
from testbed.prediction.timeline import Timeline
from testbed.records.simulation import (
    BreakEven,
    CompressedResult,
    CompressorPays,
    FactorsOf,
    Simulation,
    SimulationResult,
)
from testbed.scheduling.break_even import Predictions, plan_and_predict
from testbed.scheduling.build import serial_stops


def parse_workers(text: str, option: str = "--workers") -> tuple[int, ...]:
    """Numbers of workers (or of another option): `2:2048` = powers of two times 2, or a list.

    Raises:
        UsageError: it is neither, or a number is below 1.

    Example:
        >>> parse_workers("2:16"), parse_workers("4,16")
        ((2, 4, 8, 16), (4, 16))
    """
    first, colon, last = text.partition(":")
    try:
        counts = (
            _doubled(int(first), int(last)) if colon else tuple(int(c) for c in text.split(","))
        )
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(
            f"{option} is {text!r}; expected different numbers from 1 on, as 2:2048 (doubled each "
            "time) or 4,16,64"
        )
    return counts


def _doubled(first: int, last: int) -> tuple[int, ...]:
    counts = []
    while 1 <= first <= last:
        counts.append(first)
        first *= 2
    return tuple(counts)


@dataclass(frozen=True)
class Wanted:
    """The inputs, read and checked.

    Attributes:
        trace: as recorded.
        slowest: of the slowest worker, which all wait for.
        specs: schedulers.
        node: where several ranks share a machine.
        measured: the link as it was read, before it was brought to other numbers of workers.
        links: one for each number of workers, with the slowest interface's bandwidth.
        extrapolated: whether the numbers of workers were asked for.
        held_out: predictions of links that were measured too.
        break_even: whether to look for it.
        factors: whether to tell them.
        overlap_slowdown: see `testbed.prediction.factors.factors`.
        codecs: what each compressor costs, for each number of workers of the links.
        codecs_note: what these costs are, for the reader of the table.
    """

    trace: Trace
    slowest: Trace
    specs: tuple[str, ...]
    measured: Link
    links: tuple[Link, ...]
    extrapolated: bool
    held_out: tuple[HeldOut, ...]
    break_even: bool
    factors: bool
    overlap_slowdown: float
    node: Node | None = None
    codecs: tuple[CodecCost, ...] = ()
    codecs_note: str = ""

    @classmethod
    def of(
        cls,
        trace: str | Path,
        link: str | Path,
        specs: tuple[str, ...],
        workers: tuple[int, ...] | None,
        algorithm: str | None,
        *,
        node_link: Path | None,
        check_links: Sequence[Path],
        slowest_worker: float,
        slowest_link: float,
        break_even: bool,
        factors: bool,
        overlap_slowdown: float,
    ) -> Wanted:
        """Read the files and derive the links.

        Raises:
            UsageError: a file, name or number cannot be used.
        """
        if not 0 <= overlap_slowdown < float("inf"):
            raise UsageError(
                f"--overlap-slowdown is {overlap_slowdown:g}; expected a finite number, 0 or more"
            )
        recorded = find_trace(trace)
        largest = max(workers) if workers else None
        measured = read_link(link, num_workers=largest, algorithm=algorithm)
        if algorithm is not None:
            measured = run_on(measured, algorithm)
        node = None if node_link is None else Node(read_link(node_link))
        is_nominal = kind_of(measured) == "null"
        if workers is not None or check_links or (node is not None and is_nominal):
            parsed = parse_algorithm(algorithm_by(measured))
        if node is not None and is_nominal:
            largest = max(measured.num_workers, largest or 1)
            measured = over_nodes(extrapolate(measured, parsed, largest), parsed, node)
        if node is not None and workers is None and measured.num_workers <= node.num_ranks:
            raise UsageError(
                f"--node-link is of {node.num_ranks} ranks, and the link is among "
                f"{measured.num_workers} workers, all in one node; give --workers above "
                f"{node.num_ranks}, or a link across nodes"
            )
        others = [read_link(path) for path in check_links]
        links = (
            [measured]
            if workers is None
            else [extrapolate(measured, parsed, count, node) for count in workers]
        )
        return cls(
            trace=recorded,
            slowest=slowed(recorded, slowest_worker),
            specs=specs,
            measured=measured,
            links=tuple(at_bandwidth(each, slowest_link, node) for each in links),
            extrapolated=workers is not None,
            held_out=tuple(hold_out(measured, parsed, others, node)) if others else (),
            break_even=break_even,
            factors=factors,
            overlap_slowdown=overlap_slowdown,
            node=node,
        )

    @property
    def algorithm(self) -> Algorithm:
        """As given, else what the link's backend declares.

        Raises:
            UsageError: none was given, and the backend declares none.
        """
        return parse_algorithm(algorithm_by(self.measured))

    @property
    def algorithm_words(self) -> str:
        """The algorithm, and the nodes between which it runs."""
        text = algorithm_by(self.measured)
        return text if self.node is None else f"{text}, nodes of {self.node.num_ranks} ranks"


# `testbed simulate --compressor`: what compressors cost, and what they then gain.

MAX_WORKERS = 64  # every rank's turn is taken in this process


def with_codecs(
    wanted: Wanted,
    compressor: str | None,
    codecs: Path | None,
    out: Path | None,
    speed: float,
    device: str = "cpu",
) -> Wanted:
    """The inputs with each compressor's cost, read or measured for each link's workers.

    Args:
        wanted: without.
        compressor: list of specifications; None: those of the file, if one is given.
        codecs: file of costs measured before.
        out: where to save the costs.
        speed: how many times as fast as measured compressing is to be taken.
        device: where compressors are measured, `cpu` or `cuda[:index]`.

    Raises:
        UsageError: a compressor that does not exist or is not in the file; more workers than can
            be played here; options that need a compressor.
    """
    if compressor is None and codecs is None:
        if out is not None or speed != 1.0:
            raise UsageError(
                "--codecs-out and --codec-speed speak of compressors; give --compressor too"
            )
        return wanted
    counts = tuple(dict.fromkeys(link.num_workers for link in wanted.links))
    known = () if codecs is None else load_codecs(codecs)
    if codecs is None:
        specs = split_specs(compressor or "")
        costs, note = _measured(wanted, specs, counts, device)
    else:
        specs = split_specs(compressor) if compressor else tuple(c.compressor for c in known)
        costs, note = _chosen(known, tuple(dict.fromkeys(specs)), counts, codecs), f"from {codecs}"
    if out is not None:
        write_atomically(out, encode_codecs(costs))
    return replace(
        wanted,
        codecs=tuple(sped_up(cost, speed) for cost in costs),
        codecs_note=f"Encoding and decoding: {note}, at {speed:g} x that speed, beside backward.",
    )


def _measured(
    wanted: Wanted, specs: tuple[str, ...], counts: tuple[int, ...], device: str
) -> tuple[tuple[CodecCost, ...], str]:
    import torch

    from testbed.profiling.codec import measure_codec

    if not specs:
        raise UsageError("--compressor names none; expected name,name,... as testbed list shows")
    if max(counts) > MAX_WORKERS:
        raise UsageError(
            f"what compressing costs depends on the number of workers and is measured by playing "
            f"them all here, at most {MAX_WORKERS}, not {max(counts)}; lower --workers"
        )
    merges = isinstance(wanted.algorithm, Server)
    costs = tuple(
        measure_codec(spec, count, merges=merges, device=device)
        for spec in specs
        for count in counts
    )
    on_gpu = device.startswith("cuda")
    what = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} threads"
    return costs, f"measured on this machine with {what}"


def _chosen(
    known: tuple[CodecCost, ...], specs: tuple[str, ...], counts: tuple[int, ...], path: Path
) -> tuple[CodecCost, ...]:
    found = {(cost.compressor, cost.num_workers): cost for cost in known}
    lacking = [(s, n) for s in specs for n in counts if (s, n) not in found]
    if lacking:
        spec, count = lacking[0]
        held = ", ".join(f"{s} for {n}" for s, n in found) or "nothing"
        raise UsageError(
            f"{path} has no cost of {spec!r} for {count} workers; it has {held}; leave --codecs "
            "out to measure"
        )
    return tuple(found[spec, count] for spec in specs for count in counts)


def compressed_results(
    wanted: Wanted, predictions: Sequence[Predictions]
) -> tuple[tuple[CompressedResult, ...], tuple[CompressorPays, ...] | UnsetType]:
    """Every scheduler under every compressor on every link; and where each pays, if asked for."""
    results, pays = [], []
    for link, predicted in zip(wanted.links, predictions, strict=True):
        dense_s, dense_spec = predicted.best_dense()
        for codec in wanted.codecs:
            if codec.num_workers != link.num_workers:
                continue
            for spec in wanted.specs:
                if predicted.fits(spec, codec):
                    found = predicted.compressed(spec, codec)
                    results.append(
                        CompressedResult.of(
                            codec.compressor, spec, link.num_workers, found, dense_s
                        )
                    )
            if not wanted.break_even:
                continue
            gained = predicted.compressor_gain(codec)
            below = 0 < gained.below_factor < float("inf")
            pays.append(
                CompressorPays(
                    compressor=codec.compressor,
                    num_workers=link.num_workers,
                    scheduler=gained.scheduler,
                    dense_scheduler=dense_spec,
                    gain=gained.gain,
                    pays="below" if below else "any" if gained.below_factor else "never",
                    seconds_per_byte=(
                        at_bandwidth(link, gained.below_factor, wanted.node).seconds_per_byte
                        if below
                        else None
                    ),
                )
            )
    return tuple(results), tuple(pays) if wanted.break_even else UNSET


# The simulation that `testbed simulate` is asked for, on every link.

Outcome = tuple["Plan", "Timeline"]


def at_workers(wanted: Wanted) -> tuple[Simulation, list[Outcome]]:
    """Every scheduler on every link, in the order of the links; and the plans with timelines.

    Raises:
        UnknownName: no such scheduler.
        UsageError: an option that a scheduler does not have.
    """
    alone_s = wanted.trace.forward_s + wanted.trace.backward_s
    results, outcomes = [], []
    for link in wanted.links:
        for spec in wanted.specs:
            outcome = plan_and_predict(spec, wanted.slowest, link)
            outcomes.append(outcome)
            results.append(SimulationResult.of(spec, outcome[1], link.num_workers, alone_s))
    backend = BACKENDS.find(wanted.links[0].backend)
    channels = 1 if backend is None else backend.facts.max_channels
    predictions = [
        Predictions(wanted.slowest, link, wanted.algorithm, wanted.specs, channels, wanted.node)
        for link in (wanted.links if wanted.codecs or wanted.break_even else ())
    ]
    compressed, pays = compressed_results(wanted, predictions) if wanted.codecs else (UNSET, UNSET)
    simulation = Simulation(
        prediction=kind_of(wanted.measured),
        results=tuple(results),
        compressed=compressed,
        pays=pays,
        break_even=_break_even(wanted, predictions) if wanted.break_even else UNSET,
        factors=_factors(wanted, outcomes) if wanted.factors else UNSET,
    )
    return simulation, outcomes


def _break_even(wanted: Wanted, predictions: Sequence[Predictions]) -> tuple[BreakEven, ...]:
    def per_byte(link: Link, factor: float) -> float:
        return at_bandwidth(link, factor, wanted.node).seconds_per_byte

    return tuple(
        BreakEven(
            scheduler=spec,
            num_workers=link.num_workers,
            best_gain=gained.best_gain,
            best_seconds_per_byte=per_byte(link, gained.best_factor),
            slowest_seconds_per_byte=gained.from_factor and per_byte(link, gained.from_factor),
            fastest_seconds_per_byte=gained.to_factor and per_byte(link, gained.to_factor),
        )
        for link, predicted in zip(wanted.links, predictions, strict=True)
        for spec, gained in ((spec, predicted.gain_range(spec)) for spec in wanted.specs)
    )


def _factors(wanted: Wanted, outcomes: Sequence[Outcome]) -> tuple[FactorsOf, ...]:
    """Of the schedulers whose messages follow one another on one channel within backward.

    Others (priorities, halves, several channels, messages that wait for a tick or for the end of
    backward) have other reasons for what they take; the table names them.
    """
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
