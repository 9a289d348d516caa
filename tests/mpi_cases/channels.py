"""Under mpirun with two ranks: channels that do not wait for each other, and priority order."""

from __future__ import annotations

import sys

import torch
from launched import MpiControl, open_backend
from mpi4py import MPI

from testbed.backends.mpi.options import RingOptions
from testbed.base.types import Op, Request


def check_independence(spec: str, control: MpiControl) -> None:
    """Channel 0 waits for rank 1 while channel 1 gets its work done."""
    backend = open_backend(spec, control, name="independent", num_channels=2)
    tensors = [torch.ones(200_000), torch.ones(200_000)]
    requests = [Request(Op.ALL_REDUCE, t, channel=c) for c, t in enumerate(tensors)]
    held_up = backend.submit(requests[0]) if control.rank == 0 else None
    backend.submit(requests[1]).wait()
    assert held_up is None or not held_up.done()
    MPI.COMM_WORLD.Barrier()
    (held_up or backend.submit(requests[0])).wait()
    assert all(bool((t == 2).all()) for t in tensors)
    many = [
        backend.submit(Request(Op.ALL_REDUCE, torch.full((n,), 1.0), key=str(n), channel=n % 2))
        for n in range(40)
    ]
    for n, work in enumerate(many):
        done = work.wait().tensor
        assert done is not None
        assert done.tolist() == [2.0] * n
    backend.close()


def check_priority(spec: str, control: MpiControl) -> None:
    """Ranks submit in different orders; both run what rank 0 announced."""
    backend = open_backend(spec, control, name="urgent", order="priority")
    names = ["a", "b", "c", "d", "e"]
    mine = names if control.rank == 0 else names[::-1]
    tensors = {name: torch.full((1000,), float(i + 1)) for i, name in enumerate(names)}
    works = {
        name: backend.submit(
            Request(Op.ALL_REDUCE, tensors[name], key=name, priority=-names.index(name))
        )
        for name in mine
    }
    for i, name in enumerate(names):
        works[name].wait()
        assert tensors[name].tolist() == [2.0 * (i + 1)] * 1000
    started = sorted(names, key=lambda name: works[name].event.started_s)
    orders = MPI.COMM_WORLD.allgather(started)
    assert orders[0] == orders[1]
    backend.close()


def check_settled(spec: str, control: MpiControl) -> None:
    """The switch that was measured holds for whoever opens the ring again with these options."""
    first = open_backend(spec, control, name="first")
    settled = first.capabilities.settled
    first.close()
    assert settled is None or isinstance(settled, RingOptions)
    assert (settled is None) == (not spec.startswith("mpi-ring"))
    if settled is None:
        return
    assert settled.fixed_switch_bytes is not None
    assert len(set(MPI.COMM_WORLD.allgather(settled.switch_bytes))) == 1
    text = f"mpi-ring:switch_bytes={settled.switch_bytes},segment_kib={settled.segment_kib}"
    again = open_backend(text, control, name="again")
    assert again.capabilities.settled == settled
    again.close()


def main() -> None:
    torch.set_num_threads(1)
    control = MpiControl().start()
    for spec in sys.argv[1:]:
        check_independence(spec, control)
        check_priority(spec, control)
        check_settled(spec, control)
    control.close()
    if control.rank == 0:
        print("all right on 2", flush=True)


if __name__ == "__main__":
    main()
