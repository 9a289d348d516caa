"""The error of predictions beside what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.base.config import RunConfig
from testbed.records.cell import Cell
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.formats import to_markdown
from testbed.reporting.make import make_report
from testbed.reporting.prediction import kind_of


def cell(
    backend: str,
    scheduler: str,
    measured_s: float,
    predicted_s: float | None,
    link: dict[str, Any] | None = None,
    unrehearsed_s: float | None = None,
) -> Found:
    made = Cell(
        backend=backend,
        scheduler=scheduler,
        workload="replay:resnet50-v100",
        num_workers=4,
        step_time_s=measured_s,
        predicted_step_time_s=predicted_s,
        predicted_unrehearsed_s=unrehearsed_s,
        config=RunConfig(backend=backend, scheduler=scheduler),
        link=link,
    )
    return Found("here", f"{backend} {scheduler}", made)


CELLS = (
    cell("gloo", "wfbp", 1.0, 1.02),
    cell("gloo", "bucket:mib=25", 1.0, 0.9),
    cell("zmq-ps:update=worker", "wfbp", 2.0, 2.02),
    cell("zmq-ps", "dear", 2.0, None),
)


def test_errors_are_summed_up_over_all_by_backend_and_by_scheduler() -> None:
    rows = make_report(Collected(CELLS, ())).prediction_errors
    found = {(r.family, r.name): (r.num_cells, r.median, r.worst, r.worst_cell) for r in rows}
    bucket = "gloo, bucket:mib=25"
    assert found == {
        ("all cells", ""): (3, pytest.approx(0.02), pytest.approx(-0.1), bucket),
        ("kind", "calibrated"): (3, pytest.approx(0.02), pytest.approx(-0.1), bucket),
        ("backend", "gloo"): (2, pytest.approx(0.06), pytest.approx(-0.1), bucket),
        ("backend", "zmq-ps"): (
            1,
            pytest.approx(0.01),
            pytest.approx(0.01),
            "zmq-ps:update=worker, wfbp",
        ),
        ("scheduler", "wfbp"): (2, pytest.approx(0.015), pytest.approx(0.02), "gloo, wfbp"),
        ("scheduler", "bucket"): (1, pytest.approx(0.1), pytest.approx(-0.1), bucket),
    }


def test_errors_on_links_fitted_to_rehearsed_steps_are_told_apart() -> None:
    rehearsed = cell("gloo", "p3", 1.0, 1.05, {"missing_s": [1e-4]}, unrehearsed_s=0.75)
    made = make_report(Collected((*CELLS, rehearsed), ()))
    rows = made.prediction_errors
    found = {r.name: (r.num_cells, r.median) for r in rows if r.family == "link"}
    assert found == {
        "rehearsed steps": (1, pytest.approx(0.05)),
        "messages in rows": (3, pytest.approx(0.02)),
        "those plans before rehearsing": (1, pytest.approx(0.25)),
    }
    told = "rehearsed steps 5.0 % / +5.0 %, those plans before rehearsing 25.0 % / -25.0 %"
    assert told in to_markdown(made)


def test_the_report_tells_them_in_words() -> None:
    text = to_markdown(make_report(Collected(CELLS, ())))
    assert "prediction error of 3 cells: median 2.0 %, worst -10.0 %" in text
    assert "gloo 6.0 % / -10.0 %, zmq-ps 1.0 % / +1.0 %" in text


def test_kinds_of_prediction_are_named_and_told_apart() -> None:
    replayed = "replay:resnet50-v100"
    held_out = cell("gloo", "mg-wfbp", 1.0, 1.1)
    held_out.cell.prediction = "held-out"
    held_out.cell.config = RunConfig(backend="gloo", link="link.json", workload=replayed)
    null, before = cell("mpi", "wfbp", 1.0, 0.8), cell("mpi", "dear", 1.0, 1.2)
    null.cell.prediction = "null"
    before.cell.config = RunConfig(backend="mpi", link="link.json", workload=replayed)
    text = to_markdown(make_report(Collected((*CELLS, held_out, null, before), ())))
    assert "by kind, median / worst: " in text
    for words in ("calibrated 2.0 % / -10.0 %", "held-out 15.0 % / +20.0 %", "null 20.0 % / -20.0"):
        assert words in text
    head, _, *rows = (line.split(" | ") for line in text.splitlines() if line.startswith("| "))
    kinds = [row[head.index("pred. kind")] for row in rows]
    assert sorted(filter(None, kinds)) == sorted(["calibrated"] * 3 + ["held-out"] * 2 + ["null"])
    alone = to_markdown(make_report(Collected((null,), ())))
    assert "- predictions that are null: nominal rate and latency, no link measured" in alone
    assert "predictions that are calibrated" not in alone


def test_what_timed_its_own_compressor_or_compute_was_not_held_out() -> None:
    """Records of before say held-out of both."""
    base = {"backend": "gloo", "link": "link.json", "workload": "replay:resnet50-v100"}
    for more, kind in (
        ({}, "held-out"),
        ({"compressor": "fp16"}, "calibrated"),
        ({"workload": "resnet50"}, "calibrated"),
        ({"workload": "resnet50", "trace": "resnet50-v100"}, "held-out"),
    ):
        found = cell("gloo", "wfbp", 1.0, 1.1).cell
        found.prediction, found.config = "held-out", RunConfig(**{**base, **more})
        assert kind_of(found) == kind, more


def test_a_single_prediction_needs_no_summary() -> None:
    assert make_report(Collected(CELLS[:1], ())).prediction_errors == []
