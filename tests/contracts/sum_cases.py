"""Values of sums, as cases that every rank runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request
from testbed.training.sampling import digest_tensors
from tests.contracts.cases import (
    DTYPES,
    SIZES,
    WITHIN_S,
    assert_same,
    device_of,
    do,
    integers,
    normals,
    sum_of_integers,
)


def exact_sums(
    backend: Backend, group: Group, dtype_name: str, sizes: Sequence[int] = SIZES
) -> None:
    dtype, device = DTYPES[dtype_name], device_of(backend)
    for step, size in enumerate(sizes):
        tensor = integers(group.rank, size, dtype).to(device)
        result = do(backend, Op.ALL_REDUCE, tensor, key=f"integers {size}", step=step)
        assert result.tensor is tensor
        assert_same(tensor, sum_of_integers(group.size, size, dtype), (dtype, size))


def float_sums(
    backend: Backend, group: Group, dtype_name: str, sizes: Sequence[int] = SIZES
) -> str:
    """Checks the values against an error bound; returns a digest of the bits.

    n - 1 additions of relative error eps / 2 each, and a rounding at the end, leave less than
    n eps sum |x| (Higham, 2002, section 4.2, with room to spare).
    """
    dtype, device = DTYPES[dtype_name], device_of(backend)
    results = []
    for step, size in enumerate(sizes):
        tensor = normals(group.rank, size, dtype).to(device)
        do(backend, Op.ALL_REDUCE, tensor, key=f"normals {size}", step=step)
        parts = torch.stack([normals(r, size, dtype).double() for r in range(group.size)])
        bound = group.size * torch.finfo(dtype).eps * parts.abs().sum(0)
        error = (tensor.cpu().double() - parts.sum(0)).abs()
        assert bool((error <= bound).all()), (dtype, size, float((error - bound).max()))
        results.append(tensor)
    return digest_tensors(results)


def one_large_sum(backend: Backend, group: Group, num_elements: int) -> None:
    tensor = integers(group.rank, num_elements, torch.float32).to(device_of(backend))
    do(backend, Op.ALL_REDUCE, tensor, key="large")
    assert_same(tensor, sum_of_integers(group.size, num_elements, torch.float32))


def repeated_in_place(backend: Backend, group: Group) -> None:
    """The same memory again and again, as gradients are."""
    tensor = torch.empty(40_001, device=device_of(backend))
    address = tensor.data_ptr()
    for step in range(12):
        tensor.copy_(integers(group.rank, 40_001, torch.float32, salt=step))
        do(backend, Op.ALL_REDUCE, tensor, key="same", step=step)
        assert_same(
            tensor, sum_of_integers(group.size, 40_001, torch.float32, salt=step), f"step {step}"
        )
        assert tensor.data_ptr() == address


def repeated_fresh(backend: Backend, group: Group) -> None:
    """Another tensor and size each time; memory that was used before comes back to others."""
    for step in range(24):
        size = 1 + (step * 7919) % 30_000
        tensor = integers(group.rank, size, torch.float32, salt=step).to(device_of(backend))
        do(backend, Op.ALL_REDUCE, tensor, key="fresh", step=step)
        assert_same(tensor, sum_of_integers(group.size, size, torch.float32, salt=step), step)


def repeated_under_one_name(backend: Backend, group: Group) -> None:
    """Requests that nobody named follow each other in order of submission."""
    tensors = [integers(group.rank, 9, torch.float32, salt=i) for i in range(30)]
    tensors = [t.to(device_of(backend)) for t in tensors]
    works = [backend.submit(Request(Op.ALL_REDUCE, t)) for t in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait(WITHIN_S)
        assert_same(tensor, sum_of_integers(group.size, 9, torch.float32, salt=i), i)


def shapes(backend: Backend, group: Group) -> None:
    """Tensors without dimensions, and with several."""
    for step, shape in enumerate([(), (1,), (3, 5), (2, 0, 4), (2, 3, 4, 5)]):
        size = torch.Size(shape).numel()
        tensor = integers(group.rank, size, torch.float32).view(shape).to(device_of(backend))
        do(backend, Op.ALL_REDUCE, tensor, key="shaped", step=step)
        assert_same(tensor, sum_of_integers(group.size, size, torch.float32).view(shape), shape)


def parameters(backend: Backend, group: Group) -> None:
    """A parameter, which autograd lets nobody change in place but under `no_grad`."""
    given = torch.nn.Parameter(integers(group.rank, 5, torch.float32).to(device_of(backend)))
    do(backend, Op.ALL_REDUCE, given, key="parameter")
    assert given.requires_grad
    assert_same(given.detach(), sum_of_integers(group.size, 5, torch.float32), "parameter")


def nothing_moves(backend: Backend, group: Group) -> None:
    """What declares that it does not communicate leaves every tensor alone."""
    assert backend.capabilities.consistency == "none"
    for step, size in enumerate(SIZES):
        tensor = integers(group.rank, size, torch.float32).to(device_of(backend))
        do(backend, Op.ALL_REDUCE, tensor, key="still", step=step)
        assert_same(tensor, integers(group.rank, size, torch.float32), size)
    moved = backend.traffic()
    assert (moved.sent_bytes, moved.received_bytes, moved.local_bytes) == (0, 0, 0)
