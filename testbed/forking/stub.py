"""Stands in the process tree for a process that a fork server forks; see the package.

    python -I -S stub.py SOCKET WAIT_S MODULES COMMAND...

Hands its descriptors to the server, passes signals on, and ends as the forked process does. If the
server does not fork, or does not answer for WAIT_S seconds, it becomes the command itself. `stub.c`
does the same where there is a compiler; this one loads only what is built into Python, and starts
in 10 ms.
"""

import _signal  # type: ignore[import-not-found]  # `signal` itself takes 3 ms to load
import os
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket

FAULTS = {4, 7, 8, 11}  # SIGILL, SIGBUS, SIGFPE, SIGSEGV: of the stub itself


def main(path: str, wait_s: float, command: list[str]) -> None:
    """Ask the server at `path`, and do as it answers; does not return."""
    inherited = _inherited()
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in inherited)
    answer = path.encode()
    while answer[:1] == b"/":  # the socket of a server
        server = socket(AF_UNIX, SOCK_SEQPACKET, 0)
        server.settimeout(wait_s)
        try:
            server.connect(answer)
            server.sendmsg([numbers], [(SOL_SOCKET, SCM_RIGHTS, numbers)])
            answer = server.recv(512)
        except OSError:
            answer = b""
    if answer != b"A":
        owner = os.environ.get("TESTBED_FORK_OWNER")
        if owner and not os.path.exists(f"/proc/{owner}"):
            os._exit(143)  # as if it had been ended with its owner
        os.execvp(command[0], command)
    server.settimeout(None)

    def pass_on(signum: int, frame: object) -> None:
        server.send(bytes([signum]))

    for fd in inherited:
        os.close(fd)
    for signum in set(_signal.valid_signals()) - FAULTS - {_signal.SIGCHLD}:
        if signum not in (9, 19) and _signal.getsignal(signum) not in (_signal.SIG_IGN, None):
            _signal.signal(signum, pass_on)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    how, number = server.recv(512) or b"S\x09"
    if how == ord("E"):
        os._exit(number)
    if number not in (9, 19):
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _inherited() -> list[int]:
    """Descriptors that this process was started with: its own end with an exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # that of the listing itself
    return found


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[4:])
