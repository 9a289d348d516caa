"""Up to which bandwidth compressors pay: dense and compressed messages at several rates."""

from __future__ import annotations

from testbed.recipes.emulated import LINKS
from testbed.sweeping.grid import Sweep, expand

# Where compressing takes this machine about as long as the bytes that it saves: two cores compress
# for four workers. Select other rates with --cluster, other compressors with --compressor.
RATES = ("400mbit", "600mbit", "900mbit", "1300mbit")
COMPRESSORS = (
    *("none", "fp16", "bf16"),
    *("qsgd:bits=4,norm=max", "terngrad", "ef-sign", "ef+onebit"),
    *("ef+topk:ratio=0.01", "powersgd:rank=4"),
)

# The link is the one that was fitted once, so that predictions are held-out; what compressors cost
# is in runs/codecs/.
BACKEND = "mpi-ring"
BASE = {
    "workload": "replay:resnet50-v100",
    "backend": BACKEND,
    "link": LINKS[BACKEND],
    "scheduler": "bucket",
    "workers": 4,
    "steps": 10,
    "warmup": 5,
    "verify_steps": 0,
    "threads": 1,
    "deadline": 60.0,
    "predict": True,
}


def recipe() -> Sweep:
    """ResNet-50 replayed on 4 nodes at four rates: where 16 bits and six codecs begin to pay."""
    clusters = tuple(f"nodes=4,rate={rate}" for rate in RATES)
    cells = expand(BASE, {"cluster": clusters, "compressor": COMPRESSORS})
    return Sweep("break-evens", cells, repeats=1, summary=recipe.__doc__ or "")
