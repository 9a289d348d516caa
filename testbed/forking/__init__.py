"""Processes that are forked from one that has loaded Python and torch already.

Loading torch, `torch._dynamo` and the testbed takes several seconds of a core, which every rank and
every parameter server would spend anew. The process that starts them opens a `fork_server` and
starts their commands as `through_stub` rewrites them:

    launcher (testbed, mpirun, a rank) -> stub                    (`stub.c`, or `stub.py`)
    owner -> fork server -> keeper -> the process itself          (`server`, `process`)

The stub takes the command's place below its launcher: it hands its descriptors to the server,
passes signals on and ends as the process does, so that `wait`, `kill`, Open MPI's and MPICH's
daemons work on it as on the process itself. The keeper ends the process when the stub is killed,
and ends what the process leaves behind. A stub that gets no answer within `ANSWER_S`, or whose
command the server may not fork (another user, program, namespace, cgroup or set of cores), becomes
the command: a fresh start. If the server's owner has ended, nothing is started any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from testbed.base.folders import held_folder_or_none

SERVER = "TESTBED_FORK_SERVER"  # the variable with the socket of the server
OWNER = "TESTBED_FORK_OWNER"  # the variable with the id of the process that the server belongs to
FORKED = "TESTBED_FORKED"  # the id of the process that was forked: not that of its children
SUPERVISOR = "TESTBED_SUPERVISOR"  # the variable with the id of a cell's supervisor
KEEPER = "testbed-keeper"  # the title of a keeper, with the ids of its stub and its supervisor
FIRST = "0"  # the name of the socket that stubs ask first
TITLE_BYTES = 4096
END_S = 5.0  # that a server may take to end when all that it forked has ended
ANSWER_S = 60.0  # far above what loading all modules takes: a server that does not answer hangs


@contextlib.contextmanager
def fork_server(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A server for as long as the block lasts; gives the variables under which it is found.

    Args:
        environment: variables of the processes to start. One that names a server already is given
            back as it is, and so is any where there can be none.
    """
    if SERVER in environment or sys.platform != "linux":
        yield dict(environment)
        return
    with held_folder_or_none(Path(tempfile.gettempdir()), "testbed-fork-", ".held") as folder:
        try:
            process = None if folder is None else start_server(folder / FIRST, environment)
        except OSError:  # the path is too long for a socket
            process = None
        if folder is None or process is None:
            yield dict(environment)
            return
        try:
            yield {**environment, SERVER: str(folder / FIRST), OWNER: str(os.getpid())}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)  # it ends as its standard input is closed
            process.kill()  # or was stopped, and never does
            process.wait()


def through_stub(
    command: Sequence[str],
    environment: Mapping[str, str],
    modules: Sequence[str],
    answer_s: float = ANSWER_S,
) -> list[str]:
    """The command with a stub before it, if its variables name a server that may fork it.

    Args:
        command: `python -m module arguments`.
        environment: the variables that it will have.
        modules: what it will load sooner or later; the server loads them first, once.
        answer_s: seconds that the server may take to answer; then the command starts afresh.
    """
    path = environment.get(SERVER, "")
    if list(command[:2]) != [sys.executable, "-m"] or not os.path.exists(path):
        return list(command)
    compiled = Path(path).with_name("stub")
    script = str(Path(__file__).with_name("stub.py"))
    runs = os.access(compiled, os.X_OK)
    stub = [str(compiled)] if runs else [sys.executable, "-I", "-S", script]
    return [*stub, path, f"{answer_s:g}", ",".join(modules), *command]


def start_server(path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A server that listens at a path; it ends when its standard input is closed.

    Raises:
        OSError: no socket can be there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(512)
        # The spaces are room for the command lines of what is forked.
        words = [str(path), str(listener.fileno()), " " * TITLE_BYTES]
        return subprocess.Popen(
            [sys.executable, "-m", "testbed.forking.server", *words],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def how_started() -> Literal["forked", "fresh"]:
    """How this process was started; peaks of memory compare only between processes alike."""
    return "forked" if os.environ.get(FORKED) == str(os.getpid()) else "fresh"
