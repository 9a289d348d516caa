"""The page's section on memory: peaks by category, and what is alive over a whole step."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.base.units import rounded
from testbed.records.memory import MemoryForecast, MemorySimulation
from testbed.reporting.drawing import LEFT, Panel, axis_of, outlines
from testbed.reporting.page.bars import drawing, stack
from testbed.reporting.page.groups import Placed, by_setting
from testbed.reporting.page.markup import Markup, element, joined, scrolled, section
from testbed.reporting.page.tables import memory_table

MB = 1e6
WIDTH, RIGHT, TOP, HEIGHT = 760, 20, 8, 180


def memory_section(cells: Sequence[Placed], foreseen: Sequence[MemorySimulation]) -> Markup | None:
    """Peaks where cells hold them, curves where a simulation that drew them lies in the folder."""
    curves = [(found, each) for found in foreseen for each in found.forecasts if each.curve]
    bars = _bars(cells)
    if bars is None and not curves:
        return None
    if curves:
        told = (
            "Predicted over the time of one step, by category; the figures are those at the peak."
        )
    else:
        told = (
            "For the memory over a whole step put what `testbed simulate --memory ... --plot "
            "FILE.svg --json NAME.memory.json` writes into the sweep's folder."
        )
    drawn = [_curve(found, each) for found, each in curves]
    return section("Memory", bars, memory_table(cells), element("p", told), *drawn)


def _curve(found: MemorySimulation, each: MemoryForecast) -> Markup | None:
    """Areas on top of each other over the time of a step."""
    if each.curve is None or not each.curve.time_s:
        return None
    until_s = each.curve.time_s[-1] or 1.0
    series = {name: [b / MB for b in levels] for name, levels in each.curve.levels.items()}
    sums = [sum(row) for row in zip(*series.values(), strict=True)]
    _, high, y_ticks = axis_of(sums, log_y=False)
    _, _, x_ticks = axis_of([until_s], log_y=False)
    scale, floor = (WIDTH - RIGHT - LEFT) / until_s, TOP + HEIGHT
    parts = []
    for tick in y_ticks:
        y = floor - tick / high * HEIGHT
        parts.append(element("path", d=f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", class_="grid"))
        label = element("text", f"{tick:g}", x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end")
        parts.append(label)
    panel = Panel("", each.curve.time_s, series)
    for name, outline in outlines(panel, until_s, scale, floor, HEIGHT / high):
        parts.append(element("path", d=outline, class_=name))
    for tick in x_ticks:
        if tick <= until_s:
            x = f"{LEFT + tick * scale:.1f}"
            parts.append(element("text", f"{tick:g} s", x=x, y=floor + 16, text_anchor="middle"))
    codec = f" with {each.compressor}" if len(found.compressors) > 1 else ""
    title = f"{found.workload}, memory {each.memory}{codec}, {each.batch_size} samples"
    image = element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {floor + 24}",
        role="img",
        aria_label=f"{title}: MB over the time of a step",
        class_="chart",
    )
    labels = [
        element("span", element("i", class_=name), f"{name} {rounded(size / MB)}", data_value=size)
        for name, size in each.peak.items()
    ]
    return element(
        "figure",
        element("figcaption", f"{title}: MB, at most {rounded(each.peak_bytes / MB)}"),
        scrolled(f"chart: {title}", image),
        element("p", *labels, class_="parts"),
    )


def _bars(cells: Sequence[Placed]) -> Markup | None:
    """The peaks by category, as predicted and as measured."""
    known = [each for each in cells if each.cell.memory is not None]
    if not known:
        return None
    charts = []
    for heading, group in by_setting(known).items():
        every = [
            found
            for each in group
            if each.cell.memory
            for found in (each.cell.memory.predicted, each.cell.memory.measured)
        ]
        high = float(max(sum(found.values()) for found in every)) or 1.0
        rows = [row for each in group for row in _memory_rows(each, high)]
        told = f"{heading}: MB at the peak of a step, 0 to {rounded(high / MB)}"
        charts.append(
            element("figure", element("figcaption", told), element("ul", *rows, class_="bars"))
        )
    return joined(
        element("p", "Live storages of rank 0 at the peak of a step, by category."), *charts
    )


def _memory_rows(each: Placed, high: float) -> list[Markup]:
    memory = each.cell.memory
    if memory is None:
        return []
    rows = []
    for kind, found in (("predicted", memory.predicted), ("measured", memory.measured)):
        if not found:
            continue
        total = f"{rounded(sum(found.values()) / MB)} MB {kind}"
        labels = [
            element(
                "span",
                element("i", class_=name),
                f"{name} {rounded(size / MB)}",
                data_key=f"memory.{kind}.{name}",
                data_value=size,
            )
            for name, size in found.items()
            if size
        ]
        rows.append(
            element(
                "li",
                element("span", each.name if kind == "predicted" else "", class_="name"),
                element("span", total, class_="value"),
                drawing(
                    stack({name: float(size) for name, size in found.items()}, high, 3, 15),
                    f"{each.name}: {total}",
                    20,
                ),
                element("span", *labels, class_="parts"),
                data_cell=each.number,
            )
        )
    return rows
