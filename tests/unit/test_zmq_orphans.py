"""A colocated server never outlives its worker, however the worker ends."""

import signal
import subprocess
import sys

import psutil
import pytest

WORKER = """
import sys, threading
import psutil
from testbed.backends.protocol import Group
from testbed.backends.zmq_ps import ZMQ_PS, ZmqPsOptions
from testbed.control.inproc import InprocHub

backend = ZMQ_PS.build(Group(0, 1, InprocHub(1).member(0), token=b"secret"), ZmqPsOptions())
(server,) = psutil.Process().children()
print(server.pid, flush=True)
if sys.stdin.readline().strip() == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, "raise"])
def test_the_server_ends_with_its_worker(end):
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        server = psutil.Process(int(worker.stdout.readline()))
        assert server.is_running()
        if end == "raise":
            worker.communicate("raise\n", timeout=60)
        else:
            worker.send_signal(end)
        worker.wait(60)
        _, alive = psutil.wait_procs([server], timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
