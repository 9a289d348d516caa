"""Whether dilation 40 is slow enough for plans over Gloo and PyTorch DDP."""

from __future__ import annotations

from testbed.recipes.emulated import CLUSTER, SLOWLY, cells
from testbed.sweeping.grid import Sweep


def recipe() -> Sweep:
    """Two cells of `ddp-pairs-dilated` at dilation 160: auto over Gloo, and DDP; 3 rounds."""
    slower = {**SLOWLY, "cluster": CLUSTER.format(dilation=160)}
    found = (*cells(("gloo",), ("auto",), **slower), *cells(("ddp",), **slower))
    return Sweep("ddp-pairs-160", found, repeats=3, summary=recipe.__doc__ or "")
