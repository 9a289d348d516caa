"""Lines with their names at their ends: scaling over workers, accuracy and loss over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

from testbed.base.units import rounded
from testbed.records.report import ReportCell
from testbed.reporting.answer_text import clipped
from testbed.reporting.drawing import axis_of
from testbed.reporting.page.groups import Placed, by_setting
from testbed.reporting.page.markup import Markup, element, scrolled, section
from testbed.reporting.work import scaling_key

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 320, 56, 340, 14, 42
MAX_LINES = 6  # colours in page.css
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        name: at its end.
        points: x and y, by x.
        cells: number of the cell of each point.
        key: of the figure in the report.
        dashed: whether it was predicted.
        colour: number; a line and its prediction share one.
    """

    name: str
    points: Sequence[Point]
    cells: Sequence[int]
    key: str
    dashed: bool = False
    colour: int = 0


def chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], *, from_zero: bool = True
) -> Markup:
    """Lines over x from 0 and y, each named beside its end."""
    xs = sorted({x for line in lines for x, _ in line.points})
    _, x_high, x_ticks = axis_of(xs, log_y=False)
    if len(xs) <= MAX_LINES and all(x == int(x) for x in xs):
        x_ticks, x_high = xs, max(xs)
    ys = [y for line in lines for _, y in line.points]
    y_low = 0.0 if from_zero else min(ys)
    _, rise, steps = axis_of([max(ys) - y_low], log_y=False)
    if not from_zero and len(steps) > 1:
        gap = steps[1]
        y_low = floor(y_low / gap) * gap
        gaps = max(1, ceil((max(ys) - y_low) / gap - 1e-9))  # one where all values are alike
        steps = [gap * n for n in range(gaps + 1)]
        rise = steps[-1]
    y_ticks = [y_low + each for each in steps]

    def x_of(x: float) -> float:
        return LEFT + x / x_high * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / rise * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in y_ticks:
        y = f"{y_of(tick):.1f}"
        parts.append(element("path", d=f"M{LEFT} {y}H{WIDTH - RIGHT}", class_="grid"))
        parts.append(_text(LEFT - 6, y_of(tick) + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        parts.append(_text(x_of(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
    ends = spread_out([y_of(line.points[-1][1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        parts.append(_line(line, [(x_of(x), y_of(y)) for x, y in line.points], end))
    drawing = element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: {y_label} over {x_label}",
        class_="chart",
    )
    caption = element("figcaption", f"{title}: {y_label}")
    return element("figure", caption, scrolled(f"chart: {title}", drawing))


def _line(line: Line, places: Sequence[Point], end: float) -> Markup:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = [
        element(
            "circle",
            element("title", f"{line.name}: {rounded(x)}, {rounded(y)}"),
            cx=f"{place[0]:.1f}",
            cy=f"{place[1]:.1f}",
            r=2.5,
            data_cell=number,
            data_key=line.key,
            data_x=repr(x),
            data_value=repr(y),
        )
        for place, (x, y), number in zip(places, line.points, line.cells, strict=True)
    ]
    (x, y), label = places[-1], WIDTH - RIGHT + 17
    lead = element("path", d=f"M{x + 4:.1f} {y:.1f}L{label - 3:.1f} {end:.1f}", class_="lead")
    kind = f"line l{line.colour % MAX_LINES}" + (" dashed" if line.dashed else "")
    return element(
        "g", element("path", d=path), *dots, lead, _text(label, end + 4, line.name), class_=kind
    )


def spread_out(places: Sequence[float], gap: float = 14) -> list[float]:
    """The places moved so that labels do not cover each other, order kept.

    Example:
        >>> spread_out([10.0, 12.0, 100.0])
        [10.0, 24.0, 100.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved, last = list(places), -gap
    for index in order:
        moved[index] = last = max(places[index], last + gap)
    over = max(0.0, last - (HEIGHT - BOTTOM))
    limit = HEIGHT - BOTTOM + gap
    for index in reversed(order):
        if over:
            moved[index] = limit = min(moved[index], limit - gap)
    return moved


def _text(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def scaling(cells: Sequence[Placed]) -> Markup | None:
    """Samples a second over workers, where methods ran with several numbers of them."""
    charts = []
    known = [each for each in cells if each.cell.samples_per_s and each.cell.step_time_s]
    groups: dict[str, list[Placed]] = {}
    for each in known:
        groups.setdefault(repr(scaling_key(each.cell, methods=False)), []).append(each)
    for group in groups.values():
        methods: dict[str, list[Placed]] = {}
        for each in group:
            methods.setdefault(repr(scaling_key(each.cell)), []).append(each)
        lines: list[Line] = []
        for number, rows in enumerate(methods.values()):
            rows.sort(key=lambda each: each.cell.num_workers)
            if len({each.cell.num_workers for each in rows}) > 1:
                lines += _scaling_lines(rows, number)
        if lines:
            charts.append(chart(group[0].cell.workload, "workers", "samples a second", lines))
    if not charts:
        return None
    told = "Measured, and dashed as predicted, where the cells hold a prediction."
    return section("Scaling", element("p", told), *charts)


def _scaling_lines(rows: Sequence[Placed], colour: int) -> list[Line]:
    name = clipped(rows[0].name)
    points = [(float(p.cell.num_workers), p.cell.samples_per_s or 0.0) for p in rows]
    lines = [Line(name, points, [p.number for p in rows], "samples_per_s", colour=colour)]
    foreseen = [p for p in rows if p.cell.predicted_step_time_s]
    if len(foreseen) > 1:
        # samples of a step are the same, however long it takes
        lines.append(
            Line(
                f"{name}, predicted",
                [(float(p.cell.num_workers), _foreseen(p.cell)) for p in foreseen],
                [p.number for p in foreseen],
                "predicted_step_time_s",
                dashed=True,
                colour=colour,
            )
        )
    return lines


def _foreseen(cell: ReportCell) -> float:
    measured, predicted_s = cell.samples_per_s, cell.predicted_step_time_s
    if measured is None or cell.step_time_s is None or not predicted_s:
        raise ValueError("the cell holds no prediction")
    return measured * cell.step_time_s / predicted_s


def time_to_target(cells: Sequence[Placed]) -> Markup | None:
    """When targets were reached, and accuracy and loss over the time of training."""
    charts = []
    for heading, group in by_setting(cells).items():
        for what, key in (("test accuracy", "accuracy"), ("test loss", "loss")):
            charts += _over_time(heading, what, key, group)
    if not charts:
        return None
    told = (
        "Accuracy and loss of the test samples over the time of training (evaluating does not "
        "count), first run of each cell. When each target was reached stands in the table."
    )
    return section("Time to accuracy or loss", element("p", told), *charts)


def _over_time(heading: str, what: str, key: str, cells: Sequence[Placed]) -> list[Markup]:
    lines = []
    for each in cells:
        known = [a for a in each.cell.accuracy_curve if getattr(a, key) is not None]
        # the curve keeps real times
        points = [(a.time_s / each.cell.dilation, float(getattr(a, key))) for a in known]
        if len(points) > 1:
            reached_s, words = _last_target(each.cell, key)
            name = f"{clipped(each.name)}{words}"
            lines.append((reached_s, Line(name, points, [each.number] * len(points), key)))
    if not lines:
        return []
    lines.sort(key=lambda pair: pair[0])
    chosen = [replace(line, colour=number) for number, (_, line) in enumerate(lines[:MAX_LINES])]
    more = len(lines) - len(chosen)
    left_out = f" ({len(chosen)} of {len(lines)}: those first at the target)" if more else ""
    y_label = f"{what}{left_out}"
    return [chart(heading, "s of training", y_label, chosen, from_zero=False)]


def _last_target(cell: ReportCell, key: str) -> tuple[float, str]:
    """When the hardest target was reached, for sorting, and in words; without targets never."""
    times = cell.time_to_accuracy_s if key == "accuracy" else cell.time_to_loss_s
    if not times:
        return inf, ""
    target = (max if key == "accuracy" else min)(times, key=float)
    reached_s = times[target]
    if reached_s is None:
        return inf, f": never {target}"
    return reached_s, f": {target} after {rounded(reached_s)} s"
