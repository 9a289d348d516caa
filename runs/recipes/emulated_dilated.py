"""The methods of few messages where two cores keep up with four nodes, beside the best of many."""

from __future__ import annotations

from testbed.recipes.emulated import (
    BACKENDS,
    BASE,
    MODEL,
    SLOWLY,
    TUNED_DDP,
    cells,
    planned_ddp,
)
from testbed.sweeping.grid import Sweep, expand

SCHEDULERS = ("bucket", "optimal", "dear", "pace")


def recipe() -> Sweep:
    """What `emulated` has at dilation 10 alone, at 40: few messages, pace, DDP; 5 rounds."""
    alone = {name: value for name, value in BASE.items() if name != "predict"} | SLOWLY
    found = (
        *cells(BACKENDS, SCHEDULERS, **SLOWLY),
        *cells(("ddp", TUNED_DDP[MODEL], planned_ddp(MODEL)), **SLOWLY),
        *expand(alone, {"backend": ("none",)}),
    )
    return Sweep("emulated-dilated", found, repeats=5, summary=recipe.__doc__ or "")
