"""Staging between device and host, with a copier that tells when copies run; and on a real GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.staged import StagedBackend, staged
from testbed.backends.torch_groups import DDP
from testbed.backends.zmq_ps import ZMQ_PS
from testbed.base.errors import UsageError
from testbed.base.types import Op, Request
from testbed.compression.protocol import Context
from testbed.compression.server_merge import describe
from testbed.compression.topk import TopK
from testbed.control.inproc import InprocHub

WAIT_S = 30.0


class RecordingCopier:
    """Copies in host memory, and only when allowed to."""

    def __init__(self) -> None:
        self.may_arrive = threading.Event()
        self.steps: list[str] = []

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        self.steps.append("buffer")
        return torch.empty_like(like)

    def down(self, tensor: torch.Tensor, host: torch.Tensor) -> object:
        host.copy_(tensor)
        return "down"

    def up(self, host: torch.Tensor, tensor: torch.Tensor) -> object:
        tensor.copy_(host)
        self.steps.append("up")
        return "up"

    def settle(self, token: object) -> None:
        assert self.may_arrive.wait(WAIT_S)

    def follow(self, token: object) -> None:
        self.steps.append(f"follow {token}")


class OfNoValues:
    """A device whose tensors have no values: nothing is copied, all else is as with the copier."""

    def __init__(self, copier: RecordingCopier) -> None:
        self._copier = copier
        self.settle, self.follow = copier.settle, copier.follow

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        self._copier.steps.append("buffer")
        return torch.zeros(like.shape, dtype=like.dtype)

    def down(self, tensor: torch.Tensor, host: torch.Tensor) -> object:
        return "down"

    def up(self, host: torch.Tensor, tensor: torch.Tensor) -> object:
        return "up"


def make(copier: RecordingCopier) -> StagedBackend:
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S)
    inner = LOOPBACK.build(group, LOOPBACK.options())
    return StagedBackend(inner, copier, "cpu", WAIT_S)


def test_submitting_does_not_wait_for_the_copy() -> None:
    copier = RecordingCopier()
    backend = make(copier)
    tensor = torch.arange(4.0)
    work = backend.submit(Request(Op.ALL_REDUCE, tensor, key="w"))
    assert not work.done()
    copier.may_arrive.set()
    result = work.wait()
    assert result.tensor is tensor
    assert copier.steps == ["buffer", "up", "follow up"]
    backend.close()


def test_a_tensor_of_the_host_does_not_overtake_those_of_the_device() -> None:
    """Ranks whose copies take differently long would exchange different tensors."""
    copier = RecordingCopier()
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S)
    inner = LOOPBACK.build(group, LOOPBACK.options())
    backend = StagedBackend(inner, OfNoValues(copier), "meta", WAIT_S)
    first = backend.submit(Request(Op.ALL_REDUCE, torch.empty(4, device="meta"), key="w"))
    votes = torch.ones(3, dtype=torch.int32)
    second = backend.submit(Request(Op.ALL_REDUCE, votes, key="votes"))
    third = backend.submit(Request(Op.BARRIER))
    assert not any(work.done() for work in (first, second, third))
    copier.may_arrive.set()
    assert second.wait().tensor is votes
    third.wait()
    starts_s = [work.event.started_s for work in (first, second, third)]
    assert first.done()
    assert starts_s == sorted(starts_s)
    assert first.event.submitted_s <= starts_s[0] <= first.event.ended_s
    assert copier.steps == ["buffer"]
    backend.close()


def test_a_key_keeps_its_buffer_and_the_tensor_gets_the_result() -> None:
    copier = RecordingCopier()
    copier.may_arrive.set()
    backend = make(copier)
    for step in range(3):
        tensor = torch.full((5,), float(step))
        backend.submit(Request(Op.ALL_REDUCE, tensor, key="w", step=step)).wait()
        assert tensor.tolist() == [float(step)] * 5
    assert copier.steps.count("buffer") == 1
    backend.close()


def test_what_the_inner_backend_refuses_reaches_the_waiter() -> None:
    copier = RecordingCopier()
    copier.may_arrive.set()
    backend = make(copier)
    with pytest.raises(UsageError, match="channel is 9"):
        backend.submit(Request(Op.ALL_REDUCE, torch.zeros(1), key="w", channel=9)).wait()
    backend.submit(Request(Op.ALL_REDUCE, torch.zeros(1), key="w")).wait()
    backend.close()


def test_a_backend_that_takes_the_device_is_left_alone() -> None:
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S)
    inner = LOOPBACK.build(group, LOOPBACK.options())
    assert staged(inner, "cpu", WAIT_S) is inner
    inner.close()


def test_parts_have_buffers_of_their_own_for_the_time_of_the_exchange() -> None:
    copier = RecordingCopier()
    copier.may_arrive.set()
    backend = make(copier)
    for step in range(2):
        part = torch.arange(3.0) + step  # of one shape in both steps, as a kept buffer's would be
        request = Request(Op.ALL_TO_ALL, parts=(part,), key="w", step=step)
        (arrived,) = backend.submit(request).wait().parts
        assert arrived.tolist() == part.tolist()
        gathered = backend.submit(Request(Op.ALL_GATHER, part, key="w", step=step)).wait()
        assert gathered.tensor is part
        assert gathered.parts[0].tolist() == part.tolist()
    # Nothing is copied up into what was given.
    assert copier.steps == ["buffer"] * 4
    backend.close()


def test_two_parts_of_one_shape_stay_apart() -> None:
    hub = InprocHub(2)
    arrived: list[list[list[float]]] = [[], []]

    def rank(number: int) -> None:
        group = Group(number, 2, hub.member(number), deadline_s=WAIT_S)
        copier = RecordingCopier()
        copier.may_arrive.set()
        backend = StagedBackend(LOOPBACK.build(group, LOOPBACK.options()), copier, "cpu", WAIT_S)
        parts = (torch.full((2,), 10.0 * number), torch.full((2,), 10.0 * number + 1))
        done = backend.submit(Request(Op.ALL_TO_ALL, parts=parts, key="w")).wait()
        arrived[number] = [part.tolist() for part in done.parts]
        backend.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrived == [[[0.0, 0.0], [10.0, 10.0]], [[1.0, 1.0], [11.0, 11.0]]]


def test_a_merged_payload_comes_back_in_another_size_than_was_given() -> None:
    codec = TopK(0.5)
    context = Context()
    payload = codec.encode(torch.arange(1.0, 9.0), context).payload
    note = describe(codec, 8, torch.float32)
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S, token=b"secret")
    copier = RecordingCopier()
    copier.may_arrive.set()
    backend = StagedBackend(ZMQ_PS.build(group, ZMQ_PS.options()), copier, "cpu", WAIT_S)
    done = backend.submit(Request(Op.MERGE, payload, key="w", note=note)).wait()
    assert done.lossless
    assert done.tensor is not None
    mean = codec.unpack_mean(done.tensor, torch.zeros(8))
    assert mean.tolist() == [0.0] * 4 + [5.0, 6.0, 7.0, 8.0]
    assert copier.steps == ["buffer"]
    backend.close()


def test_another_framework_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the row `ddp` was this project's own exchange of DDP's buckets over Gloo."""
    copier = RecordingCopier()
    monkeypatch.setattr("testbed.backends.staged.CudaCopier", lambda device: copier)
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S)
    backend = staged(DDP.build(group, DDP.options()), "cuda:0", WAIT_S)
    assert isinstance(backend, ExternalFramework)
    model = torch.nn.Linear(2, 2)
    wrapped = backend.wrap(model, WAIT_S)
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    wrapped(torch.ones(1, 2)).sum().backward()
    backend.count_step()
    assert backend.traffic().sent_bytes == 0  # one rank sends nothing
    copier.may_arrive.set()
    backend.close()
    plain = staged(LOOPBACK.build(group, LOOPBACK.options()), "cuda:0", WAIT_S)
    assert not isinstance(plain, ExternalFramework)
    plain.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_cuda_parts_are_delivered_to_the_device() -> None:
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S, device="cuda:0")
    backend = staged(LOOPBACK.build(group, LOOPBACK.options()), "cuda:0", WAIT_S)
    for step in range(3):
        part = torch.arange(100_003 + step, device="cuda", dtype=torch.float32)
        for op in (Op.ALL_TO_ALL, Op.ALL_GATHER):
            given = {"parts": (part,)} if op is Op.ALL_TO_ALL else {"tensor": part}
            done = backend.submit(Request(op, key="w", step=step, **given)).wait()  # type: ignore[arg-type]
            assert done.parts[0].is_cuda
            assert torch.equal(done.parts[0], part)
    backend.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_cuda_tensors_travel_and_come_back() -> None:
    group = Group(0, 1, InprocHub(1).member(0), deadline_s=WAIT_S, device="cuda:0")
    backend = staged(LOOPBACK.build(group, LOOPBACK.options()), "cuda:0", WAIT_S)
    tensor = torch.arange(1_000_003, device="cuda", dtype=torch.float32)
    expected = tensor.clone()
    for step in range(3):
        backend.submit(Request(Op.ALL_REDUCE, tensor, key="w", step=step)).wait()
        assert torch.equal(tensor, expected)
    backend.close()


def test_a_spread_goes_on_from_what_the_fold_left() -> None:
    hub = InprocHub(2)
    results: list[list[float]] = [[], []]

    def rank(number: int) -> None:
        group = Group(number, 2, hub.member(number), deadline_s=WAIT_S)
        copier = RecordingCopier()
        copier.may_arrive.set()
        inner = LOOPBACK.build(group, LOOPBACK.options())
        backend = StagedBackend(inner, copier, "cpu", WAIT_S)
        tensor = torch.full((6,), float(number + 1))
        # The device still holds this rank's own values: copied down again, they would replace sums.
        backend.submit(Request(Op.FOLD, tensor, key="w")).wait()
        backend.submit(Request(Op.SPREAD, tensor, key="w")).wait()
        results[number] = tensor.tolist()
        backend.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[3.0] * 6] * 2
