"""Under mpirun: every op of the backends given as arguments, at awkward sizes and dtypes."""

from __future__ import annotations

import sys

import torch
from launched import MpiControl, open_backend
from mpi4py import MPI

from testbed.backends.checks import NUMBERED
from testbed.backends.mpi.plain_ring import plain_ring_fold, plain_ring_sum
from testbed.backends.protocol import Backend
from testbed.base.types import Op, Request, shard_bounds

SIZES = (0, 1, 2, 3, 5, 1000, 70_001)
FEW_SIZES = (1, 5, 70_001)


def small_integers(num_elements: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(num_elements) * 3 + rank) % 5).to(dtype)


def check_sums(backend: Backend) -> None:
    rank, size = backend.rank, backend.size
    for dtype in NUMBERED:
        for num_elements in SIZES if dtype == torch.float32 else FEW_SIZES:
            tensor = small_integers(num_elements, rank, dtype)
            every = [small_integers(num_elements, r, torch.int64) for r in range(size)]
            expected = sum(every).to(dtype)
            for _ in range(2):  # the second time over the same memory, with other values
                done = backend.submit(Request(Op.ALL_REDUCE, tensor)).wait()
                assert done.tensor is tensor
                assert torch.equal(tensor, expected), (dtype, num_elements)
                tensor.copy_(every[rank])
    scalar = torch.tensor(float(rank))
    backend.submit(Request(Op.ALL_REDUCE, scalar)).wait()
    assert scalar.item() == size * (size - 1) / 2
    parameter = torch.nn.Parameter(torch.ones(3))
    backend.submit(Request(Op.ALL_REDUCE, parameter)).wait()
    assert parameter.tolist() == [size] * 3


def check_halves(backend: Backend) -> None:
    rank, size = backend.rank, backend.size
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for num_elements in (0, 2, *FEW_SIZES):
            tensor = small_integers(num_elements, rank, dtype)
            expected = sum(small_integers(num_elements, r, dtype) for r in range(size))
            bounds = shard_bounds(num_elements, size)
            own = slice(bounds[rank], bounds[rank + 1])
            backend.submit(Request(Op.FOLD, tensor)).wait()
            assert torch.equal(tensor[own], expected[own])
            elsewhere = torch.ones(num_elements, dtype=torch.bool)
            elsewhere[own] = False
            tensor[elsewhere] = 77
            backend.submit(Request(Op.SPREAD, tensor)).wait()
            assert torch.equal(tensor, expected)


def check_the_rest(backend: Backend) -> None:
    rank, size = backend.rank, backend.size
    for root in range(size):
        for num_elements in (0, *FEW_SIZES):
            tensor = small_integers(num_elements, rank, torch.float64)
            backend.submit(Request(Op.BROADCAST, tensor, root=root)).wait()
            assert torch.equal(tensor, small_integers(num_elements, root, torch.float64))
    for dtype in (torch.int32, torch.bfloat16):
        for base in (0, 3, 200_000):
            mine = torch.full((base * (rank + 1) % 7 + base,), rank, dtype=dtype)
            parts = backend.submit(Request(Op.ALL_GATHER, mine)).wait().parts
            assert [p.numel() for p in parts] == [base * (r + 1) % 7 + base for r in range(size)]
            assert all(bool((p == r).all()) and p.dtype == dtype for r, p in enumerate(parts))
    empty_but_one = torch.ones(5 if rank == size - 1 else 0)
    parts = backend.submit(Request(Op.ALL_GATHER, empty_but_one)).wait().parts
    assert [p.numel() for p in parts] == [0] * (size - 1) + [5]
    done = backend.submit(Request(Op.BARRIER)).wait()
    assert done.traffic.sent_bytes == 0


def check_floats(backend: Backend, *, like_plain_ring: bool) -> None:
    """All ranks end with the same bits; a flat ring with those of its plain twin."""
    comm = MPI.COMM_WORLD
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for num_elements in SIZES if dtype == torch.float32 else FEW_SIZES:
            seeded = torch.Generator().manual_seed(num_elements * 31 + backend.rank)
            values = torch.randn(num_elements, generator=seeded).to(dtype)
            summed, plain = values.clone(), values.clone()
            backend.submit(Request(Op.ALL_REDUCE, summed)).wait()
            bits = bytes(summed.view(torch.uint8).numpy())
            assert len(set(comm.allgather(bits))) == 1, (dtype, num_elements)
            if like_plain_ring:
                plain_ring_sum(comm, plain)
                assert bytes(plain.view(torch.uint8).numpy()) == bits, (dtype, num_elements)
                folded, plain = values.clone(), values.clone()
                backend.submit(Request(Op.FOLD, folded)).wait()
                plain_ring_fold(comm, plain)
                own = slice(*shard_bounds(num_elements, backend.size)[backend.rank :][:2])
                assert torch.equal(folded[own], plain[own])


def check_traffic(backend: Backend) -> None:
    size = backend.size
    num_elements = 60_000 * size
    before = backend.traffic()
    done = backend.submit(Request(Op.ALL_REDUCE, torch.zeros(num_elements))).wait()
    assert done.traffic == backend.traffic() - before
    sent = MPI.COMM_WORLD.allreduce(done.traffic.sent_bytes)
    received = MPI.COMM_WORLD.allreduce(done.traffic.received_bytes)
    assert sent == received == 2 * (size - 1) * 4 * num_elements
    assert done.traffic.sent_bytes == 2 * (size - 1) * 4 * num_elements // size


def main() -> None:
    torch.set_num_threads(1)
    control = MpiControl()
    for number, spec in enumerate(sys.argv[1:]):
        backend = open_backend(spec, control, name=f"backend{number}")
        check_sums(backend)
        check_halves(backend)
        check_the_rest(backend)
        check_floats(backend, like_plain_ring="switch_bytes=0" in spec and "levels" not in spec)
        if "switch_bytes=16M" not in spec and "levels" not in spec:
            check_traffic(backend)
        backend.close()
    MPI.COMM_WORLD.Barrier()
    if control.rank == 0:
        print(f"all right on {control.size}", flush=True)


if __name__ == "__main__":
    main()
