"""`testbed simulate --memory` as a user calls it: text, JSON and a picture; nothing is run."""

import json as json_module
import re

import pytest

from testbed.base.errors import UsageError
from testbed.commands.simulate import simulate

SPARSE = "ef:units=update+topk:ratio=0.01"
MLP = {"workload": "digits-mlp", "batch": "32", "memory": "none,checkpoint"}


def test_every_strategy_with_every_compressor(capsys):
    simulate(**MLP, compressor=f"none,{SPARSE}", json="-")
    record = json_module.loads(capsys.readouterr().out)
    found = record["forecasts"]
    assert [(f["memory"], f["compressor"]) for f in found] == [
        (memory, codec) for memory in ("none", "checkpoint") for codec in ("none", SPARSE)
    ]
    assert all(f["curve"] is None and sum(f["peak"].values()) > 0 for f in found)
    dense, sparse = (f["peak"] for f in found[:2])
    parameter_bytes = dense["weights"]
    assert sparse["communication"] >= dense["communication"] + parameter_bytes


def test_a_picture_has_a_panel_for_each(tmp_path, capsys):
    simulate(**MLP, plot=tmp_path / "memory.svg", json=str(tmp_path / "memory.json"))
    drawing = (tmp_path / "memory.svg").read_text()
    assert drawing.count('font-size="13"') == 2
    assert re.search(r">memory none: peak [0-9.]+ KiB<", drawing)
    first = json_module.loads((tmp_path / "memory.json").read_bytes())["forecasts"][0]
    sums = [sum(each) for each in zip(*first["curve"]["levels"].values(), strict=True)]
    assert max(sums) == sum(first["peak"].values())
    assert first["curve"]["time_s"] == sorted(first["curve"]["time_s"])
    simulate(**MLP, plot=tmp_path / "memory.html")
    assert "<svg" in (tmp_path / "memory.html").read_text()
    assert "checkpoint, 32 samples: peak" in capsys.readouterr().out


def test_the_largest_batch_that_fits(capsys):
    simulate(memory="none", workload="digits-mlp", budget_mb=14.0, max_batch=True)
    told = capsys.readouterr().out
    size = int(re.search(r"none, ([0-9]+) samples: .*; fits", told)[1])
    simulate(memory="none", workload="digits-mlp", batch=f"{size},{size + 1}", budget_mb=14.0)
    assert [*re.findall(r"; (fits|does not fit)", capsys.readouterr().out)] == [
        "fits",
        "does not fit",
    ]


def test_what_cannot_be_asked_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected both"):
        simulate(**MLP, max_batch=True)
    with pytest.raises(UsageError, match="leave --batch out"):
        simulate(**MLP, max_batch=True, budget_mb=1.0)
    with pytest.raises(UsageError, match="--workload was not given"):
        simulate(memory="none")
    with pytest.raises(UsageError, match=r"ends in .html or .svg"):
        simulate(**MLP, plot=tmp_path / "memory.png")
