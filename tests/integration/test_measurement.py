"""Which steps of a run count as measured."""

from __future__ import annotations

from pathlib import Path

from tests.harness.runs import cell_of, testbed


def test_the_step_after_parameters_were_compared_is_marked(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    done = testbed(
        *("run", "--workload", "digits-mlp", "--backend", "gloo", "--steps", "14"),
        *("--warmup", "4", "--verify-steps", "7", "--json", str(record)),
    )
    assert done.status == 0, done.err
    cell = cell_of(record)
    marked = [step for step, is_marked in enumerate(cell["samples"]["unsteady"], 4) if is_marked]
    assert marked == [7]  # counted from 0: the one after the seventh


def test_parameters_compared_in_the_warm_up_mark_no_measured_step(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    done = testbed(
        *("run", "--workload", "digits-mlp", "--backend", "gloo", "--steps", "12"),
        *("--warmup", "4", "--verify-steps", "3", "--json", str(record)),
    )
    assert done.status == 0, done.err
    assert not any(cell_of(record)["samples"]["unsteady"])


def test_the_time_to_a_loss_is_that_of_the_first_judging_at_it(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    done = testbed(
        *("run", "--workload", "digits-mlp", "--backend", "loopback", "--steps", "40"),
        *("--evaluate-every", "10", "--target-loss", "2,0.0001", "--json", str(record)),
    )
    assert done.status == 0, done.err
    cell = cell_of(record)
    there = [a["time_s"] for a in cell["accuracy_curve"] if a["loss"] <= 2]
    assert cell["time_to_loss_s"] == {"2": there[0], "0.0001": None}
    assert "loss 0.0001" in done.out
