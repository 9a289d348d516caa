"""Bars: what a step's time and a step's memory consist of, labelled where they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.base.units import rounded
from testbed.records.report import ReportCell
from testbed.reporting.columns import columns_for, step_range
from testbed.reporting.page.groups import Placed, by_setting
from testbed.reporting.page.markup import Markup, element, joined, section


def step_bars(cells: Sequence[Placed]) -> Markup | None:
    """The steps' times, a chart for each workload and cluster."""
    known = [each for each in cells if each.cell.step_time_s and each.cell.compute_s is not None]
    if not known:
        return None
    compressed = any(each.cell.compression for each in known)
    told = [
        "A bar is rank 0's median step: compute, then exposed communication, which compute did "
        "not hide. The upright mark is the step time over ranks and runs, with its interval"
    ]
    if any(each.cell.predicted_step_time_s for each in known):
        told.append("; the diamond is the predicted step")
    if compressed:
        told.append(
            ". The thin bar below is what the messages took altogether, encode, transfer and "
            "decode: what of it reaches beyond compute is exposed"
        )
    charts = [_step_chart(heading, group) for heading, group in by_setting(known).items()]
    return section("Step time", element("p", "".join(told) + "."), *charts)


def _step_chart(heading: str, group: Sequence[Placed]) -> Markup:
    step = next(c for c in columns_for([p.cell for p in group]) if c.key == "step_time_s")
    high = max(_end_s(each.cell) for each in group)
    rows = [_step_row(each, high, step.text(each.cell)) for each in group]
    return element(
        "figure",
        element("figcaption", f"{heading}: ms a step, 0 to {rounded(high * 1e3)}"),
        element("ul", *rows, class_="bars"),
    )


def _end_s(cell: ReportCell) -> float:
    (found, _), spent = step_range(cell), cell.compression
    return max(
        (cell.compute_s or 0.0) + (cell.exposed_comm_s or 0.0),
        cell.step_time_s or 0.0,
        cell.predicted_step_time_s or 0.0,
        found[1] if found else 0.0,
        spent.encode_s + spent.communication_s + spent.decode_s if spent else 0.0,
    )


def _step_row(each: Placed, high_s: float, text: str) -> Markup:
    cell = each.cell
    parts = {"compute_s": cell.compute_s or 0.0, "exposed_comm_s": cell.exposed_comm_s or 0.0}
    thin = {}
    if cell.compression:
        for name in ("encode_s", "communication_s", "decode_s"):
            thin[name] = getattr(cell.compression, name)
    marks = [stack(parts, high_s, 3, 15), stack(thin, high_s, 20, 5)]
    found, _ = step_range(cell)
    if found is not None:
        marks.append(_whisker(found, cell.step_time_s or 0.0, high_s))
    if cell.predicted_step_time_s:
        diamond = element("path", d="M0 5L5 10.5L0 16L-5 10.5Z", class_="predicted")
        at = f"{100 * cell.predicted_step_time_s / high_s:.3f}%"
        marks.append(element("svg", diamond, x=at, overflow="visible"))
    labels = [_label(name, value) for name, value in {**parts, **thin}.items()]
    if cell.predicted_step_time_s:
        labels.append(
            element(
                "span",
                element("i", class_="predicted"),
                f"predicted {rounded(cell.predicted_step_time_s * 1e3)}",
                data_key="predicted_step_time_s",
                data_value=repr(cell.predicted_step_time_s),
            )
        )
    return element(
        "li",
        element("span", each.name, class_="name"),
        element("span", f"{text} ms", class_="value"),
        drawing(joined(*marks), f"{each.name}: {text} ms", 26 if thin else 20),
        element("span", *labels, class_="parts"),
        data_cell=each.number,
    )


WORDS: Mapping[str, str] = {
    "compute_s": "compute",
    "exposed_comm_s": "exposed communication",
    "encode_s": "encode",
    "communication_s": "transfer",
    "decode_s": "decode",
}


def _label(name: str, value_s: float) -> Markup:
    text = f"{WORDS[name]} {rounded(value_s * 1e3)}"
    return element("span", element("i", class_=name), text, data_key=name, data_value=repr(value_s))


def stack(parts: Mapping[str, float], high: float, top: int, height: int) -> Markup:
    """Rectangles one after another, `high` being the width of the drawing."""
    drawn, begin = [], 0.0
    for name, value in parts.items():
        drawn.append(
            element(
                "rect",
                x=f"{100 * begin / high:.3f}%",
                y=top,
                width=f"{100 * value / high:.3f}%",
                height=height,
                class_=name,
            )
        )
        begin += value
    return joined(*drawn)


def _whisker(ends: tuple[float, float], middle: float, high: float) -> Markup:
    at = {value: f"{100 * value / high:.3f}%" for value in (*ends, middle)}
    across = element("line", x1=at[ends[0]], x2=at[ends[1]], y1=10.5, y2=10.5)
    ticks = [
        element("line", x1=x, x2=x, y1=10.5 - half, y2=10.5 + half)
        for x, half in ((at[ends[0]], 3), (at[ends[1]], 3), (at[middle], 10))
    ]
    return element("g", across, *ticks, class_="interval")


def drawing(inner: Markup, label: str, height: int) -> Markup:
    """A drawing as wide as there is room; it tells what it shows."""
    return element(
        "svg", inner, role="img", aria_label=label, width="100%", height=height, overflow="visible"
    )
