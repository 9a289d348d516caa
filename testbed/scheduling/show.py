"""Timelines as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.base.units import format_seconds
from testbed.prediction.timeline import Span, Timeline

LABEL_WIDTH = 10


LEGEND = (
    "b: backward; # and = in turns: messages; .: a message is ready, its channel idle; from the "
    "start of backward on, all on one scale"
)


def end_of(timeline: Timeline) -> float:
    """Where a drawing ends: the later of backward and the last message, in seconds."""
    return max([timeline.backward_s, *(s.end_s for s in timeline.spans)])


def draw(timeline: Timeline, width: int = 80, until_s: float = 0.0) -> str:
    """The backward pass and the messages of each channel as bars over time.

    A bar is as long as its message travelled; neighbours alternate between `#` and `=`, so that
    they can be told apart, and `.` is an idle channel although a message was ready. Many messages
    in one column look like one; the last line tells their number.

    Args:
        timeline: to draw.
        width: of a line, in characters.
        until_s: where the axis ends, if not earlier than the drawing does.

    Example:
        >>> span = Span(tensors=(0,), num_bytes=4, ready_s=1.0, start_s=1.0, end_s=2.0)
        >>> print(draw(Timeline(spans=(span,), forward_s=1.0, backward_s=1.0, iteration_s=3.0,
        ...                     exposed_s=1.0, lower_bound_s=2.0), width=30))
        backward   bbbbbbbbb
        channel 0           #########
        0 .. 2 s; 1 message; iteration 3 s, exposed 1 s, lower bound 2 s
    """
    end_s = max(until_s, end_of(timeline))
    columns = max(1, width - LABEL_WIDTH - 1)
    scale = (columns - 1) / end_s if end_s > 0 else 0.0
    backward = "b" * (round(timeline.backward_s * scale) or 1)
    lines = [f"{'backward':<{LABEL_WIDTH}} {backward}"]
    for channel in sorted({s.channel for s in timeline.spans}):
        spans = [s for s in timeline.spans if s.channel == channel]
        bar = _bar(spans, scale, columns)
        lines.append(f"{f'channel {channel}':<{LABEL_WIDTH}} {bar}".rstrip())
    count = len(timeline.spans)
    exposed = "" if timeline.exposed_s is None else f", exposed {_time(timeline.exposed_s)}"
    lines.append(
        f"0 .. {_time(end_s)}; {count} message{'' if count == 1 else 's'}; iteration "
        f"{_time(timeline.iteration_s)}{exposed}, lower bound {_time(timeline.lower_bound_s)}"
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return "0 s" if seconds == 0 else format_seconds(seconds)


def _bar(spans: Sequence[Span], scale: float, columns: int) -> str:
    cells = [" "] * columns
    for span in spans:
        for column in range(round(span.ready_s * scale), round(span.start_s * scale)):
            cells[column] = "." if cells[column] == " " else cells[column]
    for number, span in enumerate(sorted(spans, key=lambda s: s.start_s)):
        start = min(round(span.start_s * scale), columns - 1)
        for column in range(start, max(start + 1, round(span.end_s * scale))):
            cells[column] = "#="[number % 2]
    return "".join(cells)
