"""A link measured on real backends: all ranks agree, and the budget decides what is sent."""

import threading
from dataclasses import replace

import pytest
import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.none import NONE
from testbed.backends.protocol import Group
from testbed.base.errors import UsageError
from testbed.base.types import Op
from testbed.cluster.topology import burst_bytes
from testbed.control.inproc import InprocHub
from testbed.prediction.fit import fit_link
from testbed.profiling.link import measure_link
from testbed.profiling.sweep import (
    LEAD_BYTES,
    Exchange,
    LinkSweep,
    exchanges_of,
    first_look,
    num_rounds,
    of_job,
    quick,
    shuffled,
    thorough,
    time_of_one,
)
from testbed.profiling.table import link_table

SMALL = LinkSweep(
    sizes=(64, 1024, 16384), repeats=3, min_repeats=2, budget_s=5.0, concurrent_bytes=1024
)


def on_threads(num_workers, num_channels, body):
    """body(rank, opened backend, control) on every rank; results in rank order."""
    hub = InprocHub(num_workers)
    results, errors = {}, []

    def live(rank):
        group = Group(rank, num_workers, hub.member(rank), num_channels=num_channels)
        try:
            backend = LOOPBACK.build(group, LOOPBACK.options())
            results[rank] = body(rank, backend, group.control)
            backend.close()
        except BaseException as error:
            errors.append(error)
            group.control.report_failure(str(error))

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_workers)]


def measured(num_workers, num_channels, sweep=SMALL):
    def body(rank, backend, control):
        return measure_link(
            backend,
            control,
            name="loopback",
            num_workers=num_workers,
            deadline_s=20.0,
            sweep=sweep,
        )

    return on_threads(num_workers, num_channels, body)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_all_ranks_get_the_same_link(num_workers):
    links = measured(num_workers, 4)
    assert all(link == links[0] for link in links)
    link = links[0]
    assert (link.backend, link.num_workers) == ("loopback", num_workers)
    assert len(link.concurrency_slowdown) == 4
    assert link.concurrency_slowdown[0] == 1.0
    assert list(link.concurrency_slowdown) == sorted(link.concurrency_slowdown)
    assert [row["num_bytes"] for row in link.extra["fit"]["sizes"]] == [64, 1024, 16384]
    assert link.time_s(1024) > 0
    assert link.submit_s > 0
    assert link.landing_s > 0
    assert "processor time of a message" in link_table(link)
    assert "slow-down of 1, 2, ... messages at once: 1.00" in link_table(link)


def test_one_channel_says_nothing_of_concurrency():
    link = measured(2, 1)[0]
    assert link.concurrency_slowdown is None
    assert "not measured (one channel)" in link_table(link)


def test_a_fit_that_misses_most_samples_is_called_poor():
    wild = [(size, (1e-4 + 1e-9 * size) * f) for size in (1e4, 1e5, 1e6) for f in (0.5, 1.0, 1.5)]
    good = [(size, 1e-4 + 1e-9 * size) for size in (1e4, 1e5, 1e6)]
    assert "# a poor fit" in link_table(fit_link("x", 2, wild))
    assert "poor" not in link_table(fit_link("x", 2, good))


def test_one_worker_is_free():
    link = measured(1, 1)[0]
    assert link.time_s(1 << 20) == 0
    assert "nothing is sent" in link_table(link)


def test_a_budget_of_nothing_leaves_two_sizes_and_the_least_rounds():
    sweep = LinkSweep(sizes=(64, 1024, 16384), repeats=9, min_repeats=2, budget_s=1e-9)
    rows = measured(2, 1, sweep)[0].extra["fit"]["sizes"]
    assert [(row["num_bytes"], row["num_samples"]) for row in rows] == [(64, 2), (1024, 2)]


def test_it_can_be_measured_twice_and_then_be_used():
    def body(rank, backend, control):
        for _ in range(2):
            measure_link(backend, control, num_workers=2, deadline_s=20.0, sweep=SMALL)
        from testbed.base.types import Request

        tensor = torch.ones(4)
        backend.submit(Request(Op.ALL_REDUCE, tensor, key="after", step=0)).wait()
        return tensor.tolist()

    assert on_threads(2, 1, body) == [[2.0] * 4] * 2


def test_a_backend_that_moves_nothing_has_no_link():
    control = InprocHub(1).member(0)
    backend = NONE.build(Group(0, 2, control), NONE.options())
    with pytest.raises(UsageError, match="moves no sums"):
        measure_link(backend, control, name="none", num_workers=2, deadline_s=1.0)


