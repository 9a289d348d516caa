"""Curves as text, SVG and HTML."""

from xml.etree import ElementTree

import pytest

from testbed.reporting.drawing import HEIGHT, Chart, html_page, svg_chart, svg_page, text_chart

SPACE = "{http://www.w3.org/2000/svg}"


def chart_of(series, log_y=False):
    return Chart("Speed <up>", "workers", "times", ["2", "4", "8"], series, log_y)


def test_lines_that_meet_are_marked():
    text = text_chart(["2", "4"], {"a1": [1.0, 1.0], "b1": [1.0, 0.0]}, height=3)
    assert text.splitlines() == [
        "1.00 | *  a",
        "0.50 |",
        "0.00 |    b",
        "     +------",
        "       2  4",
        "a a1  b b1",
    ]


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("values", [[1.0, 2.0, 3.9], [0.01, 0.5, 0.9], [1e3, 5e3, 2.048e6]])
def test_points_stand_in_order_within_the_frame(values, log_y):
    root = ElementTree.fromstring(svg_chart(chart_of({"x": values}, log_y)))
    (line,) = root.findall(f"{SPACE}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    heights = [y for _, y in points]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert heights == sorted(heights, reverse=True)
    assert min(heights) >= 0
    assert max(heights) <= HEIGHT


def test_every_line_has_its_name_and_texts_are_escaped():
    series = {f"scheduler-{i}": [1.0, 2.0, 3.0] for i in range(12)}
    root = ElementTree.fromstring(svg_chart(chart_of(series)))
    texts = [t.text for t in root.findall(f"{SPACE}text")]
    assert set(series) < set(texts)
    assert "Speed <up>" in texts
    strokes = [(p.get("stroke"), p.get("stroke-dasharray")) for p in root.iter(f"{SPACE}polyline")]
    assert len(set(strokes)) == 12


def test_pages_hold_all_charts_and_load_nothing():
    charts = [chart_of({"x": [1.0, 2.0, 3.0]})] * 3
    page = html_page("a & b", charts, ["<note>"])
    assert page.count("<svg") == 3
    assert "a &amp; b" in page
    assert "&lt;note&gt;" in page
    assert "src=" not in page
    assert "href" not in page
    root = ElementTree.fromstring(svg_page(charts))
    assert [child.get("y") for child in root] == ["0", str(HEIGHT), str(2 * HEIGHT)]


def test_values_of_0_and_more_lines_than_letters_can_be_drawn():
    ElementTree.fromstring(svg_chart(chart_of({"x": [0.0, 1.0, 2.0]}, True)))
    series = {f"s{i}": [float(i), 2.0] for i in range(70)}
    assert "A s26" in text_chart(["2", "4"], series)
