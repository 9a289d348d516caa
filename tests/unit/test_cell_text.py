"""What `testbed run` says at its end."""

from __future__ import annotations

from testbed.base.config import RunConfig
from testbed.records.cell import Cell
from testbed.reporting.cell_text import describe_cell


def cell(**fields: object) -> Cell:
    return Cell(backend="gloo", workload="x", num_workers=2, config=RunConfig(), **fields)


def test_the_schedule_is_told_with_its_messages_and_reason() -> None:
    words = describe_cell(cell(scheduler="p3", num_messages=9, plan_reason="slices of 50000"))
    assert "  schedule      p3, 9 messages a step: slices of 50000\n" in words
    assert "schedule" not in describe_cell(cell())
    words = describe_cell(cell(scheduler="auto", num_messages=2, plan_reason="a; b; " + "c " * 60))
    assert "  schedule      auto, 2 messages a step: a\n                b\n" in words
    assert words.count("c c") > 2
    assert all(len(line) <= 100 for line in words.splitlines())
    words = describe_cell(cell(scheduler="mg-wfbp", num_messages=5, plan_reason="5 messages: x"))
    assert "  schedule      mg-wfbp: 5 messages: x\n" in words


def test_the_prediction_stands_beside_the_measured_step() -> None:
    words = describe_cell(
        cell(step_time_s=2.0, compute_s=1.0, predicted_step_time_s=1.9, dilation=10.0)
    )
    assert "  predicted     190 ms (-5.0 % of what was measured), calibrated\n" in words
    assert "predicted" not in describe_cell(cell(step_time_s=2.0, compute_s=1.0))
    # The scheduler's own figure, in its reason, is one of before the rehearsal.
    link = {"latency_s": 1e-3, "missing_s": [1e-4]}
    known = {"step_time_s": 2.0, "compute_s": 1.0, "predicted_step_time_s": 2.0}
    words = describe_cell(cell(**known, link=link))
    assert "what was measured), calibrated, its messages as long as in rehearsed steps\n" in words
    # Rehearsed steps that did not agree changed nothing, and are not said to have.
    ignored = {"latency_s": 1e-3, "in_steps": [1.2, 1.9, 1.5, 2.3]}
    assert "rehearsed" not in describe_cell(cell(**known, link=ignored))
    used = {"latency_s": 1e-3, "in_steps": [1.1] * 4, "stretched": 1.1}
    assert "as long as in rehearsed steps\n" in describe_cell(cell(**known, link=used))


def test_targets_are_told_as_tables_tell_them() -> None:
    known = {"test_accuracy": 0.975}
    words = describe_cell(
        cell(**known, time_to_accuracy_s={"0.975": 5.0, "0.98": None, "0.07": 1.0})
    )
    assert "  97.5 % accuracy after 5 s\n" in words
    assert "  98 % accuracy not reached\n" in words
    assert "  7 % accuracy  after 1 s\n" in words


def test_where_nothing_tells_an_accuracy_no_target_is_called_missed() -> None:
    aims = {"0.5": None}
    words = describe_cell(cell(test_accuracy=None, time_to_accuracy_s=aims))
    assert "  50 % accuracy not known: nothing tells one\n" in words
    words = describe_cell(cell(test_accuracy=0.4, time_to_accuracy_s=aims))
    assert "  50 % accuracy not reached\n" in words


def test_what_a_backend_measured_when_it_was_opened_is_told() -> None:
    words = describe_cell(cell(opened_as="mpi-ring:switch_bytes=65536"))
    assert "  opened as     mpi-ring:switch_bytes=65536 (measured)\n" in words
    assert "opened as" not in describe_cell(cell())
