"""The `testbed` commands whose results `compare_with` compares between two checkouts.

All read the same inputs: traces by name, links and records of the older checkout by path. None
trains, measures or starts a process, but for `codec_costs`, which times compressors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHEAP_SCHEDULERS = (
    *("sequential", "wfbp", "bucket", "bucket:mib=4,first_mib=1", "bucket:timeout_ms=5"),
    *("cycle", "cycle:mib=8,ms=5", "cycle:blocking=0", "mg-wfbp"),
    *("asc-wfbp", "asc-wfbp:channels=1", "asc-wfbp:channels=4", "optimal"),
    *("osf", "osf:rule=message", "osf:rule=schedule", "osf:rule=exact"),
    *("bytescheduler", "bytescheduler:partition_kib=1024,credit_kib=2048"),
    *("p3", "p3:slice_elements=400000", "dear", "dear:mib=4"),
    *("pace:oracle=ideal", "pace:segment_kib=16384,credit_kib=4096"),
    *("lags", "lags:hide=next", "lags:least=0.01,most=0.5", "omgs", "omgs:ratio=0.1"),
    "auto:crossing=0",
)
"""Schedulers whose plan takes well below a second for the largest trace."""

DEAR_SCHEDULERS = (
    *("optimal:channels=2", "pace", "pace:segment_kib=1024", "pace:window=4,credit_kib=1024"),
    *("omgs:rule=exact", "auto"),
)
"""Schedulers that take seconds for traces of hundreds of tensors."""

UNDER_COMPRESSORS = (
    *("sequential", "wfbp", "bucket", "cycle", "mg-wfbp", "asc-wfbp", "optimal", "osf"),
    *("bytescheduler", "dear", "pace:oracle=ideal", "lags", "omgs"),
)

COMPRESSORS = (
    *("none", "fp16", "bf16", "natural", "terngrad", "sign", "sign:vote=0", "ef-sign", "onebit"),
    *("qsgd", "qsgd:bits=4", "powersgd", "powersgd:rank=2", "acp-sgd", "topk", "topk-sampled"),
    *("threshold:value=2.5", "dgc", "randomk", "ef+topk:ratio=0.01", "ef+gtopk", "ef+oktopk"),
    *("warmup+topk", "by-size+topk", "by-size+qsgd"),
)

ALGORITHMS = (
    *("ring", "halving-doubling", "recursive-doubling", "tree", "binomial", "server"),
    *("server:servers=2,placement=dedicated", "server:overlap=0", "server:endpoint=0.5"),
)

RECIPES = (
    *("quick", "consistency", "backends", "schedulers", "compressors", "break-evens", "emulated"),
    "other-traces",
)

REPORT_FORMATS = ("table", "md", "csv", "json", "latex")

# Links that nobody measured, at the corners: backend, workers, seconds of a start-up, per byte,
# and by what each of k concurrent messages is slowed down.
MADE_UP: Mapping[str, tuple[str, int, float, float, list[float] | None]] = {
    "one-worker": ("gloo", 1, 1e-4, 1e-9, None),
    "two-workers": ("mpi-ring", 2, 1e-5, 1e-10, [1.0, 1.5, 2.5]),
    "slow": ("zmq-ps", 8, 1.5e-3, 1.75e-8, None),
    "fast": ("gloo", 64, 6e-6, 1.6e-10, [1.0, 1.1, 1.6, 2.2]),
    "no-start-up": ("mpi-ring", 16, 0.0, 1.5e-9, None),
}
MEASURED = ("gloo", "mpi-ring", "zmq-ps")


@dataclass(frozen=True)
class Command:
    """One call of `testbed`.

    Attributes:
        name: of the folder of its results; differs from all others'.
        arguments: of the command line.
        inputs: copied into its folder before: path of the copy -> path of the original.
    """

    name: str
    arguments: Sequence[str]
    inputs: Mapping[str, str] = field(default_factory=dict)

    def raw(self) -> dict[str, Any]:
        """As `call_cli` reads it."""
        return {
            "name": self.name,
            "arguments": list(self.arguments),
            "inputs": dict(self.inputs),
        }


def write_links(old: Path, folder: Path) -> dict[str, str]:
    """The links by name, as paths of `testbed.link/1` files: measured ones and made-up corners."""
    folder.mkdir()
    paths = {f"measured-{name}": str(old / f"runs/unseen/{name}.json") for name in MEASURED}
    for name, (backend, workers, latency_s, seconds_per_byte, slowdown) in MADE_UP.items():
        raw = {
            "schema": "testbed.link/1",
            "backend": backend,
            "num_workers": workers,
            "latency_s": latency_s,
            "seconds_per_byte": seconds_per_byte,
            "concurrency_slowdown": slowdown,
        }
        path = folder / f"{name}.json"
        path.write_text(json.dumps(raw))
        paths[name] = str(path)
    return paths


def traces_of(old: Path) -> list[str]:
    """Names of the traces that the older checkout ships."""
    return sorted(path.stem for path in (old / "models/traces").glob("*.json"))


def plans(traces: Sequence[str], links: Mapping[str, str]) -> Iterator[Command]:
    """Every scheduler on every trace and link; those that take seconds on two links alone."""
    for trace in traces:
        for link in links:
            some = DEAR_SCHEDULERS if link in ("measured-zmq-ps", "fast") else ()
            for spec in (*CHEAP_SCHEDULERS, *some):
                wanted = ["--trace", trace, "--link", links[link], "--scheduler", spec]
                yield _simulate(f"plans/{trace}/{link}/{spec}", wanted)
    yield from _predictions(traces[0], links)


def _predictions(trace: str, links: Mapping[str, str]) -> Iterator[Command]:
    """Other numbers of workers, algorithms, and what simulating can be asked for beside plans."""
    some = "wfbp,mg-wfbp,asc-wfbp,dear,bytescheduler"
    base = ["--trace", trace, "--link", links["measured-mpi-ring"]]
    for algorithm in ALGORITHMS:
        wanted = [*base, "--scheduler", some, "--workers", "2,3,16,256", "--algorithm", algorithm]
        yield _simulate(f"plans/algorithms/{algorithm}", wanted)
    asked = {
        "all": ["--scheduler", "all"],
        "break-even": ["--scheduler", some, "--break-even"],
        "factors": ["--scheduler", f"{some},optimal,osf", "--factors", "--overlap-slowdown", "0.1"],
        "nodes": ["--workers", "8,16", "--node-link", links["two-workers"]],
        "slowest": ["--slowest-worker", "1.25", "--slowest-link", "0.5"],
        "check-link": ["--workers", "8", "--check-link", links["no-start-up"]],
        "curves": ["--scheduler", some, "--workers", "2:64", "--plot", "curves.svg"],
    }
    for name, options in asked.items():
        yield _simulate(f"plans/asked/{name}", [*base, *options])


def _simulate(name: str, options: Sequence[str]) -> Command:
    out = ["--json", "simulation.json", "--plan-out", "plan.json"]
    return Command(name.replace(":", "_"), ["simulate", *options, *out])


def codec_costs(trace: str, links: Mapping[str, str]) -> Iterator[Command]:
    """What compressors cost: seconds differ from call to call, rounds and bytes must not."""
    for link in ("measured-mpi-ring", "measured-zmq-ps"):
        wanted = ["--trace", trace, "--link", links[link], "--scheduler", "wfbp"]
        asked = ["--compressor", ",".join(COMPRESSORS), "--codecs-out", "codecs.json"]
        yield Command(f"codecs/{link}", ["simulate", *wanted, *asked])


def compressed(
    traces: Sequence[str], links: Mapping[str, str], costs: Mapping[str, str]
) -> Iterator[Command]:
    """Every compressor under every scheduler on every trace, with costs from files.

    Args:
        traces: names of traces.
        links: paths of links.
        costs: name of a link -> path of the `testbed.codecs/1` file for its number of workers.
    """
    for link, codecs in costs.items():
        for trace in traces:
            wanted = ["--trace", trace, "--link", links[link], "--codecs", codecs]
            specs = ["--scheduler", ",".join(UNDER_COMPRESSORS)]
            out = ["--json", "simulation.json"]
            yield Command(f"compressed/{link}/{trace}", ["simulate", *wanted, *specs, *out])
    link = "measured-zmq-ps"
    wanted = ["--trace", traces[0], "--link", links[link], "--codecs", costs[link]]
    asked = ["--scheduler", "wfbp,mg-wfbp,lags", "--break-even", "--codec-speed", "4"]
    yield Command("compressed/break-even", ["simulate", *wanted, *asked, "--json", "all.json"])


def reports(old: Path) -> Iterator[Command]:
    """Every committed folder of records in every format, and all of them in one table."""
    folders = sorted(path.parent for path in (old / "runs").rglob("sweep.json"))
    named = {str(f.relative_to(old / "runs")).replace("/", "-"): [str(f)] for f in folders}
    named["all"] = [str(f) for f in folders]
    for name, given in named.items():
        for format_ in REPORT_FORMATS:
            written = ["--format", format_, "--output", f"report.{format_}"]
            yield Command(f"reports/{name}/{format_}", ["report", *given, *written])
        full = ["--format", "json", "--full", "--output", "full.json"]
        yield Command(f"reports/{name}/full", ["report", *given, *full])


def sweeps(old: Path) -> Iterator[Command]:
    """The runs of every recipe and of every committed sweep, with their keys, as dry runs."""
    for name in RECIPES:
        yield Command(f"sweeps/recipes/{name}", ["sweep", name, "--dry-run"])
    for recipe in sorted((old / "runs").rglob("*.toml")):
        yield Command(f"sweeps/recipes/{recipe.stem}", ["sweep", str(recipe), "--dry-run"])
    for plan in sorted((old / "runs").rglob("sweep.json")):
        folder = plan.parent
        name = str(folder.relative_to(old / "runs")).replace("/", "-")
        yield Command(
            f"sweeps/resumed/{name}",
            ["sweep", "--resume", "--dry-run", "sweep"],
            {"sweep/sweep.json": str(plan)},
        )


def studies(old: Path) -> Iterator[Command]:
    """The published tables computed anew, and the committed records of studies read again."""
    yield Command("studies/paper-shapes", ["sweep", "paper-shapes:emulate=0", "--output", "shapes"])
    yield Command(
        "studies/published",
        ["sweep", "paper-shapes", "--output", "published"],
        {"published": str(old / "runs/published")},
    )
    yield Command(
        "studies/accuracy",
        ["sweep", "accuracy-compressed", "--output", "accuracy"],
        {"accuracy": str(old / "runs/compressors/accuracy")},
    )
