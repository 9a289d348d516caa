"""The backends at two sizes of the job, on a network of the size that people train."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand


def recipe() -> Sweep:
    """ResNet-20 with two and four workers on every dense backend; takes a while."""
    base = {"workload": "resnet20", "steps": 20, "threads": 1}
    axes = {
        "workers": (2, 4),
        "backend": (
            "none",
            "zmq-ps",
            "zmq-ps:servers=dedicated:1",
            "mpi-ring",
            "mpi",
            "gloo",
        ),
    }
    return Sweep("backends", expand(base, axes), repeats=2, summary=recipe.__doc__ or "")
