"""Cells drawn at random before any of them ran: whether predictions hold where nobody looked."""

from __future__ import annotations

import random
from itertools import product

from testbed.recipes.emulated import BACKENDS, cells
from testbed.sweeping.grid import Sweep

# Other models than the one of `emulated`, and other numbers of workers than those of the links.
MODELS = (
    *("vgg16bn-v100", "inception-v4-2080ti", "densenet201-2080ti"),
    *("bert-base-2080ti", "resnet152-2080ti"),
)
RATES = ("5gbit", "8gbit", "10gbit")
# Workers, and how many times slower everything is: two cores carry as many bytes a second for all.
WORKERS = ((2, 5), (6, 15), (8, 20))
SCHEDULERS = (
    *("wfbp", "bucket", "mg-wfbp", "asc-wfbp", "osf", "optimal"),
    *("pace", "bytescheduler", "p3", "dear"),
)
NUM_CELLS, SEED = 60, 26


def drawn() -> list[tuple[str, str, tuple[int, int], str, str]]:
    """Model, rate, workers with dilation, backend and scheduler of each cell; the same always."""
    everything = list(product(MODELS, RATES, WORKERS, BACKENDS, SCHEDULERS))
    return random.Random(SEED).sample(everything, NUM_CELLS)


def recipe() -> Sweep:
    """60 cells drawn at random: five models, three rates, 2, 6 and 8 workers; one run each."""
    found = [
        cell
        for model, rate, (workers, dilation), backend, scheduler in drawn()
        for cell in cells(
            (backend,),
            (scheduler,),
            workload=f"replay:{model}",
            workers=workers,
            cluster=f"nodes={workers},rate={rate},dilation={dilation}",
            steps=8,
            warmup=3,
        )
    ]
    return Sweep("random-cells", tuple(found), repeats=1, summary=recipe.__doc__ or "")
