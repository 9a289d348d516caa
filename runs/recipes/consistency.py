"""How long workers wait for each other: bulk-synchronous, stale-synchronous, asynchronous."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand

# One worker stands still for a while now and then, as on a shared machine: who has to wait for it?
_SLOW = "rank=1,every=8,delay=100ms"


def recipe() -> Sweep:
    """A parameter server under five consistency rules, with one worker that is slow at times."""
    base = {
        "workload": "digits-cnn",
        "workers": 2,
        "epochs": 6,
        "threads": 1,
        "target_accuracy": (0.95,),
        "slow": _SLOW,
    }
    axes = {
        "backend": (
            "none",
            "zmq-ps",
            "zmq-ps:update=server",
            "zmq-ps:update=server,consistency=ssp:1",
            "zmq-ps:update=server,consistency=ssp:4",
            "zmq-ps:update=server,consistency=async",
        )
    }
    return Sweep("consistency", expand(base, axes), repeats=2, summary=recipe.__doc__ or "")
