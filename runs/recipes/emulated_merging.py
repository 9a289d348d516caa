"""Which gradients to merge: the rules on an emulated cluster, over three backends."""

from __future__ import annotations

from testbed.recipes.emulated import BACKENDS, cells
from testbed.sweeping.grid import Sweep

SCHEDULERS = ("sequential", "cycle", "mg-wfbp", "asc-wfbp", "osf")


def recipe() -> Sweep:
    """Merging rules, ResNet-50 of a V100 replayed on 4 nodes with 10 Gbit/s; 5 rounds."""
    found = cells(BACKENDS, SCHEDULERS)
    return Sweep("emulated-merging", found, repeats=5, summary=recipe.__doc__ or "")
