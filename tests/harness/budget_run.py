"""One request for memory in a process of its own: a step under a limit of the system.

    python -m tests.harness.budget_run WORKLOAD BATCH BUDGET_BYTES STRATEGY

trains two steps under `RLIMIT_DATA`, the process's data after a warm step of a small model plus
the budget. Prints `fits`, `refused` (the strategy finds no plan) or `exceeds` (the system refused
memory).
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from testbed.backends.none import open_none
from testbed.backends.protocol import Group
from testbed.base.config import RunConfig
from testbed.base.parts import NoOptions
from testbed.control.inproc import InprocHub
from testbed.launch.lifecycle import settle_allocator
from testbed.memory.planning.laysa import DoesNotFit
from testbed.memory.running.engine import ActivationEngine
from testbed.training.exchange_needs import Exchanged
from testbed.training.forecast import forecast, record_step
from testbed.training.replica import Replica, backward, make_replica, update
from testbed.training.session import Session
from testbed.workloads.load import load_workload


def data_bytes() -> int:
    """Private writable memory of this process: what `RLIMIT_DATA` counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def replica_of(workload: str, memory: str) -> Replica:
    """The workload, ready for its first step."""
    config = RunConfig(workload=workload, memory=memory)
    return make_replica(load_workload(workload, seed=1), config, 4)


def take_step(replica: Replica, batch_size: int) -> None:
    """One step of training."""
    backward(replica, torch.arange(batch_size).numpy() % len(replica.workload.train), 1)
    update(replica, None)


def main(workload: str, batch_size: int, budget_bytes: int, memory: str) -> str:
    """What became of the request."""
    settle_allocator(returns_pages=True)
    torch.set_num_threads(1)
    warm = replica_of("resnet20", "offload")
    moved = forecast(record_step(warm, 2), warm.strategy, Exchanged.of(warm, None, 1, False))
    engine = ActivationEngine(moved.plan)
    warm.activations = engine
    take_step(warm, 2)
    engine.close()
    del warm, engine, moved
    replica = replica_of(workload, memory)
    exchanged = Exchanged.of(replica, None, 1, compressed=False)
    lifetimes = record_step(replica, batch_size, calibrated=True)
    there_bytes = lifetimes.weight_bytes + lifetimes.optimizer_bytes
    try:
        found = forecast(lifetimes, replica.strategy, exchanged, budget_bytes=budget_bytes)
    except DoesNotFit as refusal:
        # It must be impossible with the plan that takes least as well.
        replica.activations = ActivationEngine(refusal.plan)
        verdict = "refused"
    else:
        replica.activations = ActivationEngine(found.plan)
        verdict = "allowed"
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=60.0, hosts=("localhost",))
    backend = open_none(group, NoOptions())
    replica.model.train()
    with Session(
        *(replica.model, replica.optimizer, backend, group.control), strategy=replica.strategy
    ):
        plan, replica.activations = replica.activations, None
        take_step(replica, 1)  # kernels are compiled, and the optimizer has its state
        replica.activations = plan
        # Weights and state are there already; the budget counts them.
        limit = data_bytes() - there_bytes + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            for _ in range(2):
                take_step(replica, batch_size)
        except (RuntimeError, MemoryError) as error:
            sys.stderr.write(f"{error}\n")
            return f"{verdict} exceeds"
    return f"{verdict} fits"


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
