"""Runs with a compressor, as users start them: their records, their checkpoints, their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs import answer, testbed

BASE = ("--workload", "digits-mlp", "--workers", "2", "--warmup", "2", "--verify-steps", "2")


def slow(*values: str | pytest.MarkDecorator) -> Any:
    """A case that only `-m slow` runs."""
    marks = [value for value in values if not isinstance(value, str)]
    texts = [value for value in values if isinstance(value, str)]
    return pytest.param(*texts, marks=[pytest.mark.slow, *marks])


def cell_of(folder: Path, name: str, *more: str) -> dict[str, Any]:
    record = folder / f"{name}.json"
    done = testbed("run", *BASE, *more, "--json", str(record))
    assert done.status == 0, done.err
    cell: dict[str, Any] = json.loads(record.read_text())
    return cell


@pytest.mark.parametrize(
    ("backend", "compressor", "scheduler"),
    [
        ("loopback", "dgc:ratio=0.05", "dear:mib=0.02"),
        slow("loopback", "ef+topk:ratio=0.05", "bucket:mib=0.02,first_mib=0.005"),
        slow("loopback", "powersgd:rank=2", "wfbp"),
        slow("loopback", "oktopk:ratio=0.05,every=3", "bytescheduler:partition_kib=16"),
        slow("gloo", "ef+qsgd", "wfbp"),
        slow("zmq-ps", "ef+topk:ratio=0.05", "wfbp"),
        slow("mpi-ring", "acp-sgd", "wfbp", pytest.mark.mpi),
    ],
)
def test_resumed_equals_uninterrupted(
    backend: str, compressor: str, scheduler: str, tmp_path: Path
) -> None:
    """Residuals, velocities and bases, which differ from rank to rank, are part of a checkpoint."""
    base = ("--backend", backend, "--compressor", compressor, "--scheduler", scheduler)
    saved = str(tmp_path / "saved")
    whole = cell_of(tmp_path, "whole", *base, "--steps", "10")
    cell_of(tmp_path, "first", *base, "--steps", "5", "--checkpoint", saved)
    resumed = cell_of(tmp_path, "second", *base, "--steps", "10", "--resume-from", saved)
    assert resumed["steps"] == 5
    assert resumed["final_digest"] == whole["final_digest"]
    assert resumed["samples"]["loss"] == whole["samples"]["loss"][5:]
    assert whole["compression"]["state_bytes"] > 0


def test_a_record_tells_what_compressing_did(tmp_path: Path) -> None:
    cell = cell_of(
        *(tmp_path, "cell", "--backend", "loopback", "--compressor", "dgc:ratio=0.01"),
        *("--steps", "8"),
    )
    told = cell["compression"]
    assert told["compressor"] == cell["config"]["compressor"] == "dgc:ratio=0.01"
    assert 0 < told["sent_bytes"] < 0.03 * told["dense_bytes"]
    assert 0.008 < told["density"] < 0.014
    assert 0 < told["relative_error"] < 1
    assert told["state_bytes"] == 2 * told["dense_bytes"]
    assert cell["config"]["momentum"] == 0.0
    assert "momentum" in told["note"]
    assert cell["identical_work"] is True
    assert "with dgc:ratio=0.01 bit for bit after 2 steps" in cell["identical_work_note"]
    assert "--compressor dgc:ratio=0.01" in cell["command"]


def test_a_checkpoint_of_another_compressor_is_refused(tmp_path: Path) -> None:
    base = ("--backend", "loopback", "--steps", "6")
    saved = str(tmp_path / "saved")
    cell_of(tmp_path, "first", *base, "--compressor", "ef+topk", "--checkpoint", saved)
    done = testbed("run", *BASE, *base, "--compressor", "ef+qsgd", "--resume-from", saved)
    assert done.status == 2
    assert "compressor=ef+topk" in done.err
    assert "compressor=ef+qsgd" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compressor", "topkk"), "did you mean 'topk'"),
        (("--compressor", "topk:ration=0.1"), "has no option 'ration'; known options: ratio"),
        (("--compressor", "ef"), "write ef+NAME"),
        (("--compressor", "topk", "--backend", "ddp"), "exchanges gradients by itself"),
        (("--compressor", "topk", "--backend", "zmq-ps:update=server"), "use update=worker"),
        (("--clip-norm", "1", "--backend", "zmq-ps:update=server"), "exists on the servers"),
        (("--checkpoint", "/tmp", "--backend", "zmq-ps:consistency=async"), "use update=worker"),
        (("--compressor", "dgc", "--optimizer", "adam"), "does the momentum of SGD itself"),
        (("--compressor", "topk", "--precision", "fp16"), "--precision fp16"),
        (
            ("--compressor", "topk", "--backend", "zmq-ps:repack=1", "--checkpoint", "/tmp"),
            "write zmq-ps:repack=0",
        ),
        (
            ("--compressor", "ef-sign", "--backend", "zmq-ps", "--resume-from", "/tmp"),
            "write zmq-ps:repack=0",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: tuple[str, ...], words: str) -> None:
    backend = () if "--backend" in options else ("--backend", "loopback")
    done = answer("run", *BASE, *backend, "--steps", "4", *options)
    assert done.status == 2, done.err
    assert words in done.err


def test_a_sweep_keeps_each_compressor_s_options() -> None:
    listed = "none,ef+topk:ratio=0.01,qsgd:bits=4,bucket=64,warmup:stage_steps=5+topk:ratio=0.1"
    done = answer(
        *("sweep", "--backend", "loopback", "--workload", "digits-mlp", "--steps", "3"),
        *("--repeats", "1", "--compressor", listed, "--dry-run"),
    )
    assert done.status == 0, done.err
    assert "4 cells" in done.out
    for text in ("ef+topk:ratio=0.01", "qsgd:bits=4,bucket=64", "warmup:stage_steps=5+topk"):
        assert f"--compressor {text}" in done.out
    bad = answer("sweep", "--backend", "loopback", "--compressor", "none,topkk", "--dry-run")
    assert bad.status == 2
    assert "topkk: no compressor 'topkk'" in bad.err


def test_compressors_are_listed() -> None:
    done = answer("list", "compressors")
    assert done.status == 0, done.err
    assert "ef-sign" in done.out
    assert "mpi-ring" not in done.out
    assert "did you mean 'compressors'" in answer("list", "compressor").err


def test_residuals_follow_their_elements_into_another_plan(tmp_path: Path) -> None:
    """Resumed under another scheduler, what was held back still counts: without it, all differs."""
    base = ("--backend", "loopback", "--compressor", "ef+topk:ratio=0.05")
    saved = tmp_path / "saved"
    first = ("--scheduler", "wfbp", "--steps", "5", "--checkpoint", str(saved))
    cell_of(tmp_path, "first", *base, *first)
    further = ("--scheduler", "sequential", "--steps", "10", "--resume-from", str(saved))
    kept = cell_of(tmp_path, "kept", *base, *further)
    files = list(saved.rglob("rank-*.pt"))
    assert len(files) == 2
    for file in files:
        state = torch.load(file, weights_only=True)
        assert len(state["compression"]["states"]["states"]) == len(state["compression"]["keys"])
        state["compression"]["states"] = {"states": {}, "devices": {}}
        torch.save(state, file)
    forgotten = cell_of(tmp_path, "forgotten", *base, *further)
    assert kept["initial_digest"] == forgotten["initial_digest"]
    assert kept["final_digest"] != forgotten["final_digest"]
