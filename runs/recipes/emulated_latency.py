"""Where every message costs more to start: merging on an emulated cluster with latency."""

from __future__ import annotations

from testbed.recipes.emulated import CLUSTER, OF_MANY, cells
from testbed.sweeping.grid import Sweep

# A ring of four has six hops one after another: 1.2 ms a message, of which wfbp sends 161.
SCHEDULERS = ("sequential", "wfbp", "bucket", "mg-wfbp", "asc-wfbp", "osf", "optimal")
LATENCY = "200us"


def recipe() -> Sweep:
    """Merging rules over a ring, and PyTorch DDP, with 200 us from node to node; 3 rounds."""
    cluster = f"{CLUSTER.format(dilation=OF_MANY)},latency={LATENCY}"
    found = (
        *cells(("mpi-ring",), SCHEDULERS, cluster=cluster, steps=10),
        *cells(("ddp",), cluster=cluster, steps=10),
    )
    return Sweep("emulated-latency", found, repeats=3, summary=recipe.__doc__ or "")
