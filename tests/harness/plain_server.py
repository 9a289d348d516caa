"""The plain twin of the server's state: whole tensors in dictionaries, nothing sliced or streamed.

Slow and obvious; a test drives it and the sharded servers with the same inputs.
"""

from __future__ import annotations

import torch

from testbed.backends.zmq_ps.server_update import build, parse_optimizer, step


class PlainServer:
    """All servers of a job as one object that sees whole tensors.

    Args:
        num_workers: workers 0 .. num_workers - 1.
        staleness: as in `ServerState`.
    """

    def __init__(self, num_workers: int, staleness: int | None = 0) -> None:
        self.num_workers = num_workers
        self.staleness = staleness
        self.terms: dict[str, dict[int, torch.Tensor]] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.versions: dict[str, int] = {}
        self.clocks: dict[str, dict[int, int]] = {}
        self.waiting: dict[str, list[int]] = {}

    def sum(self, name: str, worker: int, term: torch.Tensor) -> torch.Tensor | None:
        """A worker's term; the sum in rank order once all are there."""
        terms = self.terms.setdefault(name, {})
        terms[worker] = term.clone()
        if len(terms) < self.num_workers:
            return None
        total = terms[0]
        for rank in range(1, self.num_workers):
            total = total + terms[rank]
        del self.terms[name]
        return total

    def install(self, key: str, value: torch.Tensor, note: str) -> None:
        """Parameters and their optimizer."""
        self.parameters[key] = value.clone()
        self.optimizers[key] = build(parse_optimizer(note), self.parameters[key])
        self.versions[key] = 0
        self.clocks[key] = dict.fromkeys(range(self.num_workers), 0)
        self.waiting[key] = []

    def apply(
        self, key: str, worker: int, gradient: torch.Tensor, learning_rate: float
    ) -> dict[int, tuple[torch.Tensor, int, int]]:
        """A worker's gradient; for each worker that may go on: parameters, version, staleness."""
        self.waiting[key].append(worker)
        if self.staleness == 0:
            total = self.sum(f"gradient of {key}", worker, gradient)
            if total is None:
                return {}
        else:
            total = gradient.clone()
        step(self.optimizers[key], self.parameters[key], total / self.num_workers, learning_rate)
        self.versions[key] += 1
        clocks = self.clocks[key]
        if self.staleness == 0:
            clocks.update({rank: clock + 1 for rank, clock in clocks.items()})
        else:
            clocks[worker] += 1
        return self._released(key)

    def depart(self, worker: int) -> dict[str, dict[int, tuple[torch.Tensor, int, int]]]:
        """A worker left in good order; the workers that may go on now, for each key."""
        for clocks in self.clocks.values():
            clocks.pop(worker, None)
        return {key: self._released(key) for key in self.parameters if self.staleness != 0}

    def _released(self, key: str) -> dict[int, tuple[torch.Tensor, int, int]]:
        slowest = min(self.clocks[key].values(), default=0)
        lags = {rank: self.clocks[key][rank] - slowest for rank in self.waiting[key]}
        limit = self.staleness
        free = {rank: lag for rank, lag in lags.items() if limit is None or lag <= limit}
        self.waiting[key] = [rank for rank in self.waiting[key] if rank not in free]
        value = self.parameters[key]
        return {rank: (value.clone(), self.versions[key], lag) for rank, lag in free.items()}
