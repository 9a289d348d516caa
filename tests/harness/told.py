"""A process that tells what it was started with, or does what its first argument says."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

OWN = ("TESTBED_FORKED", "TESTBED_FORK_SERVER", "TESTBED_FORK_OWNER")


def surroundings() -> dict[str, Any]:
    """Everything that a process takes from whoever starts it."""
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": os.fsdecode(Path("/proc/self/cmdline").read_bytes()),
        "path": sys.path,
        "environment": {k: v for k, v in os.environ.items() if k not in OWN},
        "folder": os.getcwd(),
        "descriptors": {
            name: (os.readlink(f"/proc/self/fd/{name}"), os.get_inheritable(int(name)))
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")  # not that of the listing
        },
        "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "SigIgn": status["SigIgn"],
        "SigCgt": status["SigCgt"],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": status["Umask"],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "buffering": [
            (s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty())
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "main": (sys.modules["__main__"].__spec__.name, __name__, __file__),
        "threads": threading.active_count(),
    }


def draw() -> list[float]:
    """Numbers that differ from process to process."""
    import numpy
    import torch

    return [random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed()]


def leave_behind() -> None:
    """A process of another session that lives on; its id is told."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    print(child.pid, flush=True)


def stay() -> None:
    """Tell when SIGTERM comes, and end."""

    def tell(signum: int, frame: object) -> None:
        print("asked", flush=True)
        sys.exit(5)

    signal.signal(signal.SIGTERM, tell)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1000)


def main(what: str, *arguments: str) -> None:
    if what in ("exit", "say", "raise"):
        atexit.register(print, "left in order")
    match what:
        case "surroundings":
            print(json.dumps(surroundings()))
        case "draw":
            print(json.dumps(draw()))
        case "leave-behind":
            leave_behind()
        case "stay":
            stay()
        case "stay-deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            leave_behind()
            signal.pause()
        case "ids":
            keeper = Path("/proc", str(os.getppid()), "status").read_text()
            server = keeper.partition("PPid:\t")[2].split("\n")[0]
            print(json.dumps([os.getpid(), os.getppid(), int(server)]))
        case "loaded":
            print(json.dumps([name in sys.modules for name in arguments]))
        case "exit":
            sys.exit(int(arguments[0]))
        case "say":
            sys.exit(arguments[0])
        case "raise":
            raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[arguments[0]]
        case "kill":
            os.kill(os.getpid(), int(arguments[0]))
        case "import":
            importlib.import_module(arguments[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
