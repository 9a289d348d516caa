"""The best plan over Gloo beside PyTorch DDP tuned by runs, where two cores should keep up."""

from __future__ import annotations

from testbed.recipes.emulated import CLUSTER, SLOWLY, TUNED_DDP, cells
from testbed.sweeping.grid import Sweep

# Of DDP's buckets, static graph and bucket view; what `auto` runs is searched by its simulator.
BUDGET = "trials=30,confirm=3,steps=5"


def recipe() -> Sweep:
    """`auto` over Gloo and DDP after a search, two models at dilation 80; 3 rounds."""
    slower = {**SLOWLY, "cluster": CLUSTER.format(dilation=80)}
    found = [
        cell
        for model in TUNED_DDP
        for cell in (
            *cells(("gloo",), ("auto",), workload=f"replay:{model}", **slower),
            *cells(("ddp",), workload=f"replay:{model}", tune=BUDGET, **slower),
        )
    ]
    return Sweep("ddp-tuned", tuple(found), repeats=3, summary=recipe.__doc__ or "")
