"""What plans gain over PyTorch DDP on the same transport, and in PyTorch DDP itself."""

from __future__ import annotations

from testbed.recipes.emulated import TUNED_DDP, cells, planned_ddp
from testbed.sweeping.grid import Sweep


def recipe() -> Sweep:
    """The best plan over Gloo, and DDP tuned, with a plan and as it comes; two models, 6 rounds."""
    found = [
        cell
        for model, tuned in TUNED_DDP.items()
        for backends, schedulers in (
            (("gloo",), ("auto",)),
            ((tuned, planned_ddp(model), "ddp"), ("wfbp",)),
        )
        for cell in cells(backends, schedulers, workload=f"replay:{model}")
    ]
    return Sweep("ddp-pairs", tuple(found), repeats=6, summary=recipe.__doc__ or "")
