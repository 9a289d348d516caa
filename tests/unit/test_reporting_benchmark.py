"""Cells as pytest-benchmark's JSON, read by pytest-benchmark itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.stats import Stats

from testbed.reporting.benchmark import stats_of
from tests.harness.runs import answer

SWEEP = Path(__file__).parents[2] / "runs/tables/ddp-pairs-dilated"
BY_LINEAR_QUARTILES = {"q1", "q3", "iqr", "iqr_outliers", "outliers", "ld15iqr", "hd15iqr"}


def test_the_figures_are_those_of_pytest_benchmark():
    data = [0.5, 0.125, 0.25, 1.0, 0.375, 0.5, 8.0, 0.625, 0.75]
    theirs, ours = Stats(), stats_of(data)
    for value in data:
        theirs.update(value)
    expected = theirs.as_dict()
    assert expected.keys() == ours.keys() - {"data", "iterations"}
    # a quartile is defined in several ways; of 4 n + 1 values theirs differs a little
    exact = expected.keys() - BY_LINEAR_QUARTILES
    assert {n: ours[n] for n in exact} == pytest.approx({n: expected[n] for n in exact})
    assert (ours["hd15iqr"], ours["outliers"]) == (expected["hd15iqr"], expected["outliers"])


def test_the_stored_sweep_is_compared_by_pytest_benchmark(tmp_path):
    exported, cells = tmp_path / "cells.json", json.loads(answer_json())["cells"]
    done = answer("report", str(SWEEP), "--format", "benchmark", "--output", str(exported))
    assert done.status == 0, done.err
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(exported)]
    again = shutil.copy(exported, tmp_path / "again.json")
    command += [again, "--columns=median,rounds", "--csv", str(tmp_path / "table.csv")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert shown.returncode == 0, shown.stderr
    benchmarks = json.loads(exported.read_text())["benchmarks"]
    assert len(benchmarks) == len(cells) == 8
    assert len({each["fullname"] for each in benchmarks}) == 8
    for cell, each in zip(cells, benchmarks, strict=True):
        assert each["group"] in shown.stdout
        # the report's own figure: a geometric mean of the same runs, beside their mean
        assert each["stats"]["mean"] == pytest.approx(cell["step_time_s"] / 40, rel=1e-3)
        assert each["stats"]["rounds"] == cell["repeats"] == 6
        assert each["extra_info"]["wire_bytes_per_step"] == cell["wire_bytes_per_step"]
        assert each["extra_info"]["configuration"]["backend"] == cell["config"]["backend"]
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 8


def answer_json():
    return answer("report", str(SWEEP), "--format", "json").out
