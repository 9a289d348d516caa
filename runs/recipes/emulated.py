"""The methods on an emulated cluster whose network is the bottleneck, beside PyTorch DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from testbed.base.config import RunConfig
from testbed.sweeping.grid import Sweep, expand

# ResNet-50 as a V100 computes it, on four nodes with 10 Gbit/s; everything ten times slower, so
# that two cores keep up, and forty times where messages are many.
CLUSTER = "nodes=4,rate=10gbit,dilation={dilation}"
DILATION, OF_MANY = 10, 40
BACKENDS = ("mpi-ring", "gloo", "zmq-ps")
SCHEDULERS = ("wfbp", "bucket", "optimal", "pace", "dear", "bytescheduler")
MANY_MESSAGES = ("wfbp", "pace", "bytescheduler", "p3")

MODEL = "resnet50-v100"

# One size for all buckets: of 1, 2, 4, 8, 16, 25, 32 and 64 MiB the one that is predicted to be
# fastest on runs/links/gloo.json, confirmed by no run; torch's own is 25, the first one 1.
TUNED_DDP = {MODEL: "ddp:bucket_mib=8", "resnet101-v100": "ddp:bucket_mib=8"}

# Fitted once with `testbed comm --fit`: no cell measures a link, so that every prediction is
# held-out. PyTorch DDP exchanges over Gloo. The paths are those of a clone's root.
LINKS = {name: f"runs/links/{name}.json" for name in BACKENDS} | {"ddp": "runs/links/gloo.json"}

# Where two cores keep up with whatever the nodes do; steps are longer, and fewer do.
SLOWLY = {"cluster": CLUSTER.format(dilation=OF_MANY), "steps": 10}

# Five steps of warm-up; the first two are compared with one process, so that nothing is awaited in
# those that count.
BASE = {
    "workload": f"replay:{MODEL}",
    "workers": 4,
    "cluster": CLUSTER.format(dilation=DILATION),
    "steps": 12,
    "warmup": 5,
    "verify_steps": 2,
    "threads": 1,
    "deadline": 60.0,
    "predict": True,
}


def planned_ddp(model: str) -> str:
    """PyTorch DDP with the buckets of a plan, as `testbed plan --for ddp` writes it."""
    return f"ddp:plan=runs/plans/ddp-{model}.json"


def cells(
    backends: Iterable[str], schedulers: Iterable[str] = ("wfbp",), **values: Any
) -> tuple[RunConfig, ...]:
    """Every scheduler over every backend, each on its fitted link, in the order given."""
    found: list[RunConfig] = []
    for backend in backends:
        link = LINKS[backend.partition(":")[0]]
        base = {**BASE, "backend": backend, "link": link, **values}
        found += expand(base, {"scheduler": tuple(schedulers)})
    return tuple(found)


def recipe() -> Sweep:
    """ResNet-50 of a V100 replayed on 4 nodes with 10 Gbit/s, beside PyTorch DDP; 5 rounds."""
    alone = {name: value for name, value in BASE.items() if name != "predict"}
    found = (
        *cells(BACKENDS, SCHEDULERS),
        *cells(("ddp", TUNED_DDP[MODEL], planned_ddp(MODEL))),
        *expand(alone, {"backend": ("none",)}),
        *cells(BACKENDS, MANY_MESSAGES, **SLOWLY),
    )
    return Sweep("emulated", found, repeats=5, summary=recipe.__doc__ or "")
