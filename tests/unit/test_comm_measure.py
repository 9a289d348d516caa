"""What travels, what counts as wrong, and a whole measurement by threads over loopback."""

import threading

import pytest
import torch

from testbed.backends.loopback import LoopbackBackend
from testbed.backends.protocol import Group
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import RankLost
from testbed.base.types import Op, Result
from testbed.control.inproc import InprocHub
from testbed.microbench.measure import (
    PERIOD,
    Exchanged,
    fill,
    make_tensors,
    measure,
    num_wrong,
    rank_pattern,
    sum_pattern,
    wrong_elements,
)
from testbed.records.comm import EXACT_UP_TO, CommConfig

OPERATIONS = ("sum", "fold-spread", "gather", "broadcast")


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
@pytest.mark.parametrize("num_workers", [2, 3, 17])
def test_the_sum_of_all_ranks_is_exact_in_any_order(dtype, num_workers):
    kind = getattr(torch, dtype)
    ranks = [rank_pattern(r, dtype, num_workers).to(kind) for r in range(num_workers)]
    expected = sum_pattern(dtype, num_workers)
    assert int(expected.max()) <= EXACT_UP_TO[dtype]
    for order in (ranks, ranks[::-1]):
        total = torch.zeros(PERIOD, dtype=kind)
        for pattern in order:
            total += pattern
        assert torch.equal(total.to(torch.int64), expected)


@pytest.mark.parametrize("count", [1, 100, PERIOD, 3 * PERIOD + 5])
def test_filling_is_the_pattern_repeated_from_the_step_on(count):
    pattern = rank_pattern(1, "int64", 2)
    tensor = torch.empty(count, dtype=torch.int64)
    for step in (0, 7, PERIOD + 3):
        fill(tensor, pattern, step)
        plain = [int(pattern[(i + step) % PERIOD]) for i in range(count)]
        assert tensor.tolist() == plain
        assert num_wrong(tensor, pattern, step) == 0


@pytest.mark.parametrize("shift", [1, 512, 1 << 17])
def test_a_piece_at_the_wrong_place_is_wrong(shift):
    pattern = sum_pattern("float32", 2).float()
    tensor = torch.empty(1 << 18)
    fill(tensor, pattern, 5)
    assert num_wrong(torch.roll(tensor, shift), pattern, 5) > tensor.numel() / 2


def test_a_result_of_an_earlier_exchange_is_wrong():
    pattern = sum_pattern("float32", 2).float()
    tensor = torch.empty(10_000)
    fill(tensor, pattern, 5)
    assert num_wrong(tensor, pattern, 6) > tensor.numel() / 2


def test_every_wrong_element_is_counted_once_and_nan_is_wrong():
    pattern = sum_pattern("float32", 2).float()
    tensor = torch.empty(2 * PERIOD + 10)
    fill(tensor, pattern, 0)
    tensor[3] += 1
    tensor[PERIOD] = float("nan")
    tensor[-1] -= 1
    assert num_wrong(tensor, pattern, 0) == 3


def test_parts_that_are_missing_or_too_short_are_wrong():
    config = CommConfig(backend=("gloo",), op="gather")
    tensors = make_tensors(config, 0, 100, "cpu")
    fill(tensors.buffer, tensors.mine, 0)
    whole = tensors.buffer.clone()
    for parts, wrong in (((whole,), 100), ((whole, whole[:50]), 100), ((), 200)):
        result = Result(tensors.buffer, parts)
        assert wrong_elements("gather", tensors, tensors.buffer, result, 0) == wrong


class Corrupting:
    """A backend that changes one element of every third result on one rank."""

    def __init__(self, backend, rank):
        self._backend, self._rank = backend, rank
        self.rank, self.size, self.capabilities = backend.rank, backend.size, backend.capabilities

    def submit(self, request):
        work = self._backend.submit(request)
        if request.op is Op.ALL_REDUCE and self.rank == self._rank and request.step % 3 == 0:
            work.wait()
            request.tensor[0] += 1
        return work

    def close(self, timeout_s=10.0):
        self._backend.close(timeout_s)


class Failing(Corrupting):
    """A backend that cannot go on after some exchanges."""

    def submit(self, request):
        if self.rank == self._rank and request.step == 5:
            raise RuntimeError("broken on purpose")
        return self._backend.submit(request)


def by_threads(config, wrap=lambda number, backend: backend):
    """What `measure` gives on every rank; the ranks are threads, the backends loopback."""
    hub = InprocHub(config.workers)
    outcomes = {}

    def body(rank):
        control = hub.member(rank)
        backends = [
            wrap(
                number,
                LoopbackBackend(
                    Group(rank, config.workers, control, name=f"comm{number}", deadline_s=20)
                ),
            )
            for number in range(len(config.backend))
        ]
        try:
            outcomes[rank] = list(measure(config, backends, control))
        except BaseException as error:
            outcomes[rank] = error
            control.report_failure(str(error))
        for backend in backends:
            backend.close()

    threads = [threading.Thread(target=body, args=(r,)) for r in range(config.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[r] for r in range(config.workers)]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("workers", [1, 3])
def test_all_ranks_get_the_same_samples_of_every_size_and_backend(op, workers):
    config = CommConfig(
        backend=("a", "b"),
        workers=workers,
        min_bytes=64,
        max_bytes=1 << 16,
        iters=3,
        warmup=1,
        check=2,
        op=op,
        dtype="bfloat16",
    )
    first, *others = by_threads(config)
    assert all(other == first for other in others)
    assert len(first) == 6
    for samples in first:
        assert samples.num_wrong == (0, 0)
        assert [len(times) for times in samples.samples_s] == [3, 3]
        assert all(s > 0 for times in samples.samples_s for s in times)


def test_wrong_elements_of_all_ranks_and_checked_exchanges_are_counted():
    config = CommConfig(
        backend=("good", "bad"), workers=2, min_bytes=4096, max_bytes=4096, iters=30, check=30
    )
    (samples,), _ = by_threads(
        config, lambda number, b: Corrupting(b, rank=1) if number == 1 else b
    )
    good, bad = samples.num_wrong
    assert good == 0
    assert 0 < bad < 30


def test_without_checks_nothing_is_claimed():
    config = CommConfig(backend=("a",), min_bytes=4096, max_bytes=4096, iters=1, check=0)
    (samples,), _ = by_threads(config)
    assert samples.num_wrong == (None,)


def test_a_rank_that_fails_ends_the_measurement_on_all():
    config = CommConfig(backend=("a",), min_bytes=4096, max_bytes=4096)
    zero, one = by_threads(config, lambda _, b: Failing(b, rank=1))
    assert isinstance(one, RuntimeError)
    assert isinstance(zero, RankLost)
    assert "broken on purpose" in str(zero)


def test_an_exchange_is_what_came_and_how_long_it_took():
    assert Exchanged(0.5, Result()).time_s == 0.5
