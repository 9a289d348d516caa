"""`testbed forecast`: what the cells of a sweep will take, written down before any of them runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from testbed.base.axes import BACKENDS, COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.link import Link
from testbed.base.units import format_seconds
from testbed.cluster.spec import parse_cluster
from testbed.commands.checks import check_output
from testbed.commands.grid import cluster_axes, wanted_sweep
from testbed.commands.settings import lists_of, takes_lists
from testbed.prediction.break_even import break_even_between
from testbed.prediction.codec import CodecCost, encode_codecs, load_codecs
from testbed.prediction.nominal import parse_nominal, read_link
from testbed.records.environment import source_commit
from testbed.records.forecast import (
    Forecast,
    ForecastCell,
    encode_forecast,
    link_digest,
    sealed,
)
from testbed.records.text import aligned
from testbed.reporting.compression import pays_text


@takes_lists
def forecast(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="write it to this new file (testbed.forecast/1)"),
    ],
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's name, or a TOML file", show_default=False)
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="testbed.link/1 file, fitted before, for cells whose recipe names none; one for "
            "each backend; ddp=gloo.json: one backend's link for another's cells"
        ),
    ] = None,
    null: Annotated[
        str | None,
        typer.Option(
            help="nominal numbers of the null model: rate=10gbit,latency=50us",
            show_default="those that each cell's emulated cluster is asked for",
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            help="testbed.codecs/1 file with what compressors cost, as testbed simulate "
            "--codecs-out writes; zmq-ps=FILE: for that backend's cells, whose servers merge"
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(help="as of testbed sweep; may be given several times", show_default="none"),
    ] = None,
    **given: Any,
) -> None:
    """Predict every cell of a sweep before it runs: held-out on fitted links, and null.

    Nothing is measured. The file has a digest and the time of writing; `testbed report --forecast`
    checks both against the cells and tells error and skill. A forecast is never written over.

    Cells plan as foreseen where their recipe names the link (`link = ...`); others plan on a link
    of their own, and the report tells whose plan differed. Where compressors and dense cells are
    foreseen at several rates, a line for each tells from which rate on it pays.

    Examples:
        testbed forecast emulated --link gloo.json --link ddp=gloo.json -o forecast.json

        testbed forecast runs/unseen/unseen.toml -o forecast.json

        testbed forecast break-evens --codecs codecs.json -o forecast.json
    """
    if output.exists():
        raise UsageError(f"{output} exists; a forecast is not written over: give a new name")
    check_output("--output", output)
    axes = lists_of(given)
    axes |= cluster_axes(cluster or (), "workers" in axes, recipe)
    wanted = wanted_sweep(recipe, axes, {})
    if wanted is None:
        raise UsageError("nothing to forecast; give a recipe, a TOML file or axes, as for sweep")
    nominal = None if null is None else parse_nominal(null)
    if null is not None and nominal is None:
        raise UsageError(f"--null is {null!r}; expected nominal numbers: rate=10gbit,latency=50us")
    links = dict(map(_given_link, link or ()))

    costs = _codec_costs(codecs or ())
    from testbed.launch.held_out import Known, forecast_cells

    cells = forecast_cells(wanted.cells, Known(links, nominal, costs))
    for named in dict.fromkeys(c.link for c in wanted.cells if c.link is not None):
        if parse_nominal(named) is None:
            links[named] = read_link(named)
    made = sealed(
        Forecast(
            name=wanted.name,
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            commit=source_commit(),
            links={name: link_digest(one) for name, one in links.items()},
            codecs={name or "all": _digest(encode_codecs(each)) for name, each in costs.items()},
            cells=tuple(cells),
        )
    )
    write_atomically(output, encode_forecast(made))
    told = "\n".join([_table(cells), *_break_evens(wanted.cells, cells)])
    sys.stdout.write(f"{told}\n\n{output}: digest {made.digest}, written {made.written}\n")


def _given_link(text: str) -> tuple[str, Link]:
    """What to call a link, and the link: of the backend named before `=`, else of its own."""
    backend, equals, path = text.partition("=")
    if not equals or BACKENDS.find(backend) is None:
        return text, read_link(text)
    return text, msgspec.structs.replace(read_link(path), backend=backend)


def _codec_costs(given: Sequence[str]) -> dict[str, tuple[CodecCost, ...]]:
    """The costs of all files, those of one backend together.

    Raises:
        UsageError: two files of a backend tell what one compressor costs as many workers.
    """
    costs: dict[str, tuple[CodecCost, ...]] = {}
    for text in given:
        name, found = _given_codecs(text)
        before = costs.get(name, ())
        known = {(cost.compressor, cost.num_workers) for cost in before}
        twice = next((c for c in found if (c.compressor, c.num_workers) in known), None)
        if twice is not None:
            raise UsageError(
                f"--codecs {text} tells what {twice.compressor!r} costs {twice.num_workers} "
                "workers, and so does a file before it; give one of them, or name its backend: "
                "zmq-ps=FILE"
            )
        costs[name] = (*before, *found)
    return costs


def _given_codecs(text: str) -> tuple[str, tuple[CodecCost, ...]]:
    """The backend named before `=`, else none, and the costs in the file."""
    backend, equals, path = text.partition("=")
    if not equals or BACKENDS.find(backend) is None:
        return "", load_codecs(Path(text))
    return BACKENDS.resolve(backend).name, load_codecs(Path(path))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _table(cells: Sequence[ForecastCell]) -> str:
    rows = [("cell", "class of plan", "held-out", "null")]
    rows += [
        (cell.name, cell.plan_class or "-", _time(cell.held_out_s), _time(cell.null_s))
        for cell in cells
    ]
    silent = [f"{cell.name}: {cell.why_not}" for cell in cells if cell.why_not]
    return "\n".join([aligned(rows), *silent])


def _break_evens(configs: Sequence[RunConfig], cells: Sequence[ForecastCell]) -> list[str]:
    """A line for each compressor that is foreseen, beside dense, at two rates of links or more."""
    found: dict[RunConfig, dict[str, dict[float, float]]] = {}
    for config, cell in zip(configs, cells, strict=True):
        if config.cluster is None or cell.held_out_s is None:
            continue
        spec = parse_cluster(config.cluster)
        if not (spec.links or spec.changes):
            rest = [part for part in config.cluster.split(",") if not part.startswith("rate=")]
            plain = {COMPRESSORS.what: COMPRESSORS.default, "cluster": ",".join(rest)}
            times = found.setdefault(msgspec.structs.replace(config, **plain), {})
            times.setdefault(config.compressor, {})[spec.rate_bps] = cell.held_out_s
    return [
        f"{work.workload}, {work.backend}, {work.scheduler}: {compressor} pays "
        f"{_place(times[COMPRESSORS.default], own)}, foreseen held-out"
        for work, times in found.items()
        for compressor, own in times.items()
        if compressor != COMPRESSORS.default
        and len(own.keys() & times.get(COMPRESSORS.default, {}).keys()) > 1
    ]


def _place(dense: Mapping[float, float], own: Mapping[float, float]) -> str:
    rates = sorted(dense.keys() & own.keys())
    return pays_text(*break_even_between(dense, own), (rates[0], rates[-1]))


def _time(time_s: float | None) -> str:
    return "-" if time_s is None else format_seconds(time_s)