def test_rounds_hold_every_exchange_once_in_a_shared_random_order():
    exchanges = exchanges_of(quick().sizes, 4, quick().concurrent_bytes)
    assert [e.num_messages for e in exchanges[-3:]] == [2, 3, 4]
    rounds = [shuffled(exchanges, 1, number) for number in range(3)]
    key = lambda e: (e.num_bytes, e.num_messages, e.row or 0)  # noqa: E731
    assert all(sorted(r, key=key) == sorted(exchanges, key=key) for r in rounds)
    assert rounds[0] != rounds[1]
    assert rounds[1] == shuffled(exchanges, 1, 1)


def test_the_concurrent_size_is_measured_alone_as_well():
    assert sum(e.num_bytes == 96 and e.num_messages == 1 for e in exchanges_of([64], 2, 96)) == 1


def test_sweeps_are_checked():
    assert thorough(1 << 20).sizes[-1] == 1 << 20
    assert num_rounds(SMALL, 100.0) == 2
    for wrong in ({"sizes": (8,)}, {"sizes": (8, 10)}, {"sizes": (16, 8)}, {"min_repeats": 4}):
        given = {"sizes": (4, 8), "repeats": 3, "min_repeats": 2, "budget_s": 1.0}
        with pytest.raises(UsageError, match="expected"):
            LinkSweep(**{**given, **wrong})


def test_of_a_row_the_time_behind_its_first_message_counts():
    ended_s = [5.0, 6.0, 7.5]
    assert Exchange(1 << 20).num_in_row == 9
    assert time_of_one(Exchange(1 << 20), 0.0, ended_s) == pytest.approx(1.25)
    assert time_of_one(Exchange(1 << 25), 1.0, [5.0]) == 4.0


def test_short_messages_stand_behind_one_that_uses_up_what_a_shaper_lets_pass():
    assert max(burst_bytes(1e9, shaper) for shaper in ("htb", "tbf")) <= LEAD_BYTES
    assert Exchange(4096).lead_bytes == LEAD_BYTES
    assert Exchange(1 << 20).lead_bytes == 1 << 20
    assert Exchange(1 << 26).lead_bytes == 1 << 26  # alone, it leads nothing
    sent = []

    def body(rank, backend, control):
        submit = backend.submit
        if rank == 0:
            backend.submit = lambda request: sent.append(request) or submit(request)
        measure_link(backend, control, num_workers=2, deadline_s=20.0, sweep=SMALL)

    on_threads(2, 1, body)
    sums = [r for r in sent if r.op is Op.ALL_REDUCE and r.key.startswith("link/64/")]
    assert {r.tensor.nbytes for r in sums if r.key.endswith("/0")} == {LEAD_BYTES}
    assert {r.tensor.nbytes for r in sums if not r.key.endswith("/0")} == {64}


def test_messages_at_once_end_with_the_last_channel():
    # two channels, two messages on each: submitted channel by channel, place by place
    assert time_of_one(Exchange(1 << 20, 2), 0.0, [2.0, 3.0, 6.0, 5.0]) == 3.0


def test_a_row_takes_what_the_ranks_take_on_average_and_one_alone_what_the_slowest_takes():
    assert of_job(Exchange(4096), (1.0, 3.0)) == 2.0
    assert of_job(Exchange(1 << 26), (1.0, 3.0)) == 3.0


@pytest.mark.parametrize("num_channels", [1, 2])
def test_each_message_of_a_stream_but_the_first_is_a_sample(num_channels):
    sweep = replace(SMALL, stream=(16, 4096, 16, 256))
    rows = measured(2, num_channels, sweep)[0].extra["fit"]["sizes"]
    rounds = next(row["num_samples"] for row in rows if row["num_bytes"] == 64)
    streamed = {row["num_bytes"]: row["num_samples"] for row in rows}
    assert {size: streamed[size] for size in (16, 256, 4096)} == {
        16: rounds,
        256: rounds,
        4096: rounds,
    }


def test_a_first_look_gives_all_ranks_one_figure():
    def body(rank, backend, control):
        return first_look(backend, control, deadline_s=20.0)

    looks = on_threads(3, 1, body)
    assert len(set(looks)) == 1
    assert looks[0] > 0


@pytest.mark.parametrize(
    ("dilation", "step_s", "budget_s"), [(1, 0.2, 1), (10, 2, 10), (1, 4, 4), (1, 70, 10)]
)
def test_a_slow_link_is_given_as_long_as_a_step_of_the_run(dilation, step_s, budget_s):
    assert quick(1 << 20, dilation, step_s=step_s).budget_s == budget_s


def test_messages_at_once_are_timed_by_all_that_was_sent() -> None:
    """A line moves 1 message per second; the channel that was ahead after its first stays so."""
    together = Exchange(1 << 22, 2, row=2)
    for ended_s in ([1.5, 2.0, 3.75, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]):
        assert time_of_one(together, 0.0, ended_s) == 2.0
