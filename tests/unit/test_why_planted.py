"""Causes that were planted in simulated event logs are named, and none that was not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.causes.advice import advise, link_of, schedulers
from testbed.causes.costs import Costs, Share
from testbed.causes.exchanges import Exchange, Round
from testbed.causes.explain import HOST, LATE, UNKNOWN, UNTOLD, explain
from testbed.causes.summary import why
from testbed.prediction.timeline import message_bytes
from testbed.records.step_trace import computed_in, trace_of
from testbed.records.timeline import (
    Kind,
    Timeline,
    TimelineEvent,
    decode_timeline,
    encode_timeline,
)
from testbed.scheduling.protocol import make_plan
from tests.harness import page_cells
from tests.harness.event_logs import PLANTED, Log, Planted, make_log

FAULTS = ("late rank", "busy host", "order", "codec")  # which no run has that is well


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_cause_is_named_first_in_95_of_100(planted: Planted) -> None:
    missed = []
    for seed in range(100):
        log = make_log(planted, seed)
        found, usual = explain(log.timeline, log.window)
        named = found.first(usual)
        if named != planted:
            missed.append((seed, named))
    assert len(missed) <= 5, missed


def test_without_a_fault_none_is_named() -> None:
    wrong = []
    for seed in range(150):
        log = make_log(None, seed)
        found, _ = explain(log.timeline)
        least_s = max(2e-4, 0.05 * found.exposed_s)
        wrong += [(seed, c, found.causes_s[c]) for c in FAULTS if found.causes_s[c] > least_s]
    assert len(wrong) <= 3, wrong


@pytest.mark.parametrize("seed", range(10))
def test_the_late_rank_and_the_busy_one_are_called_by_their_number(seed: int) -> None:
    log = make_log("late rank", seed)
    assert set(explain(log.timeline, log.window)[0].lateness.late) == {log.rank}
    row = next(c for c in why(log.timeline, log.window).causes if c.cause == LATE)
    assert row.note.startswith(f"rank {log.rank} by ")
    log = make_log("busy host", seed)
    found = explain(log.timeline, log.window)[0]
    assert not found.lateness.late
    assert log.rank in found.lateness.busy
    assert found.causes_s[HOST] > found.causes_s[UNKNOWN]


@pytest.mark.parametrize(
    ("first", "second"), [("saturated link", "late rank"), ("codec", "late rank")]
)
def test_two_causes_are_both_found(first: Planted, second: Planted) -> None:
    both = 0
    for seed in range(20):
        log = make_log(first, seed, also=second)
        found, usual = explain(log.timeline, log.window)
        both += {name for name, _ in found.ranked(usual)[:3]} >= {first, second}
    assert both >= 18


@settings(max_examples=60, deadline=None)
@given(planted=st.sampled_from((None, *PLANTED)), seed=st.integers(1000, 10**6))
def test_causes_sum_to_what_was_exposed(planted: Planted | None, seed: int) -> None:
    log = make_log(planted, seed)
    found, usual = explain(log.timeline, log.window)
    for part in filter(None, (found, usual)):
        counted = [sum(log.timeline.exposed_s[step]) for step in part.steps]
        exposed_s = sum(counted) / len(counted) / log.timeline.num_workers
        assert part.exposed_s == pytest.approx(exposed_s, rel=0.02, abs=2e-4)
        assert all(seconds >= 0 for seconds in part.causes_s.values())
        for each in part.stood:
            assert sum(each.causes_s.values()) == pytest.approx(each.wait.duration_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_is_always_late_is_late_in_some_steps_too(seed: int) -> None:
    log = make_log("late rank", seed)
    steps = log.window or sorted(log.timeline.exposed_s)
    kept = set(steps)
    events = tuple(e for e in log.timeline.events if e.step in kept)
    always = msgspec.structs.replace(log.timeline, events=events)
    found, usual = explain(always, steps[3:9])
    assert usual is not None
    assert log.rank in found.lateness.late
    assert found.causes_s[LATE] == pytest.approx(usual.causes_s[LATE], rel=0.3)
    assert found.causes_s[UNKNOWN] < 0.3 * found.exposed_s


def bucketed(encodes: bool, vote: bool = False) -> Timeline:
    """Two ranks, four steps of 40 ms: one message, whose parts are ready after 10 to 20 ms."""
    plan = make_plan("bucket:mib=9,first_mib=9", page_cells.TRACE, page_cells.LINK)
    names = list(reversed(plan.names))
    events = []
    for step in range(4):
        at = 0.04 * step

        def add(kind: Kind, begin: float, end: float, name: str = "m", message: int = 0) -> None:
            events.extend(
                TimelineEvent(
                    kind=kind,
                    name=name,
                    rank=rank,
                    step=step,  # noqa: B023
                    begin_s=at + begin,  # noqa: B023
                    end_s=at + end,  # noqa: B023
                    channel=0,
                    num_bytes=8 if message < 0 else 1000,
                    message=message,
                )
                for rank in range(2)
            )

        add("step", 0.0, 0.03, f"step {step}", -1)
        moments = [0.01 + 0.01 * k / (len(names) - 1) for k in range(len(names))]
        for name, moment in zip(names, moments, strict=True):
            add("ready", moment, moment, name, -1)
            if encodes:
                add("encode", moment + 1e-5, moment + 6e-5)
        handed = 0.0201
        add("queued", handed, handed)
        add("send", handed, 0.0251)
        add("wait", 0.0202, 0.0251)
        if vote:
            for kind in ("queued", "send", "wait"):
                add(kind, 0.0251, 0.0251 if kind == "queued" else 0.0252, "(in use)", -1)
    return Timeline(
        backend="gloo",
        num_workers=2,
        events=tuple(events),
        scheduler="bucket",
        plan=plan,
        link=page_cells.LINK,
    )


def test_packing_a_bucket_before_its_last_gradient_is_no_codec() -> None:
    plain, packed = (why(bucketed(encodes)) for encodes in (False, True))
    causes = [{row.cause: row.exposed_s for row in each.causes} for each in (plain, packed)]
    assert packed.first == plain.first
    for name, seconds in causes[0].items():
        assert causes[1][name] == pytest.approx(seconds, abs=2e-4)
    ready = [[row.ready_s for row in each.tensors] for each in (plain, packed)]
    assert ready[1] == pytest.approx(ready[0])
    assert max(ready[1]) == pytest.approx(0.02)


def lasting(duration_s: float, steps: Sequence[int] = range(4)) -> Timeline:
    """`bucketed` without a link, its exchanges in these steps as long as that."""
    timeline = bucketed(encodes=True)
    ends = {s: 0.04 * s + 0.0201 + duration_s for s in steps}
    events = tuple(
        msgspec.structs.replace(e, end_s=ends[e.step])
        if e.kind in ("send", "wait") and e.step in ends
        else e
        for e in timeline.events
    )
    return msgspec.structs.replace(timeline, events=events, link=None)


def test_one_message_without_a_link_waits_for_its_gradients_if_it_is_no_start_up() -> None:
    long, short = (why(lasting(seconds)) for seconds in (0.009, 0.003))
    assert long.first == "dependency"
    rows = {row.cause: row.exposed_s for row in long.causes}
    # 5 of 9 ms are no start-ups of 2 ms a hop: all but the last 2 % of them could be sent before
    assert rows["dependency"] == pytest.approx(0.0048, abs=2e-4)
    assert rows["dependency"] + rows[UNTOLD] == pytest.approx(0.009, abs=5e-4)
    rows = {row.cause: row.exposed_s for row in short.causes}
    assert short.first == UNKNOWN
    assert rows[UNTOLD] == pytest.approx(0.003, abs=5e-4)
    assert rows["dependency"] == 0


def test_what_one_message_takes_more_than_usual_is_start_up_or_link() -> None:
    costs = [Costs.of(explain(lasting(s))[0].rounds, None) for s in (0.018, 0.008)]
    (exchange, *_) = explain(lasting(0.018))[0].rounds[0].exchanges
    grown, usual = (
        Share.of(exchange, costs[0], each, frozenset(), is_busy=False) for each in costs[::-1]
    )
    assert grown.untold_s == usual.untold_s == pytest.approx(0.018)
    assert (grown.divisible_s, usual.divisible_s) == pytest.approx((0.004, 0.014))


def test_a_vote_is_an_exchange_of_its_own() -> None:
    rounds = explain(bucketed(encodes=True, vote=True))[0].rounds
    assert [(x.message, x.turn, x.num_bytes) for x in rounds[0].exchanges][1] == (1, 0, 8)


def test_what_is_handed_over_after_a_wait_takes_up_nothing_of_what_that_loses() -> None:
    plain, voted = (why(bucketed(encodes=True, vote=vote)) for vote in (False, True))
    causes = [{row.cause: row.exposed_s for row in each.causes} for each in (plain, voted)]
    assert plain.first == voted.first != UNKNOWN
    for name, seconds in causes[0].items():
        assert causes[1][name] == pytest.approx(seconds, abs=3e-4)


def test_the_time_of_a_step_is_that_of_the_steps_that_were_asked_for() -> None:
    timeline = bucketed(encodes=False)
    longer = [
        msgspec.structs.replace(e, end_s=e.end_s + 0.005) if e.step == 2 else e
        for e in timeline.events
        if e.kind == "step"
    ]
    others = [e for e in timeline.events if e.kind != "step"]
    changed = msgspec.structs.replace(timeline, events=tuple([*others, *longer]))
    assert why(changed, [2]).step_s == pytest.approx(0.035)
    assert why(changed).step_s == pytest.approx(0.03)


def test_overlap_of_a_step_that_is_waited_for_in_the_next_is_that_of_the_run() -> None:
    logs = [make_log("saturated link", seed) for seed in range(20)]
    crossing = [
        log.timeline
        for log in logs
        if log.window is None and log.timeline.plan and log.timeline.plan.crosses_iteration
    ]
    assert crossing
    for timeline in crossing:
        steps = sorted(timeline.exposed_s)
        whole = why(timeline, steps[2:-2]).overlap
        assert why(timeline, [steps[6]]).overlap == pytest.approx(whole, abs=0.15)


def test_a_timeline_whose_steps_found_no_room_says_so() -> None:
    timeline = bucketed(encodes=False)
    full = msgspec.structs.replace(timeline, events=(), dropped=9)
    with pytest.raises(UsageError, match=r"9 events found no room.*fewer of them in a step"):
        why(full)


def test_what_the_session_counted_beyond_the_waits_cannot_be_told() -> None:
    timeline = make_log("late rank", 1).timeline
    more = {step: [s + 0.01 for s in of] for step, of in timeline.exposed_s.items()}
    before = explain(timeline)[0].causes_s
    after = explain(msgspec.structs.replace(timeline, exposed_s=more))[0].causes_s
    assert after[UNKNOWN] == pytest.approx(before[UNKNOWN] + 0.01, abs=1e-6)
    less = {step: [s / 2 for s in of] for step, of in timeline.exposed_s.items()}
    after = explain(msgspec.structs.replace(timeline, exposed_s=less))[0].causes_s
    assert after[LATE] == pytest.approx(before[LATE] / 2, rel=1e-6)


def test_a_file_tells_the_same_as_the_timeline() -> None:
    log = make_log("order", 5)
    read = decode_timeline(encode_timeline(log.timeline))
    found, again = why(log.timeline, log.window).causes, why(read, log.window).causes
    assert [(row.cause, row.note) for row in again] == [(row.cause, row.note) for row in found]
    # times in a file are multiples of 1/64 us
    assert [row.exposed_s for row in again] == pytest.approx(
        [row.exposed_s for row in found], abs=1e-7
    )


@pytest.mark.parametrize("seed", range(5))
def test_advice_on_planted_causes_is_what_ends_them(seed: int) -> None:
    log = make_log("late rank", seed)
    found, _ = explain(log.timeline, log.window)
    told = {a.change: a.gain_s for a in advise(log.timeline, found, ())}
    late_s = found.lateness.late_s[log.rank]
    gained = told.get(f"rank {log.rank} as fast as the others", 0.0)
    assert gained == pytest.approx(late_s, rel=0.2, abs=1e-3) or not told

    log = make_log("tiny messages", seed)
    found, _ = explain(log.timeline)
    told = {a.change: a.gain_s for a in advise(log.timeline, found, schedulers("mpi-ring"))}
    assert max(told.values()) > 0.5 * found.exposed_s
    assert told["a link of twice the rate"] < 0.25 * max(told.values())


@pytest.mark.parametrize("seed", range(20, 32))
def test_a_busy_host_s_advice_is_to_free_its_cores(seed: int) -> None:
    log = make_log("busy host", seed)
    found = why(log.timeline, log.window, lambda explained: ())
    (told,) = found.advice
    assert str(log.rank) in told.change.removeprefix("nothing else on the cores of rank ").split(
        ", "
    )
    assert told.gain_s >= next(row.exposed_s for row in found.causes if row.cause == HOST) * 0.9
    if log.window:  # the other steps show what it really costs
        rest = sorted({e.step for e in log.timeline.events} - set(log.window))
        costs_s = found.step_s - why(log.timeline, rest).step_s
        assert 0.8 * costs_s <= told.gain_s <= costs_s + 1e-4
    assert not why(make_log("late rank", seed).timeline, None, lambda explained: ()).advice


def test_without_a_link_halves_tell_what_the_whole_message_costs() -> None:
    ratios = []
    for seed in range(150):
        log = make_log(None, seed)
        if log.timeline.scheduler != "dear":
            continue
        timeline = msgspec.structs.replace(log.timeline, link=None)
        shown = link_of(timeline, explain(timeline)[0])
        true, plan = log.timeline.link, log.timeline.plan
        assert true is not None
        assert plan is not None
        if shown is not None:
            mean = sum(message_bytes(plan, m) for m in plan.messages) / len(plan.messages)
            ratios.append(shown.time_s(mean) / true.time_s(mean))
    assert len(ratios) >= 4
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios), ratios


def played(step: int, exchanges: Sequence[tuple[float, float]], first: int = 0) -> Round:
    """A step whose exchanges, of so many bytes and seconds, follow each other on two ranks."""
    found, now_s = [], 0.0
    for number, (num_bytes, time_s) in enumerate(exchanges, first):
        at = [now_s, now_s]
        turn = (step, number, 0, f"m{number}", "", 0, num_bytes, at, at, [0.0, 0.0], at, at)
        now_s += time_s
        found.append(Exchange(*turn, [now_s, now_s], []))
    return Round(step, found, 0.0, [0.0, 0.0], [0.0, 0.0], [[], []])


def test_what_the_line_misses_is_counted_once_for_each_message() -> None:
    """Two of eight messages take 9 ms longer in every step; the line follows the other six."""
    sizes = [2.0**k * 1e4 for k in range(8)]
    late = [9e-3 if k in (0, 1) else 0.0 for k in range(8)]
    rounds = [
        played(step, [(m, 1e-3 + 1e-8 * m + more) for m, more in zip(sizes, late, strict=True)])
        for step in range(5)
    ]
    rounds.append(played(5, [(sizes[-1], 1e-3 + 1e-8 * sizes[-1])], first=7))  # the last alone
    costs = Costs.of(rounds, None)
    assert costs.more_startup_s < 0.75 * (1e-3 + sum(late) / 8)
    taken_s = sum(x.wait_free_s for x in rounds[0].exchanges)
    told_s = costs.more_startup_s + costs.missed_s
    assert 8 * told_s + costs.more_s_per_byte * sum(sizes) == pytest.approx(taken_s)


def with_cores(log: Log, busy: float, own: float, awaited: float = 0.0) -> Timeline:
    """Two cores that are used alike in all steps; some more of their time is waited for."""
    steps, ranks = log.timeline.exposed_s, range(log.timeline.num_workers)
    return msgspec.structs.replace(
        log.timeline,
        cores_used={step: [(0.4 * busy, 0.4 * own, 0.4) for _ in ranks] for step in steps},
        cores_awaited={
            s: [awaited if s in (log.window or ()) else 0.0] * len(ranks) for s in steps
        },
    )


@pytest.mark.parametrize("share", [0.0, 0.12, 0.3])
@pytest.mark.parametrize("usual", [4, 20, 36])
def test_what_others_always_take_makes_no_busy_host(share: float, usual: int) -> None:
    log = make_log(None, 3)
    timeline = with_cores(log, 0.6 + share, 0.6)
    steps = sorted(timeline.exposed_s)
    usual = min(usual, len(steps) - 4)
    assert explain(timeline, steps[usual:])[0].lateness.busy == {}


def test_ranks_that_wait_for_their_own_run_s_cores_are_no_busy_host() -> None:
    log = next(log for seed in range(20) if (log := make_log("late rank", seed)).window)
    own = with_cores(log, 1.0, 1.0, awaited=0.5)
    assert explain(own, log.window)[0].lateness.busy == {}
    others = with_cores(log, 1.0, 1.0, awaited=0.5)
    for step in log.window or ():
        others.cores_used[step] = [(0.4, 0.2, 0.4)] * log.timeline.num_workers
    assert len(explain(others, log.window)[0].lateness.busy) == log.timeline.num_workers


def test_without_readings_of_the_cores_no_host_is_busy() -> None:
    log = next(log for seed in range(20) if (log := make_log("busy host", seed)).window)
    none = {step: [(0.0, 0.0, 0.0)] * log.timeline.num_workers for step in log.timeline.cores_used}
    timeline = msgspec.structs.replace(log.timeline, cores_used=none)
    assert explain(timeline, log.window)[0].lateness.busy == {}


@pytest.mark.parametrize("share", ["cores taken by others", "time waiting for a core"])
def test_the_note_tells_by_which_share_a_host_is_known_to_be_busy(share: str) -> None:
    """Half of the cores are taken, or a twentieth while ranks wait for one half of the time."""
    log = next(log for seed in range(20) if (log := make_log("late rank", seed)).window)
    ranks, window = range(log.timeline.num_workers), log.window or ()
    own_s = 20.0 if share.startswith("cores") else 38.0
    timeline = msgspec.structs.replace(
        log.timeline,
        cores_used={
            step: [(40.0, own_s if step in window else 40.0, 40.0) for _ in ranks]
            for step in log.timeline.exposed_s
        },
        cores_awaited={
            step: [0.5 if step in window else 0.0 for _ in ranks] for step in log.timeline.exposed_s
        },
    )
    row = next(c for c in why(timeline, window).causes if c.cause == HOST)
    assert row.note.startswith(f"{share}: rank 0 50%, rank 1 50%")
    assert ";" not in row.note


def test_a_plan_that_crosses_gains_nothing_where_steps_wait_for_the_whole_gradient() -> None:
    """16.96 ms a step; in halves 15.96 ms, and 18.36 ms if they end before the forward pass."""
    exposed_s = {step: [5e-3, 5e-3] for step in range(3)}
    timeline = msgspec.structs.replace(page_cells.timeline(), exposed_s=exposed_s)
    spec = "dear:mib=0.1"
    found, _ = explain(timeline)
    halves = make_plan(spec, page_cells.TRACE, page_cells.LINK)
    crossed = msgspec.structs.replace(timeline, plan=halves)

    def gained_s(of: Timeline, instead: str, *, whole: bool) -> float:
        told = advise(of, found, (instead,), whole=whole)
        return max((a.gain_s for a in told if a.options), default=0.0)

    assert gained_s(timeline, spec, whole=False) == pytest.approx(1.0e-3, rel=0.01)
    assert gained_s(timeline, spec, whole=True) == 0
    assert gained_s(crossed, "wfbp", whole=False) == 0
    assert gained_s(crossed, "wfbp", whole=True) == pytest.approx(1.4e-3, rel=0.01)


def test_a_step_is_simulated_from_what_the_last_rank_had_when() -> None:
    """Rank 1 computes 5 ms longer before its backward pass, and waits for 1 ms meanwhile."""
    timeline = page_cells.timeline()
    begin_s = min(e.begin_s for e in timeline.events if e.step == 1)
    turn_s = begin_s + page_cells.TRACE.forward_s
    late = [
        msgspec.structs.replace(e, begin_s=e.begin_s + 5e-3, end_s=e.end_s + 5e-3)
        if e.rank == 1 and e.step == 1 and e.begin_s >= turn_s - 1e-9
        else e
        for e in timeline.events
    ]
    (wait,) = (
        msgspec.structs.replace(e, kind="wait", begin_s=turn_s - 1e-3, end_s=turn_s)
        for e in timeline.events
        if e.kind == "step" and e.rank == 1 and e.step == 1
    )
    shifted = msgspec.structs.replace(timeline, events=(*late, wait))
    (both,) = computed_in(shifted, [1], (0, 1))
    assert both.turn_s == pytest.approx(turn_s)
    ready_s = dict(zip(page_cells.plan().names, page_cells.TRACE.ready_s(), strict=True))
    assert both.ready_s == pytest.approx({name: s + 5e-3 for name, s in ready_s.items()})
    # rank 1: 4 ms forward, 5 ms more, 8 ms backward, less 1 ms of waiting
    assert both.own_s == pytest.approx(16e-3)
    (alone,) = computed_in(shifted, [1], (0,))
    assert alone.ready_s == pytest.approx(ready_s)
    assert trace_of(page_cells.plan(), [both, both]).forward_s == pytest.approx(3e-3)
    silent = [e for e in timeline.events if e.kind != "ready"]
    with pytest.raises(UsageError, match="does not tell when gradients were ready"):
        computed_in(msgspec.structs.replace(timeline, events=tuple(silent)), [1], (0,))
