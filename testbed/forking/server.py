"""The fork server; see the package.

A forked process equals a freshly started one only if libraries read the same variables while they
loaded. So a server serves one *identity* (`identity_of`) and forwards other requests to a server
that it starts for them. Before it forks, it has computed nothing and has one thread, or it does not
fork at all: a child of a process that has computed with two threads hangs. It ends, and ends all
that it forked, when its standard input closes, which it does however its owner ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

from testbed.forking import FIRST, KEEPER, SUPERVISOR, process, start_server
from testbed.forking.process import Request

GRACE_S = 5.0
STUB_S = 5.0  # how long a stub may take to send its request
MAX_SERVERS = 6
MANY = 8  # requests, after which compiling a stub is worth its 70 ms


class Server:
    """Answers stubs, and forks.

    Args:
        path: of its socket.
        listener: the socket.
    """

    def __init__(self, path: Path, listener: socket.socket) -> None:
        self._path, self._listener, self._pid = path, listener, os.getpid()
        self._servers = {process.identity_of(os.environ): path}
        self._surroundings = process.surroundings_of(os.getpid())
        self._loaded: set[str] = set()
        self._opened = self._num_asked = 0
        self._started: list[subprocess.Popen[bytes]] = []

    def serve(self) -> Request | None:
        """Answer until standard input closes; gives a request in each process that is forked."""
        signal.signal(signal.SIGCHLD, _reap)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # it ends with its owner
        while True:
            ready, _, _ = select.select([0, self._listener.fileno()], [], [])
            if 0 in ready:
                return None
            request = self._answer(self._listener.accept()[0])
            if request is not None:
                self._listener.detach()
                return request

    def close(self) -> None:
        """Have the servers that this one started end."""
        for server in self._started:
            server.communicate()

    def _answer(self, connection: socket.socket) -> Request | None:
        """Do what a stub asks for; gives its request in the forked process alone.

        A stub whose connection closes without an answer starts afresh.
        """
        self._num_asked += 1
        if self._num_asked == MANY and self._path.name == FIRST:
            _compile_stub(self._path.parent)
        with connection:
            connection.settimeout(STUB_S)
            try:
                request = process.read_request(connection)
            except (OSError, ValueError, KeyError):
                return None
            with contextlib.suppress(OSError):  # the stub has ended, or nothing more can be forked
                where = self._server_for(request)
                if where is not None and where != self._path:
                    connection.send(str(where).encode())
                elif where is not None and self._can_fork(request) and os.fork() == 0:
                    return _keep(connection, request, self._pid)
            for descriptor in request.descriptors.values():
                os.close(descriptor)
        return None

    def _server_for(self, request: Request) -> Path | None:
        """Where the server listens that may fork a process, started if need be; None: none may."""
        if not process.can_be_forked(request):
            return None
        if process.surroundings_of(request.stub) != self._surroundings:
            return None
        identity = process.identity_of(request.environment)
        if identity not in self._servers and len(self._servers) < MAX_SERVERS:
            path = self._path.with_name(f"{self._path.name}.{len(self._servers)}")
            self._started.append(start_server(path, request.environment))
            self._servers[identity] = path
        return self._servers.get(identity)

    def _can_fork(self, request: Request) -> bool:
        """Load what the request needs; whether this process has one thread then."""
        missing = [module for module in request.modules if module not in self._loaded]
        if missing:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # loading may take seconds
            before = len(os.listdir("/proc/self/fd"))
            for module in missing:
                with contextlib.suppress(Exception):  # the process that needs it raises the error
                    importlib.import_module(module)
            self._loaded.update(missing)
            self._opened += len(os.listdir("/proc/self/fd")) - before
            gc.collect()
            gc.freeze()
            if os.fork() == 0:  # OpenBLAS ends its idle threads before a fork, for good
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1 or self._opened:
            sys.stderr.write(
                f"testbed: the fork server has {threads} threads, {self._opened} open files after "
                f"loading {', '.join(sorted(self._loaded))}; processes start afresh\n"
            )
            return False
        return True


def _keep(connection: socket.socket, request: Request, server: int) -> Request:
    """Fork the process of a request and end with it; gives the request in that process alone."""
    keeper = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    try:
        process.prctl(process.PR_SET_CHILD_SUBREAPER, 1)
        process.end_with(server)
        process.take_limits(request)
        os.close(os.pidfd_open(keeper))  # an older kernel has none
        process.take_title([KEEPER, str(request.stub), request.environment.get(SUPERVISOR, "")])
        if select.select([connection], [], [], 0)[0]:
            raise ConnectionAbortedError("the stub has ended, or is its command by now")
        child = os.fork()
        if child == 0:
            process.end_with(keeper)
            return request
        for name in set(os.listdir("/proc/self/fd")) - {"0", "1", "2", str(connection.fileno())}:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))
        status = os.waitstatus_to_exitcode(_mirror(connection, child))
        process.end_descendants(GRACE_S)
        connection.send(bytes([ord("E"), status] if status >= 0 else [ord("S"), -status]))
    except (OSError, ValueError):  # the stub starts afresh, or has ended
        os._exit(1)
    os._exit(0)


def _mirror(connection: socket.socket, child: int) -> int:
    """Pass signals of the stub on until the child has ended; its status."""
    ended = os.pidfd_open(child)
    with contextlib.suppress(OSError):
        connection.send(b"A")
    while ended not in select.select([connection.fileno(), ended], [], [])[0]:
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        for signum in signals or [signal.SIGKILL]:  # the process ends with its stub
            os.kill(child, signum)
        if not signals:
            break
    return os.waitpid(child, 0)[1]


def _reap(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _compile_stub(folder: Path) -> None:
    """Have a stub that starts in 1 ms instead of 10, where there is a compiler."""
    source = Path(__file__).with_name("stub.c")
    script = f'cc -O1 -o stub.new "{source}" && mv stub.new stub'
    subprocess.Popen(["sh", "-c", script], cwd=folder, stderr=subprocess.DEVNULL)


def main(path: Path, listener: int) -> None:
    """Serve; in a forked process, run what was asked for."""
    process.prctl(process.PR_SET_CHILD_SUBREAPER, 1)
    server = Server(path, socket.socket(fileno=listener))
    request = server.serve()
    if request is not None:
        process.become(request)
    server.close()
    process.end_descendants(GRACE_S)
    if path.name == FIRST:
        shutil.rmtree(path.parent, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
