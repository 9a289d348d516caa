"""Every dense backend on one machine, small enough to end within minutes."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand


def recipe() -> Sweep:
    """A small network on real digits, two workers; each dense cell learns to 95 % and beyond."""
    base = {
        "workload": "digits-cnn",
        "workers": 2,
        "epochs": 6,
        "threads": 1,
        "target_accuracy": (0.95, 0.97),
    }
    axes = {"backend": ("none", "zmq-ps", "mpi-ring", "mpi", "gloo")}
    return Sweep("quick", expand(base, axes), repeats=2, summary=recipe.__doc__ or "")
