"""Measures whether a newer checkout exchanges gradients as fast as an older one, by turns.

    python -m tests.tools.compare_speed ../old [../new] [--pairs 5] [--only comm,mpi-ring]

Both checkouts have a virtual environment with `testbed` in `.venv`; without a second one this
checkout is the newer. In each pair both carry out, one right after the other, the first of them in
turn:

* `comm`: one sum of 4 KiB, 1 MiB and 64 MiB between two processes, over every backend;
* `mpi-ring`, `zmq-ps`: a cell on an emulated cluster of four nodes at 10 Gbit/s, ten times slower
  than real, that replays ResNet-50 of a V100 under `mg-wfbp`, planned from a link that the older
  checkout has on file, so that all runs have the same plan.

Of each quantity the median within a run counts. The ratio new / old is the geometric mean over
pairs, with its 95 % interval (Student's t of the logarithms). A quantity has become slower if the
whole interval lies above 1.03; then the exit status is 1. Leave the machine alone meanwhile: a pair
takes about 5 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from scipy.stats import t as student

COMM_SIZES = {"4K": 4 << 10, "1M": 1 << 20, "64M": 64 << 20}
COMM_BACKENDS = "mpi-ring,mpi,gloo,zmq-ps"
CLUSTER = "nodes=4,rate=10gbit,dilation=10"
BOUND = 1.03
CONFIDENCE = 0.95
TIMEOUT_S = 900.0

Times = dict[str, float]
Side = TypeVar("Side")


@dataclass(frozen=True)
class Ratio:
    """New over old of one quantity.

    Attributes:
        mean: geometric, over pairs.
        low: end of the interval; 0 with a single pair.
        high: the other end; infinite with a single pair.
    """

    mean: float
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval lies above the bound."""
        return self.low > BOUND


def ratio_of(old: Sequence[float], new: Sequence[float]) -> Ratio:
    """The ratio of paired times, with Student's interval of its logarithm.

    Example:
        >>> found = ratio_of([1.0, 2.0, 1.0], [1.1, 2.2, 1.1])
        >>> round(found.mean, 3), round(found.low, 3), found.is_slower
        (1.1, 1.1, True)
        >>> ratio_of([1.0, 1.0], [1.0, 1.2]).is_slower
        False
    """
    logs = [math.log(theirs / ours) for ours, theirs in zip(old, new, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def run_testbed(checkout: Path, folder: Path, *arguments: str) -> None:
    """One command of a checkout, away from all checkouts: `python -m` looks where it is started."""
    command = [str(checkout / ".venv/bin/testbed"), *arguments]
    pipe = subprocess.PIPE
    # A session of its own: interrupted here once, it removes what it has made before this ends.
    with subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            out, err = run.communicate(timeout=TIMEOUT_S)
        except BaseException:
            run.send_signal(signal.SIGINT)
            run.communicate()
            raise
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{out}{err}")


def chosen_names(
    parser: argparse.ArgumentParser, only: str | None, known: Iterable[str]
) -> list[str]:
    """Those of the known names that `--only` tells, with commas; all without it."""
    names = list(known) if only is None else only.split(",")
    if wrong := set(names) - set(known):
        parser.error(f"--only has {', '.join(sorted(wrong))}; expected some of {', '.join(known)}")
    return names


def time_comm(checkout: Path, folder: Path) -> Times:
    """Seconds of a sum: by backend and size, each size in a job of its own."""
    times: Times = {}
    for text, num_bytes in COMM_SIZES.items():
        options = ["--backend", COMM_BACKENDS, "--workers", "2", "--min", text, "--max", text]
        run_testbed(checkout, folder, "comm", *options, "--iters", "40", "--json", "comm.json")
        for result in json.loads((folder / "comm.json").read_text())["results"]:
            assert result["num_bytes"] == num_bytes
            times[f"comm {result['backend']} {text}iB"] = result["time_s"]
    return times


def time_cell(backend: str, link: Path, checkout: Path, folder: Path) -> Times:
    """Seconds of a step of the emulated cell."""
    run_testbed(
        *(checkout, folder, "run", "--workload", "replay:resnet50-v100", "--backend", backend),
        *("--workers", "4", "--cluster", CLUSTER, "--scheduler", "mg-wfbp", "--link", str(link)),
        *("--steps", "14", "--warmup", "4", "--threads", "1", "--verify-steps", "2"),
        *("--deadline", "30", "--json", "cell.json"),
    )
    cell = json.loads((folder / "cell.json").read_text())
    print(f"  plan {cell['plan_digest'][:12]}, {cell['num_messages']} messages", flush=True)
    return {f"step of {backend}": cell["step_time_s"]}


def measurements(old: Path) -> dict[str, Callable[[Path, Path], Times]]:
    """What is timed, by name: functions of a checkout and a folder for files."""
    cells = {
        backend: partial(time_cell, backend, old / f"runs/unseen/{backend}.json")
        for backend in ("mpi-ring", "zmq-ps")
    }
    return {"comm": time_comm, **cells}


def compare(
    sides: Mapping[str, Side], measure: Callable[[Side, Path], Times], num_pairs: int
) -> dict[str, Ratio]:
    """Time both sides by turns.

    Args:
        sides: `old` and `new`, for instance checkouts.
        measure: of a side.
        num_pairs: how often each.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for pair in range(num_pairs):
        for side in list(sides) if pair % 2 == 0 else reversed(list(sides)):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(sides[side], Path(folder))
            for quantity, time_s in found.items():
                times.setdefault(quantity, {}).setdefault(side, []).append(time_s)
                print(f"  pair {pair + 1} {side}: {quantity} {time_s:.6g} s", flush=True)
    return {q: ratio_of(by_side["old"], by_side["new"]) for q, by_side in times.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; 0: nothing has become slower, 1: something has."""
    here = Path(__file__).parent.parent.parent
    parser = argparse.ArgumentParser(prog="compare_speed", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="older checkout, with its .venv")
    parser.add_argument("new", type=Path, nargs="?", default=here, help="newer one [this]")
    parser.add_argument("--pairs", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--only", help="comm, mpi-ring, zmq-ps, with commas [all]")
    given = parser.parse_args(arguments)
    checkouts = {"old": given.old.resolve(), "new": given.new.resolve()}
    known = measurements(checkouts["old"])
    ratios: dict[str, Ratio] = {}
    for name in chosen_names(parser, given.only, known):
        print(f"{name}:", flush=True)
        ratios |= compare(checkouts, known[name], given.pairs)
    print(f"\nnew / old over {given.pairs} pairs, {CONFIDENCE:.0%} interval:")
    for quantity, ratio in ratios.items():
        verdict = "SLOWER" if ratio.is_slower else "ok"
        print(f"{quantity:24} {ratio.mean:.3f}  {ratio.low:.3f} .. {ratio.high:.3f}  {verdict}")
    return 1 if any(ratio.is_slower for ratio in ratios.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
