"""What a step of the language model takes under each codec at three rates of the link."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand

RATES = ("50mbit", "200mbit", "1000mbit")
# The arms of the study `loss-compressed`, whose steps to a loss these times are for.
COMPRESSORS = (
    "none",
    "fp16",
    "bf16",
    "qsgd:bits=8,norm=max",
    "qsgd:bits=2,norm=max",
    "ef+topk:ratio=0.01",
    "topk:ratio=0.01",
    "ef-sign",
    "sign:vote=0,scaled=1",
    "ef+onebit",
    "powersgd:rank=4",
)
DGC = "dgc:ratio=0.01,momentum=0.9,warmup_steps=10"

# A rate at which no arm diverges within these steps; times do not depend on it. Of `dgc` the steps
# after its warm-up of 30 are measured, which are nine in ten of those that train.
BASE = {
    "workload": "byte-gpt",
    "backend": "mpi-ring",
    "workers": 4,
    "steps": 25,
    "warmup": 5,
    "learning_rate": 0.01,
    "verify_steps": 0,
    "threads": 1,
    "deadline": 60.0,
}


def recipe() -> Sweep:
    """The byte-level language model on 4 nodes at three rates under each codec, on a ring."""
    clusters = tuple(f"nodes=4,rate={rate}" for rate in RATES)
    cells = (
        *expand(BASE, {"cluster": clusters, "compressor": COMPRESSORS}),
        *expand(
            {**BASE, "momentum": 0.0, "steps": 55, "warmup": 35},
            {"cluster": clusters, "compressor": (DGC,)},
        ),
    )
    return Sweep("language", cells, repeats=3, summary=recipe.__doc__ or "")
