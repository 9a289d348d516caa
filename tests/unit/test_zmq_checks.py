"""What the parameter server refuses before anything travels."""

import pytest
import torch

from testbed.backends.checks import check_request
from testbed.backends.protocol import Group
from testbed.backends.zmq_ps import ZMQ_PS, ZmqPsOptions, _encodes_again
from testbed.backends.zmq_ps.backend import check_words
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.types import Capabilities, Op, Request
from testbed.control.inproc import InprocHub


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Op.ALL_REDUCE), "has no tensor"),
        (Request(Op.ALL_REDUCE, torch.ones(4, 4).t()), "contiguous"),
        (Request(Op.ALL_REDUCE, torch.ones(2, dtype=torch.complex64)), "dtype is"),
        (Request(Op.ALL_GATHER, torch.ones(2, 2)), "expected one"),
        (Request(Op.BROADCAST, torch.ones(2), root=2), "root is 2"),
        (Request(Op.APPLY, torch.ones(2, dtype=torch.int64), "w"), "floating-point"),
    ],
)
def test_bad_requests_are_refused(request_, message):
    with pytest.raises(UsageError, match=message):
        check_request("zmq-ps", request_, Capabilities(frozenset(Op)), 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Op.ALL_REDUCE, torch.ones(2), "k" * 5000), "shorter"),
        (Request(Op.INSTALL, torch.ones(2), "w", note="{"), "optimizer note"),
        (Request(Op.INSTALL, torch.ones(2), "w", note='{"momentum": -1}'), "cannot be made"),
    ],
)
def test_what_no_server_understands_is_refused(request_, message):
    with pytest.raises(UsageError, match=message):
        check_words(request_, 2)


def test_verbs_that_were_not_declared_are_refused():
    with pytest.raises(UsageError, match="cannot apply as it was opened"):
        check_request("zmq-ps", Request(Op.APPLY), Capabilities(frozenset({Op.ALL_REDUCE})), 2)


@pytest.mark.parametrize(
    ("options", "group", "message"),
    [
        (ZmqPsOptions(servers="dedicated:1"), {}, "the job has 0"),
        (ZmqPsOptions(consistency="async"), {"order": "priority"}, "use order=fifo"),
        (ZmqPsOptions(), {"device": "cuda:0"}, "use device=cpu"),
        (ZmqPsOptions(servers="colocated:2"), {}, "ask for fewer"),
    ],
)
def test_groups_that_do_not_fit_are_refused(options, group, message):
    with pytest.raises(UsageError, match=message):
        ZMQ_PS.build(Group(0, 1, InprocHub(1).member(0), **group), options)


def test_the_kind_can_be_asked_without_torch_or_zeromq():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules.update(zmq=None, torch=None)\n"
        "from testbed.backends.zmq_ps import ZMQ_PS\n"
        "assert ZMQ_PS.facts(ZMQ_PS.options(servers='dedicated:2')).num_servers == 2\n"
        "print(ZMQ_PS.probe())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install pyzmq" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("compressor", "keeps"),
    [("topk", True), ("ef-sign", True), ("dgc", False), ("fp16", False), ("powersgd", False)],
)
def test_servers_told_to_encode_again_keep_something_of_what_they_merge(compressor, keeps):
    config = RunConfig(backend="zmq-ps:repack=1", compressor=compressor)
    assert _encodes_again(ZmqPsOptions(repack=True), config) is keeps
