"""`--tune`: a run and a sweep search first, and keep every sample beside the record."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.base.files import encode_trace
from testbed.base.trace import Trace
from tests.harness.runs import answer, cell_of, testbed

LINK = ("--link", "rate=1gbit,latency=50us,workers=2")
BUDGET = "trials=6,confirm=1,steps=4"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    times, sizes = [1e-3] * 4, [300_000, 40_000, 200_000, 10_000]
    made = Trace.from_backward(times, sizes, [5e-4] * 4, ["float32"] * 4, name="four")
    path = tmp_path_factory.mktemp("tune") / "trace.json"
    path.write_bytes(encode_trace(msgspec.structs.replace(made, device="made up")))
    return path


def samples(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_tuned_and_tells_how(tmp_path: Path, trace: Path) -> None:
    record = tmp_path / "cell.json"
    done = testbed(
        *("run", "--workload", f"replay:{trace}", "--backend", "loopback", "--scheduler", "dear"),
        *("--steps", "8", "--verify-steps", "4", *LINK, "--tune", BUDGET, "--json", str(record)),
    )
    assert done.status == 0, done.err
    log = samples(tmp_path / "cell.tuning.csv")
    assert len(log) == 6
    (chosen,) = [row for row in log if row["chosen"] == "1"]
    cell: dict[str, Any] = cell_of(record)
    assert cell["scheduler"] == chosen["specification"]
    assert float(chosen["confirmed_s"]) == min(
        float(row["confirmed_s"]) for row in log if row["confirmed_s"]
    )
    assert cell["config"]["tune"] is None
    assert cell["config"]["tuned"] == f"{BUDGET},seed=1"
    assert "--tuned" in cell["command"]
    assert "tuned (6 trials)" in done.out
    assert str(tmp_path / "cell.tuning.csv") in done.err


def test_a_sweep_searches_once_for_all_repeats(tmp_path: Path, trace: Path) -> None:
    folder = tmp_path / "sweep"
    recipe = tmp_path / "two.toml"
    recipe.write_text(
        f'[base]\nworkload = "replay:{trace}"\nbackend = "loopback"\nlink = "{LINK[1]}"\n'
        '[axes]\nscheduler = ["wfbp", "dear"]\n'
    )
    done = testbed(
        *("sweep", str(recipe), "--steps", "6", "--repeats", "2"),
        *("--tune", BUDGET.replace("confirm=1", "confirm=0"), "--output", str(folder)),
    )
    assert done.status == 0, done.err + done.out
    (log,) = (folder / "cells").glob("*.tuning.csv")
    (chosen,) = [row["specification"] for row in samples(log) if row["chosen"] == "1"]
    cells = [json.loads(path.read_bytes()) for path in (folder / "cells").glob("*.json")]
    assert sorted(cell["scheduler"] for cell in cells) == sorted([chosen, chosen, "wfbp", "wfbp"])
    report = answer("report", str(folder), "--format", "csv").out.splitlines()
    rows = {row["scheduler"]: row["tuning"] for row in csv.DictReader(report)}
    assert rows == {"wfbp": "-", chosen: "tuned (6 trials)"}
    before = log.read_bytes()
    next(p for p in (folder / "cells").glob("*.json") if chosen in p.read_text()).unlink()
    again = testbed("sweep", "--resume", str(folder))
    assert again.status == 0, again.err
    assert log.read_bytes() == before


def test_ranks_of_a_launcher_do_not_search(tmp_path: Path, trace: Path) -> None:
    done = answer(
        *("run", "--workload", f"replay:{trace}", "--backend", "gloo", "--scheduler", "dear"),
        *(*LINK, "--tune", BUDGET),
        **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        TORCHELASTIC_RUN_ID="none",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    assert done.status == 2
    assert "--tune starts runs of its own" in done.err
