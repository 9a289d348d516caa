"""Plans over Gloo beside PyTorch DDP where two cores keep up with four nodes."""

from __future__ import annotations

from testbed.recipes.emulated import SLOWLY, TUNED_DDP, cells
from testbed.sweeping.grid import Sweep


def recipe() -> Sweep:
    """`ddp-pairs` at dilation 40: auto and pace over Gloo, DDP tuned and as it comes; 6 rounds."""
    found = [
        cell
        for model, tuned in TUNED_DDP.items()
        for backends, schedulers in ((("gloo",), ("auto", "pace")), ((tuned, "ddp"), ("wfbp",)))
        for cell in cells(backends, schedulers, workload=f"replay:{model}", **SLOWLY)
    ]
    return Sweep("ddp-pairs-dilated", tuple(found), repeats=6, summary=recipe.__doc__ or "")
