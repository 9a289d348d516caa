"""Parameter servers and rings on the same numbers of machines, each with a link of its own."""

from __future__ import annotations

from testbed.base.config import RunConfig
from testbed.recipes.emulated import OF_MANY, cells
from testbed.sweeping.grid import Sweep

WORKERS, DEDICATED = 4, (1, 2, 4)
MACHINES = (WORKERS, *(WORKERS + servers for servers in DEDICATED))
SCHEDULER = "bucket"


def _on(machines: int, backend: str, workers: int) -> tuple[RunConfig, ...]:
    """A cell on so many nodes with 10 Gbit/s, where two cores keep up with all of them."""
    cluster = f"nodes={machines},rate=10gbit,dilation={OF_MANY}"
    return cells((backend,), (SCHEDULER,), cluster=cluster, workers=workers, steps=10)


def recipe() -> Sweep:
    """1, 2, 4 dedicated servers for 4 workers, colocated ones and rings on as many machines."""
    dedicated = [
        _on(WORKERS + servers, f"zmq-ps:servers=dedicated:{servers}", WORKERS)
        for servers in DEDICATED
    ]
    others = [
        _on(machines, backend, machines)
        for machines in MACHINES
        for backend in ("zmq-ps:servers=colocated", "mpi-ring")
    ]
    found = [cell for group in (*dedicated, *others) for cell in group]
    return Sweep("servers", tuple(found), repeats=5, summary=recipe.__doc__ or "")
