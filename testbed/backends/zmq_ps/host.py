"""The server process beside a worker: how it is started, watched and ended."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time

import msgspec

from testbed.backends.zmq_ps.server_process import ServerSettings
from testbed.base.errors import DeadlineExceeded, RunFailed
from testbed.forking import through_stub

SERVER_MODULE = "testbed.backends.zmq_ps.server_process"


class ServerProcess:
    """A colocated parameter server.

    Args:
        settings: given to it through its stdin, at whose end the server ends.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.index = settings.index
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", SERVER_MODULE]
        self._process = subprocess.Popen(
            through_stub(command, environment, [SERVER_MODULE]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self._stdin.write(msgspec.json.encode(settings) + b"\n")
        self._stdin.flush()

    def __str__(self) -> str:
        return f"parameter server {self.index} (pid {self.pid})"

    @property
    def watch_fd(self) -> int:
        """Becomes readable when the process has ended."""
        return self._stdout.fileno()

    def endpoints(self, timeout_s: float) -> tuple[str, str]:
        """Where the server listens for other workers and for this one, once it does.

        Raises:
            RunFailed: it ended before it listened.
            DeadlineExceeded: it did not listen within the time.
        """
        end_s = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise DeadlineExceeded(f"{self} did not listen within {timeout_s:g} s")
                piece = os.read(self.watch_fd, 4096)
                if not piece:
                    raise RunFailed(
                        f"{self} ended with status {self.status(1.0)} before it listened; "
                        "its message is on stderr"
                    )
                line += piece
        public, local = line.decode().split()
        return public, local

    def status(self, timeout_s: float) -> int | None:
        """The exit status; None if it is still running after the time."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float) -> bool:
        """Wait until it ends by itself, then kill it; whether it ended by itself.

        Args:
            timeout_s: how long it may take to end by itself.
        """
        alone = self.status(timeout_s) is not None
        if not alone:
            self._stdin.close()
            if self.status(2.0) is None:
                self._process.kill()
                self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return alone
