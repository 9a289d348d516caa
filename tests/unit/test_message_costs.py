"""What a message costs is counted from when both it and its channel were ready."""

from testbed.base.types import Event
from testbed.noise.rehearsal import message_costs, slowest_rank_s


def event(key, submitted_s, ended_s, *, op="all-reduce", channel=0, num_bytes=8):
    return Event(op, key, 3, channel, num_bytes, submitted_s, submitted_s, ended_s)


def test_a_pause_before_a_message_is_not_its_own():
    events = [event("late", 10.0, 12.0), event("early", 0.0, 1.5), event("queued", 0.5, 4.0)]
    assert message_costs(events) == [
        (3, "early", 8, 1.5),
        (3, "queued", 8, 2.5),
        (3, "late", 8, 2.0),
    ]


def test_channels_do_not_wait_for_each_other():
    events = [event("a", 0.0, 3.0), event("b", 0.0, 2.0, channel=1), event("c", 0.0, 5.0)]
    assert [(key, time_s) for _, key, _, time_s in message_costs(events)] == [
        ("b", 2.0),
        ("a", 3.0),
        ("c", 2.0),
    ]


def test_others_keep_the_channel_but_only_sums_that_move_something_are_told():
    events = [
        event("begin", 0.0, 1.0, op="barrier"),
        event("nothing", 0.0, 2.0, num_bytes=0),
        event("a", 0.0, 2.5),
    ]
    assert message_costs(events) == [(3, "a", 8, 0.5)]


def test_no_message_adds_nothing():
    (first, second) = message_costs([event("a", 0.0, 1.0), event("b", 0.0, 1.0)])
    assert first[-1] == 1.0
    assert second[-1] > 0


def test_a_wait_for_a_late_rank_belongs_to_the_message_on_whichever_rank_it_was():
    ranks = [
        [
            [event("a", 0.0, 3.0), event("b", 1.0, 5.0)],
            [event("a", 0.0, 1.0), event("b", 2.5, 4.0)],
        ],
        [
            [event("a", 2.0, 3.0), event("b", 4.0, 5.0)],
            [event("a", 0.0, 1.0), event("b", 1.0, 4.0)],
        ],
    ]
    times = [[[time_s for *_, time_s in message_costs(step)] for step in rank] for rank in ranks]
    assert times[1][0] == [1.0, 1.0]  # late: its channel was free when it came
    assert slowest_rank_s(times) == [times[0][0], times[1][1]] == [[3.0, 2.0], [1.0, 3.0]]


def test_halves_count_as_the_sum_that_two_of_them_make():
    events = [
        event("a", 0.0, 1.0, op="fold"),
        event("b", 0.0, 3.0, op="fold"),
        event("a", 3.5, 4.0, op="spread"),
    ]
    assert message_costs(events) == [(3, "a", 8, 2.0), (3, "b", 8, 4.0), (3, "a", 8, 1.0)]
