"""The cells of the map that are measured: drawn at random, and foreseen before any of them runs."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import encode_link, load_shipped_trace
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.cluster.spec import dilation_of
from testbed.launch.held_out import Known, forecast_cells, link_for, nominal_of
from testbed.launch.plan_options import plan_for
from testbed.prediction.algorithms import algorithm_of, parse_algorithm
from testbed.prediction.codec import CodecCost, encode_codecs, sped_up
from testbed.records.cell import Cell
from testbed.records.environment import source_commit
from testbed.records.forecast import Forecast, ForecastCell, sealed
from testbed.records.store import cell_key
from testbed.reporting.forecast import compare, describe, scores
from testbed.scheduling.under_compressor import CompressedExchange
from testbed.studies.map.setups import BACKEND, CODECS, DENSE, HALF
from testbed.sweeping.grid import Sweep

# What is drawn from: what four nodes of one machine can emulate in a minute or two for each cell.
MODELS: Final = ("resnet50-v100", "resnet101-v100", "densenet201-2080ti", "inception-v4-2080ti")
WORKERS: Final = (2, 4)
RATES: Final = ("1gbit", "2.5gbit", "5gbit", "10gbit")
DILATION: Final = 10
NUM_SETUPS: Final = 8  # each dense, under bf16 and under one more codec: 24 cells
SCHEDULER: Final = (
    "bucket"  # whose plan depends on sizes alone: cells run the plan that is foreseen
)
HELPERS: Final = 2  # threads of a rank that encode and decode
FREE: Final = 1e9  # times as fast as recorded: compressing takes nothing


@dataclass(frozen=True)
class Drawn:
    """One setup, and what runs in it.

    Attributes:
        model: name of a shipped trace.
        workers: nodes of the emulated cluster.
        rate: of their links.
        codec: beside dense messages and bf16.
    """

    model: str
    workers: int
    rate: str
    codec: str

    def cell(self, codec: str) -> RunConfig:
        """The run that measures a codec here."""
        return RunConfig(
            workload=f"replay:{self.model}",
            backend=BACKEND,
            workers=self.workers,
            cluster=f"nodes={self.workers},rate={self.rate},dilation={DILATION}",
            scheduler=SCHEDULER,
            compressor=codec,
            steps=7,
            warmup=2,
            threads=1,
            verify_steps=0,
            deadline=120.0,
        )

    def cells(self) -> tuple[RunConfig, ...]:
        """Dense, bf16 and the drawn codec."""
        return tuple(self.cell(codec) for codec in (DENSE, HALF, self.codec))


def draw(seed: int, count: int = NUM_SETUPS) -> tuple[Drawn, ...]:
    """Different setups and a codec for each, at random.

    Example:
        >>> draw(1) == draw(1), len(set(draw(1))), draw(1) == draw(2)
        (True, 8, False)
    """
    chance = random.Random(seed)
    places = chance.sample(list(itertools.product(MODELS, WORKERS, RATES)), count)
    others = [codec for codec in CODECS if codec != HALF]
    return tuple(Drawn(*place, chance.choice(others)) for place in places)


def sweep_of(drawn: Iterable[Drawn]) -> Sweep:
    """The cells of all setups, each once."""
    cells = tuple(cell for each in drawn for cell in each.cells())
    return Sweep("map", cells, repeats=1, summary="cells of the map, drawn at random")


def foreseen(
    drawn: Sequence[Drawn], links: Mapping[str, Link], costs: Sequence[CodecCost], num_cores: int
) -> Forecast:
    """What the cells will take, sealed with the time of now.

    Of compressed cells: the fitted link carried to the cell's cluster, and the recorded costs of
    the codec. In the time of the emulated cluster this machine compresses `DILATION` times as fast,
    and n ranks share its cores: `min(1, cores / n)` of that. Null: nominal numbers, and compressing
    takes no time.

    Args:
        drawn: setups.
        links: fitted before, by the name of their file.
        costs: recorded on one core.
        num_cores: of this machine.

    Raises:
        UsageError: no link of the backend was given, or it cannot be carried over.
    """
    known = {(cost.compressor, cost.num_workers): cost for cost in costs}
    dense = forecast_cells([each.cell(DENSE) for each in drawn], Known(links, num_cores=num_cores))
    cells = []
    for each, plain in zip(drawn, dense, strict=True):
        cells.append(_named(plain, each, DENSE))
        for codec in (HALF, each.codec):
            compressed = _compressed(each, codec, links, known[codec, each.workers], num_cores)
            cells.append(_named(compressed, each, codec))
    digests = {name: _digest(encode_link(link)) for name, link in links.items()}
    return sealed(
        Forecast(
            name="map",
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            commit=source_commit(),
            links=digests | {"codecs": _digest(encode_codecs(costs))},
            cells=tuple(cells),
        )
    )


def check_foreseen(forecast: Forecast, sweep: Sweep) -> None:
    """Refuse a forecast of other cells than those that are to run.

    Raises:
        UsageError: it lacks one of them.
    """
    known = {cell.key for cell in forecast.cells}
    unknown = [cell for cell in sweep.cells if cell_key(cell) not in known]
    if unknown:
        raise UsageError(
            f"the forecast of {forecast.written} does not hold {len(unknown)} of the "
            f"{len(sweep.cells)} cells that are to run; it was made with another seed or version: "
            "give the seed that it was made with, or another folder with --output"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _named(cell: ForecastCell, drawn: Drawn, codec: str) -> ForecastCell:
    name = f"{drawn.model}, {drawn.workers} workers, {drawn.rate}, {codec}"
    return msgspec.structs.replace(cell, name=name, backend=BACKEND, plan_class=codec)


def _compressed(
    drawn: Drawn, codec: str, links: Mapping[str, Link], cost: CodecCost, num_cores: int
) -> ForecastCell:
    config = drawn.cell(codec)
    trace, link, rated = (
        load_shipped_trace(drawn.model),
        link_for(config, links, num_cores),
        nominal_of(config.cluster),
    )
    assert rated is not None  # every cell has a cluster
    nominal = rated.link(config.backend, config.workers)
    share = min(1.0, num_cores / config.workers)
    plan, held_out_s = _step_s(config, trace, link, sped_up(cost, DILATION * share), num_cores)
    _, null_s = _step_s(config, trace, nominal, sped_up(cost, FREE), num_cores)
    return ForecastCell(
        key=cell_key(config),
        name="",
        backend="",
        plan_digest=plan.digest(),
        held_out_s=held_out_s,
        null_s=null_s,
    )


def _step_s(
    config: RunConfig, trace: Trace, link: Link, cost: CodecCost, num_cores: int
) -> tuple[Plan, float]:
    """The plan on its channels, and seconds of a step of this machine."""
    backend = BACKENDS.resolve(config.backend)
    how = CompressedExchange(
        cost,
        parse_algorithm(algorithm_of(config.backend)),
        one_core=num_cores < HELPERS * config.workers,
        max_channels=backend.facts.max_channels,
        launches=True,
    )
    plan = how.spread(plan_for(config, trace, link))
    iteration_s = how.timeline(plan, trace, link).iteration_s
    return plan, dilation_of(config.cluster) * iteration_s


# Measured beside predicted.


def measured_text(
    forecast: Forecast, drawn: Sequence[Drawn], seed: int, found: Mapping[str, Cell]
) -> str:
    """The table of the cells that ran after the forecast; what it checks stands below it.

    A cell's key is that of its file: the settings in its record are filled up with the workload's.
    """
    held = compare(forecast, [(key, c) for key, c in found.items() if c.status == "ok"])
    measured = {row.name: row.measured_s for row in held.rows}
    predicted = {cell.name: cell.held_out_s for cell in forecast.cells}
    rows = [
        "| setup | codec | predicted ms | measured ms | error | over dense: predicted | measured "
        "| over bf16: predicted | measured |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in drawn:
        for codec in (DENSE, HALF, each.codec):
            rows.append(_row(each, codec, predicted, measured))
    agree = [agreed for each in drawn if (agreed := _agrees(each, predicted, measured)) is not None]
    parts = [
        "# Cells of the map, measured",
        f"{len(drawn)} setups and a further codec for each, drawn with seed {seed} from "
        f"{len(MODELS)} models, {len(WORKERS)} numbers of workers, {len(RATES)} rates and "
        f"{len(CODECS) - 1} codecs, and foreseen before any cell ran (`forecast.json`); each cell "
        f"ran once on an emulated cluster at dilation {DILATION}, without added latency, its steps "
        "not verified. Times are of the emulated cluster.",
        "\n".join(rows),
        f"Which of the three is fastest was foreseen in {sum(agree)} of {len(agree)} setups whose "
        "three cells ran.",
        *(f"- {note}" for note in held.notes),
        *(f"- {line}" for line in describe(held.rows, scores(held.rows))),
    ]
    return "\n\n".join(parts) + "\n"


def _name(drawn: Drawn, codec: str) -> str:
    return f"{drawn.model}, {drawn.workers} workers, {drawn.rate}, {codec}"


def _row(
    drawn: Drawn, codec: str, predicted: Mapping[str, float | None], measured: Mapping[str, float]
) -> str:
    setup = f"{drawn.model}, {drawn.workers} workers, {drawn.rate}"
    expected, found = predicted.get(_name(drawn, codec)), measured.get(_name(drawn, codec))
    error = "" if expected is None or found is None else f"{100 * (expected / found - 1):+.1f} %"
    gains = []
    for other in (DENSE, HALF):
        for times in (predicted, measured):
            gains.append(_gain(times.get(_name(drawn, other)), times.get(_name(drawn, codec))))
    cells = (setup, codec, _ms(expected), _ms(found), error, *gains)
    return f"| {' | '.join(cells)} |"


def _agrees(
    drawn: Drawn, predicted: Mapping[str, float | None], measured: Mapping[str, float]
) -> bool | None:
    """Whether the fastest of the three is the foreseen one; None: not all of them ran."""
    names = [_name(drawn, codec) for codec in (DENSE, HALF, drawn.codec)]
    if any(name not in measured or predicted.get(name) is None for name in names):
        return None
    return min(names, key=measured.__getitem__) == min(
        names, key=lambda name: predicted.get(name) or math.inf
    )


def _gain(slow_s: float | None, fast_s: float | None) -> str:
    return "" if slow_s is None or fast_s is None else f"{slow_s / fast_s:.2f}"


def _ms(real_s: float | None) -> str:
    return "" if real_s is None else f"{1e3 * real_s / DILATION:.1f}"
