"""Measures what memory strategies cost, by turns with the same run without them.

    python -m tests.tools.compare_memory [--pairs 5] [--only release,mirror,wfbp]

* `release`, `mirror`: a step of ResNet-50 with 4 samples on one worker; the mirror, on the device
  and on the host, beside the same compressor without it;
* the name of a scheduler: exposed time of a replay of ResNet-50 of a V100 on an emulated cluster of
  four nodes at 10 Gbit/s, ten times slower than real, with `release`;
* `SCHEDULER+mirror`: the same with the mirror and its compressor.

See `compare_speed` for the ratio and its interval. A step has become slower if the whole interval
lies above 1.03, an exposed time above 1.05; then the exit status is 1. Leave the machine alone
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.tools.compare_speed import (
    BOUND,
    CLUSTER,
    CONFIDENCE,
    Ratio,
    Times,
    chosen_names,
    compare,
    run_testbed,
)

HERE = Path(__file__).parent.parent.parent
SPARSE = "ef:units=update+topk:ratio=0.01"
SCHEDULERS = (
    *("sequential", "wfbp", "bucket", "cycle", "mg-wfbp", "osf", "optimal", "asc-wfbp", "dear"),
    *("bytescheduler", "p3", "pace", "omgs", "lags"),
)
EXPOSED_BOUND = 1.05


def time_step(compressor: str, memory: str, folder: Path) -> Times:
    """Seconds of a step on one worker."""
    run_testbed(
        *(HERE, folder, "run", "--workload", "resnet50", "--backend", "none", "--workers", "1"),
        *("--batch-size", "4", "--steps", "9", "--warmup", "3", "--verify-steps", "0"),
        *("--momentum", "0", "--compressor", compressor, "--memory", memory),
        *("--json", "cell.json"),
    )
    return {"step": json.loads((folder / "cell.json").read_text())["step_time_s"]}


def time_exposed(scheduler: str, compressor: str, memory: str, folder: Path) -> Times:
    """Exposed seconds, and those of the whole step, on the emulated cluster."""
    run_testbed(
        *(HERE, folder, "run", "--workload", "replay:resnet50-v100", "--backend", "mpi-ring"),
        *("--workers", "4", "--cluster", CLUSTER, "--scheduler", scheduler),
        *("--link", str(HERE / "runs/unseen/mpi-ring.json"), "--compressor", compressor),
        *("--memory", memory, "--steps", "9", "--warmup", "3", "--threads", "1"),
        *("--verify-steps", "0", "--deadline", "30", "--json", "cell.json"),
    )
    cell = json.loads((folder / "cell.json").read_text())
    return {"exposed": cell["exposed_comm_s"], "step": cell["step_time_s"]}


Measure = Callable[[str, Path], Times]


def measurements() -> dict[str, tuple[Measure, str]]:
    """By name what is timed with a strategy, and the strategy."""
    found: dict[str, tuple[Measure, str]] = {
        "release": (partial(time_step, "none"), "release"),
        "mirror": (partial(time_step, SPARSE), "mirror"),
        "mirror:where=host": (partial(time_step, SPARSE), "mirror:where=host"),
    }
    for name in SCHEDULERS:
        found[name] = partial(time_exposed, name, "none"), "release"
        found[f"{name}+mirror"] = partial(time_exposed, name, SPARSE), "mirror"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; 0: nothing costs more than it may, 1: something does."""
    known = measurements()
    parser = argparse.ArgumentParser(prog="compare_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--only", help=f"some of {', '.join(known)} [all]")
    given = parser.parse_args(arguments)
    ratios: dict[str, Ratio] = {}
    for name in chosen_names(parser, given.only, known):
        print(f"{name}:", flush=True)
        measure, memory = known[name]
        found = compare({"old": "none", "new": memory}, measure, given.pairs)
        ratios |= {f"{name} {what}": ratio for what, ratio in found.items()}
    print(f"\nwith / without over {given.pairs} pairs, {CONFIDENCE:.0%} interval:")
    is_slower = False
    for quantity, ratio in ratios.items():
        bound = EXPOSED_BOUND if quantity.endswith("exposed") else BOUND
        is_slower |= ratio.low > bound
        verdict = "SLOWER" if ratio.low > bound else "ok"
        print(f"{quantity:32} {ratio.mean:.3f}  {ratio.low:.3f} .. {ratio.high:.3f}  {verdict}")
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
