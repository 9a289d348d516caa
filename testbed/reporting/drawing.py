"""Line charts as SVG, a page of them that loads nothing, and timelines as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, groupby
from math import log10
from operator import itemgetter
from string import ascii_letters, digits

from testbed.base.units import format_seconds
from testbed.prediction.timeline import Span, Timeline

WIDTH, HEIGHT = 720, 400
LEFT, TOP, RIGHT, BOTTOM = 70, 40, 170, 50
# Colours that people with the common forms of colour blindness can tell apart; with dashes beside.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Chart:
    """Lines over a common x.

    Attributes:
        title: above it.
        x_label: below it.
        y_label: beside it.
        x_labels: of the columns, evenly apart.
        series: name -> one value of 0 or more for each column.
        log_y: whether the y axis is logarithmic, if no value is 0; else it begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    x_labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    log_y: bool = False


def svg_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element.

    Example:
        >>> chart = Chart("t", "workers", "s", ["2", "4"], {"wfbp": [1.0, 2.0]})
        >>> svg_chart(chart).count("<polyline")
        1
    """
    every = [v for line in chart.series.values() for v in line]
    log_y = chart.log_y and min(every) > 0
    low, high, ticks = axis_of(every, log_y)
    x_of = _even(LEFT, WIDTH - RIGHT, len(chart.x_labels))

    def y_of(value: float) -> float:
        share = _share(value, low, high, log_y)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        svg_text(LEFT, TOP - 18, chart.title, size=15),
        svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, chart.x_label, anchor="middle"),
        svg_text(8, TOP - 4, chart.y_label),
    ]
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(svg_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    parts += [
        svg_text(x, HEIGHT - BOTTOM + 18, label, anchor="middle")
        for x, label in zip(x_of, chart.x_labels, strict=True)
    ]
    for number, (name, values) in enumerate(chart.series.items()):
        points = " ".join(f"{x:.1f},{y_of(v):.1f}" for x, v in zip(x_of, values, strict=True))
        stroke = (
            f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2" '
            f'stroke-dasharray="{DASHES[number // len(COLOURS) % len(DASHES)]}"'
        )
        y = TOP + 8 + 18 * number
        parts += [
            f'<polyline points="{points}" fill="none" {stroke}/>',
            f'<path d="M{WIDTH - RIGHT + 12} {y - 4}h24" {stroke}/>',
            svg_text(WIDTH - RIGHT + 42, y, name),
        ]
    return "\n".join([*parts, "</svg>"])


def html_page(title: str, charts: Sequence[Chart], notes: Sequence[str] = ()) -> str:
    """A page of charts: one file, no scripts, nothing loaded from anywhere."""
    return html_of(title, map(svg_chart, charts), notes)


def html_of(title: str, drawings: Iterable[str], notes: Sequence[str] = ()) -> str:
    """A page of drawings, as `html_page`."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes)]
    body += [f"<div>{drawing}</div>" for drawing in drawings]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>'
    joined = "\n".join(body)
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{joined}\n</body></html>\n"


PANEL_HEIGHT, PANEL_GAP, BINS = 150, 44, 240


@dataclass(frozen=True)
class Panel:
    """Areas on top of each other over time.

    Attributes:
        title: above it.
        times_s: of the events, in their order.
        series: name -> one value of 0 or more for each event; the first lies at the bottom.
    """

    title: str
    times_s: Sequence[float]
    series: Mapping[str, Sequence[float]]


