"""Every scheduler on an emulated cluster whose network is the bottleneck, beside PyTorch DDP."""

from __future__ import annotations

from itertools import chain

from testbed.sweeping.grid import Sweep, expand

# ResNet-50 as a V100 computes it, on four nodes with 10 Gbit/s; everything ten times slower, so
# that two cores keep up.
CLUSTER = "nodes=4,rate=10gbit,dilation=10"

SCHEDULERS = (
    "sequential",
    "wfbp",
    "bucket",
    "cycle",
    "mg-wfbp",
    "asc-wfbp",
    "optimal",
    "osf",
    "pace",
    "bytescheduler",
    "p3",
    "dear",
    "auto",
)

# Steps of plans that cross the iteration are settled one step later: the first two are compared
# with one process. Those by priority keep both cores busy with messages, and their steps differ by
# more: they get more of them, and most of all the one with the most messages.
CROSSING = {"dear": 9, "pace": 12, "bytescheduler": 13, "auto": 12, "p3": 16}

# Where each packet travels for a millisecond, whoever merges well wins. A relay that holds packets
# has the cores that it needs at this dilation.
DELAYED = "nodes=4,rate=10gbit,dilation=40,latency=1ms"
MERGING = ("sequential", "wfbp", "mg-wfbp", "asc-wfbp", "osf", "optimal")

BASE = {
    "workload": "replay:resnet50-v100",
    "workers": 4,
    "cluster": CLUSTER,
    "steps": 7,
    "warmup": 2,
    "verify_steps": 2,
    "threads": 1,
    "deadline": 30.0,
    "predict": True,
}


def recipe() -> Sweep:
    """ResNet-50 of a V100 replayed on 4 nodes with 10 Gbit/s: all schedulers, and PyTorch DDP."""
    backends = ("zmq-ps", "mpi-ring", "gloo")
    others = tuple(name for name in SCHEDULERS if name not in CROSSING)
    cells = (
        *expand(BASE, {"backend": backends, "scheduler": others}),
        *chain.from_iterable(
            expand({**BASE, "scheduler": name, "steps": steps, "warmup": 3}, {"backend": backends})
            for name, steps in CROSSING.items()
        ),
        *expand(BASE, {"backend": ("ddp",)}),
        *expand(
            {**BASE, "cluster": DELAYED, "backend": "mpi-ring"},
            {"scheduler": MERGING},
        ),
    )
    return Sweep(
        *("emulated", cells),
        repeats=1,
        summary=recipe.__doc__ or "",
        max_again=10,
        again_within_min=58.0,
    )
