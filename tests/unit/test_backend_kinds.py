"""What starts a run asks for a backend's kind; only the ranks need torch, which takes seconds."""

import subprocess
import sys

import pytest

from testbed.backends.protocol import Group
from testbed.backends.torch_groups import DDP, GLOO
from testbed.base.errors import Unavailable
from testbed.control.inproc import InprocHub


@pytest.mark.parametrize("text", ["gloo", "ddp", "mpi-ring", "mpi", "zmq-ps"])
def test_a_kind_is_found_checked_and_asked_without_loading_torch(text):
    pytest.importorskip("mpi4py")
    code = (
        "import sys\n"
        "from testbed.base.axes import BACKENDS\n"
        f"backend = BACKENDS.resolve({text!r}).usable()\n"
        "print(backend.name, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [text, "False"], done.stderr


@pytest.mark.parametrize("kind", [GLOO, DDP], ids=lambda kind: kind.name)
def test_a_torch_that_was_built_without_gloo_is_named_where_it_is_opened(monkeypatch, kind):
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    group = Group(0, 1, InprocHub(1).member(0))
    with pytest.raises(Unavailable, match="built without Gloo"):
        kind.build(group, kind.options())
