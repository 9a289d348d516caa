"""Under mpirun with two ranks: a lost member and an error in the thread end in named errors.

After either, MPI cannot be finalized (the lost peer would never answer), so the script leaves by
`os._exit`, as a run must; mpirun calls that abnormal, so only what is printed counts.
"""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
from launched import MpiControl, open_backend
from mpi4py import MPI

from testbed.base.errors import Disagreement, RankLost
from testbed.base.types import Op, Request
from testbed.control.protocol import Loss


def mpi_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "mpi"]


def check_loss(spec: str, control: MpiControl) -> None:
    """Rank 1 never joins the sum; rank 0 learns that it is lost."""
    backend = open_backend(spec, control, name="bereaved", num_channels=2)
    before = mpi_threads()
    if control.rank == 0:
        work = backend.submit(Request(Op.ALL_REDUCE, torch.ones(1_000_000), key="weight", step=7))
        backend.submit(Request(Op.ALL_REDUCE, torch.ones(10), channel=1))
    control.lose(Loss(1 - control.rank, f"rank {1 - control.rank}", "it was killed"))
    if control.rank == 0:
        with pytest.raises(RankLost, match=r"rank 1 is lost: it was killed.*'weight'.*step 7"):
            work.wait(10)
        with pytest.raises(RankLost):
            backend.submit(Request(Op.BARRIER)).wait(10)
    backend.close()
    assert len(before) == 1
    before[0].join(10)
    assert not before[0].is_alive()


def check_error_in_thread(spec: str, control: MpiControl) -> None:
    """What the collectives raise reaches the waiting caller and the control plane."""
    backend = open_backend(spec, control, name="disagreeing")
    dtype = torch.float32 if control.rank == 0 else torch.int64
    with pytest.raises(Disagreement, match=r"rank 0: torch.float32, rank 1: torch.int64"):
        backend.submit(Request(Op.ALL_GATHER, torch.zeros(3, dtype=dtype))).wait(10)
    for thread in mpi_threads():
        thread.join(10)
    assert len(control.failures) == 1
    assert control.failures[0].startswith("Disagreement: ")
    backend.close()


def main() -> None:
    torch.set_num_threads(1)
    control = MpiControl()
    for spec in sys.argv[1:]:
        control.failures.clear()
        check_error_in_thread(spec, control)
        control.forget()
        check_loss(spec, control)
        control.forget()
        MPI.COMM_WORLD.Barrier()
    if control.rank == 0:
        print("all right on 2", flush=True)
    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
