"""How long workers wait for each other: bulk-synchronous, stale-synchronous, asynchronous."""

from __future__ import annotations

from testbed.base.config import RunConfig
from testbed.sweeping.grid import Sweep, expand

# Two ways in which one worker is slowed. In fits: it stands still in every second step, while the
# other loses the same time evenly, so that both are equally fast on average and only their steps
# differ; a bound of one step is enough to absorb that. For good: it needs longer in every step, and
# no bound absorbs that for longer than the bound.
FITFUL = "rank=1,delay=60ms,every=2;rank=0,delay=30ms"
LASTING = "rank=1,delay=30ms"

BACKENDS = (
    "none",
    "zmq-ps",
    "zmq-ps:update=server",
    "zmq-ps:consistency=ssp:1",
    "zmq-ps:consistency=ssp:4",
    "zmq-ps:consistency=async",
)


def recipe() -> Sweep:
    """A parameter server under all consistency rules, one worker slowed in fits or for good."""
    cells = (*_cells(FITFUL), *_cells(LASTING))
    return Sweep("consistency", cells, repeats=1, summary=recipe.__doc__ or "")


def _cells(slow: str) -> tuple[RunConfig, ...]:
    base = {
        "workload": "digits-cnn",
        "workers": 2,
        "epochs": 10,
        "threads": 1,
        "target_accuracy": (0.95, 0.97),
        "slow": slow,
    }
    return expand(base, {"backend": BACKENDS})
