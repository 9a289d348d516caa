"""Follows the advice of `testbed why` in real runs and compares what it gained with what was said.

    python -m tests.tools.followed_advice --cases 10

Each case is a run with the events recorded, what `why` advised first for it, and a run with that.
A case is right where the gain of the median step is within 20 % or 1 ms of what was said. Runs are
on emulated clusters of this machine; keep it quiet meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from testbed.causes.advice import advise, schedulers
from testbed.causes.summary import Advice, why
from testbed.records.timeline import Timeline
from tests.tools.live_faults import Run

WITHIN, WITHIN_S = 0.2, 1e-3
BACKENDS = ("mpi-ring", "zmq-ps", "gloo")
MODELS = (
    {"width": "48", "depth": "60", "batch": "1024"},
    {"width": "1024", "depth": "6"},
    {"width": "256", "depth": "19", "batch": "512"},
)
SCHEDULERS = ("wfbp", "bucket:mib=0.5,first_mib=0.1")  # of one message no link can be told


def step_s(timeline: Timeline) -> float:
    """The median step of the slowest rank."""
    paces: dict[int, float] = {}
    for event in timeline.events:
        if event.kind == "step":
            paces[event.step] = max(paces.get(event.step, 0.0), event.duration_s)
    return median(paces.values())


def followed(backend: str, model: dict[str, str], scheduler: str, steps: int) -> bool | None:
    """Whether the gain was as said; None where nothing was advised that an option does."""
    options = {"backend": backend, "scheduler": scheduler, "steps": str(steps)}
    # a core is free for whoever wakes, as on nodes with more than these have
    cluster = {"latency": "1ms", "latency_by": "injected", "cpu_policy": "other"}
    before = _run(Run(options, model, cluster))
    specs = schedulers(backend)
    found = why(before, None, lambda explained: advise(before, explained, specs))
    chosen = next((a for a in found.advice if a.options and a.gain_s > 0), None)
    name = f"{backend} {scheduler} {model}"
    if chosen is None:
        print(f"{name}: nothing advised", flush=True)
        return None
    after = _run(Run({**options, **chosen.options}, model, cluster))
    return _compared(name, chosen, step_s(before) - step_s(after))


def _run(run: Run) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        return run.make(Path(folder))[1]


def _compared(name: str, chosen: Advice, gained_s: float) -> bool:
    right = abs(gained_s - chosen.gain_s) <= max(WITHIN * chosen.gain_s, WITHIN_S)
    print(
        f"{name}: {chosen.change}: said {chosen.gain_s * 1e3:.1f} ms, "
        f"gained {gained_s * 1e3:.1f} ms: {'right' if right else 'wrong'}",
        flush=True,
    )
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts of cases; status 1 where fewer than 8 of 10 are right."""
    parser = argparse.ArgumentParser(description="follow the advice of testbed why")
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[bool] = []
    for scheduler, model, backend in itertools.product(SCHEDULERS, MODELS, BACKENDS):
        if len(results) >= given.cases:
            break
        outcome = followed(backend, model, scheduler, given.steps)
        results += [] if outcome is None else [outcome]
    print(f"{sum(results)} of {len(results)} right")
    return int(sum(results) < 0.8 * len(results))


if __name__ == "__main__":
    sys.exit(main())
