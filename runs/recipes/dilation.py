"""Plans of many messages at four dilations: from which on a time is the emulated cluster's."""

from __future__ import annotations

from itertools import chain

from testbed.sweeping.grid import Sweep, expand

SCHEDULERS = ("p3", "pace", "bytescheduler", "mg-wfbp")
BACKENDS = ("mpi-ring", "zmq-ps")

# Dilation -> steps: a step takes as many times longer. All are planned on nominal numbers, so that
# a cell has the same plan at every dilation; a link measured there would give it another one.
STEPS = {10: 17, 20: 14, 40: 11, 80: 9}
BASE = {
    "workload": "replay:resnet50-v100",
    "workers": 4,
    "warmup": 3,
    "verify_steps": 0,
    "threads": 1,
    "deadline": 120.0,
    "link": "rate=10gbit,latency=50us",
}


def recipe() -> Sweep:
    """Four plans on two backends at dilations 10, 20, 40 and 80: which times depend on it."""
    cells = chain.from_iterable(
        expand(
            {**BASE, "cluster": f"nodes=4,rate=10gbit,dilation={dilation}", "steps": steps},
            {"backend": BACKENDS, "scheduler": SCHEDULERS},
        )
        for dilation, steps in STEPS.items()
    )
    return Sweep("dilation", tuple(cells), repeats=3, summary=recipe.__doc__ or "")