def svg_areas(title: str, x_label: str, y_label: str, panels: Sequence[Panel]) -> str:
    """Panels below each other on the same scales, with one legend, as an `<svg>` element.

    Of events that fall into the same of `BINS` slices of time that with the largest sum is drawn.

    Example:
        >>> panel = Panel("t", [0.0, 1.0, 2.0], {"a": [1.0, 1.0, 1.0], "b": [0.0, 3.0, 0.0]})
        >>> svg_areas("t", "s", "MiB", [panel, panel]).count("<path fill")
        4
    """
    until_s = max(panel.times_s[-1] for panel in panels)
    sums = [sum(each) for panel in panels for each in zip(*panel.series.values(), strict=True)]
    _, high, ticks = axis_of(sums, log_y=False)
    _, _, x_ticks = axis_of([until_s], log_y=False)
    right, height = WIDTH - 20, TOP + 40 + len(panels) * (PANEL_HEIGHT + PANEL_GAP)
    scale = (right - LEFT) / until_s
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = dict(zip(names, COLOURS, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        svg_text(LEFT, 20, title, size=15),
        svg_text((LEFT + right) / 2, height - 8, x_label, anchor="middle"),
    ]
    for number, name in enumerate(names):
        x = LEFT + number * (right - LEFT) / len(names)
        parts.append(f'<rect x="{x:.0f}" y="30" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(svg_text(x + 16, 40, name))
    for number, panel in enumerate(panels):
        floor = TOP + 20 + number * (PANEL_HEIGHT + PANEL_GAP) + PANEL_GAP / 2 + PANEL_HEIGHT
        parts.append(svg_text(LEFT, floor - PANEL_HEIGHT - 6, panel.title, size=13))
        parts.append(svg_text(8, floor - PANEL_HEIGHT - 6, y_label))
        for tick in ticks:
            y = floor - tick / high * PANEL_HEIGHT
            parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
            parts.append(svg_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
        for tick in x_ticks:
            if tick <= until_s:
                parts.append(
                    svg_text(LEFT + tick * scale, floor + 14, f"{tick:g}", anchor="middle")
                )
        parts += [
            f'<path fill="{colours[name]}" d="{outline}"/>'
            for name, outline in outlines(panel, until_s, scale, floor, PANEL_HEIGHT / high)
        ]
    return "\n".join([*parts, "</svg>"])


def outlines(
    panel: Panel, until_s: float, x_scale: float, floor: float, y_scale: float
) -> list[tuple[str, str]]:
    """The outline of each area of a panel."""
    rows = list(zip(*panel.series.values(), strict=True))
    best: dict[int, tuple[float, ...]] = {}
    for time_s, row in zip(panel.times_s, rows, strict=True):
        place = min(BINS - 1, int(time_s / until_s * BINS))
        if place not in best or sum(row) > sum(best[place]):
            best[place] = row
    end = min(BINS, int(panel.times_s[-1] / until_s * BINS) + 1)
    drawn: list[tuple[float, ...]] = []
    for place in range(end):
        drawn.append(best.get(place, drawn[-1] if drawn else rows[0]))
    below = [0.0] * end
    found = []
    for number, name in enumerate(panel.series):
        above = [low + row[number] for low, row in zip(below, drawn, strict=True)]
        edges = [(round(floor - value * y_scale), place) for place, value in enumerate(above)]
        edges += [(round(floor - below[place] * y_scale), place - 1) for place in range(end)][::-1]
        outline = f"M{LEFT} {edges[-1][0]}"
        for y, run in groupby(edges, key=itemgetter(0)):
            *_, (_, last) = run
            outline += f"V{y}H{LEFT + (last + 1) * until_s / BINS * x_scale:.1f}"
        found.append((name, outline + "Z"))
        below = above
    return found


def svg_page(charts: Sequence[Chart]) -> str:
    """Charts below each other in one SVG."""
    inner = [
        svg_chart(chart).replace("<svg ", f'<svg y="{HEIGHT * number}" ', 1)
        for number, chart in enumerate(charts)
    ]
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    joined = "\n".join(inner)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{joined}\n</svg>\n'


def axis_of(values: Sequence[float], log_y: bool) -> tuple[float, float, list[float]]:
    """Ends of the axis and the values that it is marked at."""
    if log_y:
        low, high = min(values), max(values)
        powers = range(int(log10(low)) - 2, int(log10(high)) + 3)
        marks = [m * 10.0**k for k in powers for m in (1, 2, 5)]
        below = max(m for m in marks if m <= low)
        above = min(m for m in marks if m >= high and m > below)
        return below, above, [m for m in marks if below <= m <= above]
    high = max(values, default=0.0) or 1.0
    unit = 10.0 ** (len(str(int(high))) - 1) if high >= 1 else 0.1
    step = next(s * unit for s in (0.1, 0.2, 0.5, 1.0, 2.0) if high / (s * unit) <= 8)
    count = -int(-high // step)
    return 0.0, count * step, [k * step for k in range(count + 1)]


def _share(value: float, low: float, high: float, log_y: bool) -> float:
    if log_y:
        return log10(value / low) / log10(high / low)
    return (value - low) / (high - low)


def _even(start: float, stop: float, count: int) -> list[float]:
    if count == 1:
        return [(start + stop) / 2]
    return [start + (stop - start) * i / (count - 1) for i in range(count)]


def svg_text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    """A `<text>` element, its text escaped."""
    style = f'text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


# Line charts as plain text for a terminal.

SHARED = "*"  # where several lines meet


def text_chart(
    x_labels: Sequence[str], series: Mapping[str, Sequence[float]], height: int = 14
) -> str:
    """One column for each x, one letter for each line; the scale is linear from 0.

    Lines that meet in a cell are a `*`. The legend names lines in the order of their last values.

    Args:
        x_labels: of the columns.
        series: name -> one value of 0 or more for each column.
        height: rows.

    Example:
        >>> print(text_chart(["2", "4"], {"wfbp": [1.0, 0.5], "osf": [1.0, 0.75]}, height=5))
        1.00 | *
        0.75 |    b
        0.50 |    a
        0.25 |
        0.00 |
             +------
               2  4
        b osf  a wfbp
    """
    letters = dict(zip(series, cycle(ascii_letters + digits), strict=False))
    width = max([len(label) for label in x_labels], default=0) + 2
    top = max([v for values in series.values() for v in values], default=0.0) or 1.0
    rows = [[" "] * (width * len(x_labels)) for _ in range(height)]
    for name, values in series.items():
        for column, value in enumerate(values):
            row = rows[height - 1 - round(value / top * (height - 1))]
            place = column * width + width // 2
            row[place] = letters[name] if row[place] == " " else SHARED
    lines = [
        f"{top * (height - 1 - number) / (height - 1):4.2f} |{''.join(row)}".rstrip()
        for number, row in enumerate(rows)
    ]
    axis = "".join(label.center(width) for label in x_labels)
    ends = sorted(series, key=lambda name: -series[name][-1])
    legend = "  ".join(f"{letters[name]} {name}" for name in ends)
    return "\n".join(
        [*lines, "     +" + "-" * (width * len(x_labels)), f"      {axis}".rstrip(), legend]
    )


# Timelines as plain text for a terminal.

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
    exposed = (
        "" if timeline.exposed_s is None else f", exposed {format_seconds(timeline.exposed_s)}"
    )
    lines.append(
        f"0 .. {format_seconds(end_s)}; {count} message{'' if count == 1 else 's'}; iteration "
        f"{format_seconds(timeline.iteration_s)}{exposed}, lower bound "
        f"{format_seconds(timeline.lower_bound_s)}"
    )
    return "\n".join(lines)


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
