"""A script of a user's own, which torchrun starts on each rank; leaves its state in a file."""

import sys

import torch

import testbed

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler, memory, trace, link, record = sys.argv[1:]
    measured = {"trace": trace or None, "link": link or None}
    session = testbed.distribute(
        *(model, optimizer, "gloo"), scheduler=scheduler, memory=memory, **measured
    )
    inputs = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    for step in range(6):
        optimizer.zero_grad()
        mine = inputs[step].chunk(session.backend.size)[session.backend.rank]
        model(mine).square().mean().backward()
        optimizer.step()
    state = model.state_dict()  # nothing may be pending in it
    if session.backend.rank == 0:
        torch.save(state, record)
