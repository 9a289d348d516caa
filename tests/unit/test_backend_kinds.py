"""What starts a run asks for a backend's kind; only the ranks need torch, which takes seconds."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("text", ["gloo", "peer:ddp", "mpi-ring", "mpi", "zmq-ps"])
def test_a_kind_is_found_checked_and_asked_without_loading_torch(text):
    pytest.importorskip("mpi4py")
    code = (
        "import sys\n"
        "from testbed.launch.join import resolve_backend\n"
        f"kind, options = resolve_backend({text!r})\n"
        "kind.consistency(options), kind.schedule(options), kind.num_servers(options)\n"
        "print(kind.name, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [text.partition(":")[0], "False"], done.stderr
