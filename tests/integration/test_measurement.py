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
