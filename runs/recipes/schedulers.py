"""Every scheduler on a server, a ring and Gloo: predicted beside measured step time."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand

# Sizes that cut and fuse this network's gradients (269 722 elements) as the defaults cut and fuse
# networks of a hundred times its size.
SCHEDULERS = (
    "sequential",
    "wfbp",
    "bucket:mib=0.25,first_mib=0.01",
    "cycle:mib=1",
    "mg-wfbp",
    "asc-wfbp",
    "optimal",
    "osf",
    "pace",
    "bytescheduler:partition_kib=64,credit_kib=256",
    "p3:slice_elements=20000",
    "dear:mib=0.25",
    "auto",
)


def recipe() -> Sweep:
    """All schedulers over zmq-ps, mpi-ring and gloo, with a prediction from this machine's link."""
    base = {
        "workload": "resnet20",
        "workers": 2,
        "steps": 40,
        "warmup": 8,
        "batch_size": 8,
        "threads": 1,
        "predict": True,
    }
    axes = {"backend": ("zmq-ps", "mpi-ring", "gloo"), "scheduler": SCHEDULERS}
    return Sweep("schedulers", expand(base, axes), repeats=1, summary=recipe.__doc__ or "")
