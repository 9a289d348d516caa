"""Starts the ranks of a job as processes of this machine, without any MPI."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence

from testbed.launch import tree


def rank_environment(
    base: Mapping[str, str], rank: int, size: int, hub: tuple[str, int], token: str, threads: int
) -> dict[str, str]:
    """The variables that make a process rank `rank` of a job of `size`."""
    return {
        **base,
        "TESTBED_RANK": str(rank),
        "TESTBED_SIZE": str(size),
        "TESTBED_LOCAL_RANK": str(rank),
        "TESTBED_LOCAL_SIZE": str(size),
        "TESTBED_HUB": f"{hub[0]}:{hub[1]}",
        "TESTBED_TOKEN": token,
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads)),
    }


def start_ranks(
    command: Sequence[str], size: int, threads: int, errors: int | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start `size` processes of one command; rank 0 inherits the control plane's socket."""
    token = secrets.token_hex(16)
    base = tree.base_environment()
    children: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as failing:
        failing.callback(tree.end_all, children)
        for rank in range(size):
            environment = rank_environment(
                base, rank, size, listener.getsockname()[:2], token, threads
            )
            descriptors: tuple[int, ...] = ()
            if rank == 0:
                environment["TESTBED_LISTENER"] = str(listener.fileno())
                descriptors = (listener.fileno(),)
            children.append(tree.start(command, environment, pass_fds=descriptors, errors=errors))
        failing.pop_all()  # all have started: they are the caller's
    return children
