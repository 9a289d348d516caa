"""The study `map`: is compression useful, and which; simulated, and a few cells measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.spec import parse_options
from testbed.cluster.system import lacking
from testbed.prediction.codec import CodecCost, encode_codecs, load_codecs
from testbed.prediction.nominal import read_link
from testbed.profiling.codec import measure_codec
from testbed.records.forecast import Forecast, encode_forecast, load_forecast
from testbed.studies.map import cells
from testbed.studies.map.setups import CODECS, WORKERS, setups, simulate
from testbed.studies.map.tables import to_csv, to_markdown, to_svg
from testbed.sweeping.run import INTERRUPTED, carry_out, process_runner
from testbed.sweeping.study import Measured, Study, read_cells, study_store

COSTS, FORECAST, CELLS = "codecs.json", "forecast.json", "emulated"
SIZES: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 20)  # elements at which codecs are timed
CELL_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        emulate: also draw, foresee and run cells on an emulated cluster.
        seed: of the draw.
        link: file of the link that the cells are foreseen on, fitted before.
        codecs: file of the codecs' costs; empty: that of the folder, else they are timed here.
    """

    emulate: bool = True
    seed: int = 26
    link: str = "runs/unseen/mpi-ring.json"
    codecs: str = ""


def record_codecs(
    codecs: Sequence[str] = CODECS,
    workers: Sequence[int] = (*cells.WORKERS, *WORKERS),
    sizes: Sequence[int] = SIZES,
) -> tuple[CodecCost, ...]:
    """Time every codec on one core of this machine; takes minutes.

    Args:
        codecs: specifications.
        workers: numbers of them; decoding takes its time for each payload.
        sizes: elements of a message.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(
            measure_codec(codec, count, sizes=sizes, repeats=2, typical=True)
            for codec in codecs
            for count in dict.fromkeys(workers)
        )
    finally:
        torch.set_num_threads(threads)


def _costs(folder: Path, options: Options) -> tuple[CodecCost, ...]:
    """Those given, those of the folder, or new ones, which the folder then keeps."""
    path = Path(options.codecs) if options.codecs else folder / COSTS
    if not options.codecs and not path.exists():
        write_atomically(path, encode_codecs(record_codecs()))
    found = load_codecs(path)
    wanted = [(c, n) for n in dict.fromkeys((*cells.WORKERS, *WORKERS)) for c in CODECS]
    lacking_costs = set(wanted) - {(cost.compressor, cost.num_workers) for cost in found}
    if lacking_costs:
        codec, count = min(lacking_costs)
        raise UsageError(
            f"{path} has no cost of {codec!r} for {count} workers; expected one of each codec of "
            "the map; leave out codecs=, or remove the file, to time them here"
        )
    return found


def _files(folder: Path, options: Options) -> dict[str, str]:
    """The map; and, if cells are to run, their forecast is in the folder before it is drawn."""
    costs = _costs(folder, options)
    if options.emulate:
        _forecast(folder, options, costs)
    of_map = [cost for cost in costs if cost.num_workers in WORKERS]
    points = list(simulate(setups(), of_map))
    note = (
        f"Their costs are in `{COSTS}`: medians of one core's times for messages of "
        f"{SIZES[0]} to {SIZES[-1]} normal values, linear between and beyond; encoding and "
        "decoding have a core each beside the model's own device."
    )
    speeds = dict.fromkeys(point.speed for point in points)
    files = {"map.md": to_markdown(points, costs, note), "map.csv": to_csv(points)}
    return files | {f"map-{speed:g}x.svg": to_svg(points, speed) for speed in speeds}


def _forecast(folder: Path, options: Options, costs: Sequence[CodecCost]) -> Forecast:
    """Written once; a forecast that is there stays."""
    path = folder / FORECAST
    if not path.exists():
        links = {options.link: read_link(options.link)}
        num_cores = len(os.sched_getaffinity(0))
        made = cells.foreseen(cells.draw(options.seed), links, costs, num_cores)
        write_atomically(path, encode_forecast(made))
    return load_forecast(path)


def _compute(options: Options) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return _files(Path(folder), options)


def _measure(folder: Path, options: Options) -> Measured:
    drawn = cells.draw(options.seed)
    forecast = load_forecast(folder / FORECAST)
    sweep, status = cells.sweep_of(drawn), 0
    cells.check_foreseen(forecast, sweep)
    if lacking() is None:
        store = study_store(folder / CELLS, sweep)
        with process_runner(store, CELL_TIMEOUT_S) as runner:
            status = carry_out(store, runner)
        if status == INTERRUPTED:
            return Measured({}, status)
    found = read_cells(folder / CELLS)
    text = cells.measured_text(forecast, drawn, options.seed, found)
    return Measured({"map-emulated.md": text}, status)


def _study(options: Options) -> Study:
    return Study(
        name="map",
        summary="whether compressing gradients makes a step shorter, and with which codec: "
        "thousands of setups simulated, 24 cells drawn, foreseen and (emulate=0: not) measured "
        "(emulate, seed, link, codecs)",
        compute=lambda: _compute(options),
        go_on=lambda folder: _files(folder, options),
        measure=(lambda folder, files: _measure(folder, options)) if options.emulate else None,
        with_options=lambda given: _study(parse_options("map", given, Options)),
    )


MAP = _study(Options())
