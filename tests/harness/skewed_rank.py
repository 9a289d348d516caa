"""A rank of `testbed run` whose clock is ahead and drifts; leaves what it truly read in a file.

    python -m tests.harness.skewed_rank AHEAD_S DRIFT TRUTH TIMELINE BACKEND STEPS

All ranks are started alike; the clock of rank 0 is right.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.recorder import as_read
from testbed.launch.join import assign_role, who_am_i
from testbed.launch.worker import Settings, run_rank


class SkewedClock:
    """Shows t + ahead + drift (t - begin) when it is t, and notes each t."""

    def __init__(self, ahead_s: float, drift: float) -> None:
        self.begin_s = time.perf_counter()
        self.read_s: list[float] = []
        self._ahead_s, self._drift = ahead_s, drift

    def __call__(self, reading_s: float) -> float:
        self.read_s.append(reading_s)
        return reading_s + self._ahead_s + self._drift * (reading_s - self.begin_s)


def main(ahead_s: str, drift: str, truth: str, timeline: str, backend: str, steps: str) -> None:
    identity = who_am_i()
    role = assign_role(identity, BACKENDS.resolve(backend).usable(), 2)
    config = RunConfig(
        workload="digits-cnn", backend=backend, steps=int(steps), warmup=4, verify_steps=0
    )
    clock = SkewedClock(float(ahead_s), float(drift))
    is_skewed = identity.rank == 1
    shown = clock if is_skewed else as_read
    settings = Settings(launcher=identity.launcher, timeline=Path(timeline), clock=shown)
    run_rank(config, role, settings)
    if is_skewed:
        Path(truth).write_bytes(msgspec.json.encode((clock.begin_s, clock.read_s)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
