"""A resumed run is the run: bit for bit on one worker, and on several where the order is fixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.runs import testbed

SETTINGS = ("--momentum", "0.9", "--schedule", "cosine", "--warmup", "2", "--verify-steps", "0")


def final_state(folder: Path, name: str, *more: str) -> dict[str, object]:
    record = folder / f"{name}.json"
    done = testbed("run", *SETTINGS, *more, "--json", str(record))
    assert done.status == 0, done.err
    cell: dict[str, object] = json.loads(record.read_text())
    return cell


@pytest.mark.parametrize(
    ("backend", "workers"), [("none", "1"), pytest.param("gloo", "2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("workload", ["digits-cnn"])
def test_resumed_equals_uninterrupted(
    backend: str, workers: str, workload: str, tmp_path: Path
) -> None:
    base = ("--workload", workload, "--backend", backend, "--workers", workers, "--steps", "60")
    whole = final_state(tmp_path, "whole", *base)
    saved = tmp_path / "saved"
    final_state(tmp_path, "first", *base, "--checkpoint", str(saved), "--every", "25")
    # The run is taken up at step 50, in the third epoch, as if it had been lost after that.
    (saved / "step-00000060" / "complete").unlink()
    resumed = final_state(tmp_path, "second", *base, "--resume-from", str(saved))
    assert resumed["steps"] == 10
    assert resumed["final_digest"] == whole["final_digest"]
    assert resumed["sample_digest"] == whole["sample_digest"]
    assert resumed["test_accuracy"] == whole["test_accuracy"]


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    base = ("--backend", "none", "--workers", "1", "--steps", "20")
    done = testbed("run", *base, "--resume-from", str(tmp_path))
    assert done.status == 2
    assert "holds no complete checkpoint" in done.err


def test_a_run_with_few_steps_left_measures_what_is_left(tmp_path: Path) -> None:
    base = ("--backend", "none", "--workers", "1", "--verify-steps", "0", "--steps")
    saved = str(tmp_path / "saved")
    assert testbed("run", *base, "17", "--checkpoint", saved).status == 0
    record = tmp_path / "rest.json"
    done = testbed("run", *base, "20", "--resume-from", saved, "--json", str(record))
    assert done.status == 0, done.err
    # Of three steps one is warm-up: five, but at most half.
    assert len(json.loads(record.read_text())["samples"]["step_time_s"]) == 2
    done = testbed("run", *base, "20", "--resume-from", saved, "--warmup", "4")
    assert done.status == 2
    assert "--warmup is 4 and 3 steps are left" in done.err


@pytest.mark.parametrize("more", [(), ("--compressor", "ef+topk:ratio=0.1")])
def test_a_resumed_run_says_why_nobody_compared_it(more: tuple[str, ...], tmp_path: Path) -> None:
    base = ("run", "--backend", "gloo", "--workers", "2", "--verify-steps", "5", *more, "--steps")
    saved, record = str(tmp_path / "saved"), tmp_path / "rest.json"
    whole = testbed(*base, "8", "--checkpoint", saved)
    assert whole.status == 0, whole.err
    resumed = testbed(*base, "12", "--resume-from", saved, "--json", str(record))
    assert resumed.status == 0, resumed.err
    cell = json.loads(record.read_text())
    reason = "what goes on from a checkpoint is not compared with a single process"
    assert cell["identical_work"] is None
    assert cell["identical_work_note"] == f"ranks agree bit for bit; {reason}"
    (said,) = (line for line in resumed.out.splitlines() if "same work" in line)
    assert "not checked" in said
    assert reason in said
    assert "checkpoint" not in "".join(
        line for line in whole.out.splitlines() if "same work" in line
    )
