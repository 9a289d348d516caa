"""An ordinary PyTorch loop that becomes data-parallel by one line.

mpirun --oversubscribe --allow-run-as-root -n 2 python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py --backend gloo --scheduler dear
"""

from __future__ import annotations

import argparse

import torch

import testbed


def main() -> None:
    """Fit a line on all ranks; rank 0 prints the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi-ring")
    parser.add_argument("--scheduler", default="wfbp")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = testbed.distribute(
        model, optimizer, backend=arguments.backend, scheduler=arguments.scheduler
    )
    rank, size = session.backend.rank, session.backend.size

    inputs = torch.randn(256, 16)
    targets = inputs.sum(1, keepdim=True)
    first = last = 0.0
    for step in range(arguments.steps):
        batch = slice(32 * (step % 8), 32 * (step % 8) + 32)
        mine = inputs[batch].chunk(size)[rank], targets[batch].chunk(size)[rank]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine[0]), mine[1])
        loss.backward()  # gradients leave as the scheduler says
        optimizer.step()  # waits for the means over all ranks
        first, last = first or loss.item(), loss.item()
    session.close()
    if rank == 0:
        print(f"{size} ranks over {arguments.backend}: loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
