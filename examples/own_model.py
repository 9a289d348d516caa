"""A model of one's own as a workload of the command line.

testbed run --workload examples/own_model.py:build:width=32 --backend gloo --steps 30
testbed sweep --workload examples/own_model.py:build --backend zmq-ps,mpi-ring,gloo --steps 30
"""

from __future__ import annotations

import torch

import testbed


def build(width: int = 64, samples: int = 512) -> testbed.Workload:
    """A classifier of noisy prototypes; `width=` and `samples=` can be given on the command line.

    The caller has seeded torch's generator: the same seed gives the same model and samples.
    """
    prototypes = torch.randn(10, 8 * 8)
    labels = torch.randint(10, (samples,))
    images = prototypes[labels] + 0.5 * torch.randn(samples, 8 * 8)
    model = torch.nn.Sequential(
        torch.nn.Linear(8 * 8, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    held_out = samples // 4
    return testbed.Workload(
        model=model,
        train=torch.utils.data.TensorDataset(images[held_out:], labels[held_out:]),
        test=torch.utils.data.TensorDataset(images[:held_out], labels[:held_out]),
        batch_size=16,
        learning_rate=0.05,
        data="synthetic prototypes",
    )
