"""`testbed simulate --memory` as a user calls it: text, JSON and a picture; nothing is run."""

import json as json_module
import re

import msgspec
import pytest
import torch
import typer

from testbed.base.config import make_config
from testbed.base.errors import UsageError
from testbed.commands.simulate import simulate
from testbed.memory.planning.lifetimes import KEEP
from testbed.memory.planning.plan import decode_memory_plan
from testbed.training.forecast import Batches, record_step
from testbed.training.replica import make_replica
from testbed.workloads.load import load_workload
from tests.harness.runs import answer

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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**MLP, "codecs_out": "c.json", "factors": True}, "--factors and --codecs-out given with"),
        ({**MLP, "workers": "2,4"}, "--workers is '2,4' with --memory; expected one number"),
        ({"trace": "t", "link": "l", "budget_mb": 9.0}, "--budget-mb given without --memory"),
    ],
)
def test_what_would_be_passed_over_is_refused(given, told):
    with pytest.raises(UsageError, match=told):
        simulate(**given)


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


@pytest.mark.parametrize("memory", ["none", "laysa"])
def test_where_not_one_sample_fits_it_tells_what_one_takes(capsys, memory: str):
    asked = {"memory": memory, "workload": "digits-mlp", "max_batch": True}
    with pytest.raises(typer.Exit, check=lambda ended: ended.exit_code == 1):
        simulate(**asked, budget_mb=1.0)
    told = capsys.readouterr().out
    assert "not even one sample fits" in told
    least = int(re.search(r"takes? (?:is )?([0-9]+) MiB", told)[1])
    simulate(**asked, budget_mb=least)
    assert "; fits" in capsys.readouterr().out
    with pytest.raises(typer.Exit, check=lambda ended: ended.exit_code == 1):
        simulate(**asked, budget_mb=least - 1)
    assert "not even one sample fits" in capsys.readouterr().out


def test_a_budget_that_nothing_meets_ends_with_status_1():
    asked = ("simulate", "--memory", "none,laysa", "--workload", "digits-mlp", "--batch")
    small = answer(*asked, "32", "--budget-mb", "1")
    assert (small.status, small.out.count("does not fit"), small.err) == (1, 1, "")
    assert "give at least that" in small.out
    assert answer(*asked, "32", "--budget-mb", "1", "--json", "-").status == 1
    assert answer(*asked, "32", "--budget-mb", "1000").status == 0
    assert answer(*asked, "32").status == 0
    # One of two batches fits: the budget can be met.
    mixed = answer(*asked, "1,4096", "--budget-mb", "14")
    assert ("; fits" in mixed.out, "does not fit" in mixed.out, mixed.status) == (True, True, 0)


def test_what_cannot_be_asked_is_refused(tmp_path):
    for none_at_all in (-5.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a finite number above 0"):
            simulate(**MLP, budget_mb=none_at_all)
    with pytest.raises(UsageError, match="budget_mb is inf; expected a finite number above 0"):
        simulate(**(MLP | {"memory": "laysa:budget_mb=inf"}))
    with pytest.raises(UsageError, match=r"--json is .*nowhere"):
        simulate(**MLP, json=str(tmp_path / "nowhere" / "x.json"))
    with pytest.raises(UsageError, match="expected both"):
        simulate(**MLP, max_batch=True)
    with pytest.raises(UsageError, match="--plan-out was given with 2 combinations"):
        simulate(**MLP, plan_out=tmp_path / "plan.json")
    asked = {"memory": "laysa", "workload": "digits-mlp", "budget_mb": 1.0}
    with pytest.raises(UsageError, match="no plan to save"):
        simulate(**asked, plan_out=tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()
    with pytest.raises(UsageError, match="leave --batch out"):
        simulate(**MLP, max_batch=True, budget_mb=1.0)
    with pytest.raises(UsageError, match="--workload was not given"):
        simulate(memory="none")
    with pytest.raises(UsageError, match=r"ends in .html or .svg"):
        simulate(**MLP, plot=tmp_path / "memory.png")


def test_a_saved_plan_is_carried_out_again(tmp_path, capsys):
    asked = {"workload": "digits-cnn", "memory": "laysa:workspace=0", "batch": "32"}
    saved, again = tmp_path / "plan.json", tmp_path / "again.json"
    simulate(**asked, plan_out=saved, json="-")
    first = json_module.loads(capsys.readouterr().out)["forecasts"][0]
    asked["memory"] += f",plan={saved}"
    simulate(**asked, plan_out=again, json="-")
    second = json_module.loads(capsys.readouterr().out)["forecasts"][0]
    assert second["peak"] == first["peak"]
    assert second["why"] == f"as saved in {saved}: {first['why']}"
    plans = [decode_memory_plan(path.read_bytes(), path.name) for path in (saved, again)]
    assert plans[0].digest() == plans[1].digest()
    assert len(set(plans[0].actions)) > 1  # else there is nothing to repeat
    # Other actions are taken over, too, though they are not the best.
    kept = msgspec.structs.replace(plans[0], actions=KEEP * len(plans[0].actions))
    again.write_bytes(msgspec.json.encode(kept))
    asked["memory"] = f"laysa:workspace=0,plan={again}"
    simulate(**asked, json="-")
    all_kept = json_module.loads(capsys.readouterr().out)["forecasts"][0]
    assert sum(all_kept["peak"].values()) > sum(first["peak"].values())
    with pytest.raises(typer.Exit) as ended:
        simulate(**(asked | {"memory": f"{asked['memory']},none"}), budget_mb=13.0)
    assert ended.value.exit_code == 1
    assert "a budget of 13 MiB was given; the least that a step takes" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"are not the [0-9]+ of this step, at first"):
        simulate(**(asked | {"batch": "16"}))
    with pytest.raises(UsageError, match="auto chooses and takes no saved plan"):
        simulate(**(asked | {"memory": f"auto:plan={again}"}))
    again.write_text("{}")
    with pytest.raises(UsageError, match="is no memory plan"):
        simulate(**asked)


OWN_MODEL = """
import torch
from torch.utils.data import TensorDataset
from testbed import Workload

class Model(torch.nn.Module):
    def __init__(self, width, has_constant):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, width), torch.nn.Linear(width, width)
        self.scale = torch.ones(()) if has_constant else 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale

def build(width: int, has_constant: int = 0):
    samples = torch.zeros(8, 4, device="cpu"), torch.zeros(8, dtype=torch.int64, device="cpu")
    return Workload(Model(width, has_constant), TensorDataset(*samples), momentum=0.9)
"""


def test_a_model_larger_than_the_machine(tmp_path, capsys):
    """Its weights are 4 TiB."""
    file = tmp_path / "own.py"
    file.write_text(OWN_MODEL)
    width = 1 << 20
    simulate(memory="none", workload=f"{file}:build:width={width}", batch="2", json="-")
    (found,) = json_module.loads(capsys.readouterr().out)["forecasts"]
    weight_bytes = 4 * (width * width + 6 * width)
    assert found["peak"]["weights"] == found["peak"]["optimizer"] == weight_bytes


def test_code_that_wants_values_has_them(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN_MODEL)
    found = []
    for constant in (0, 1):
        spec = f"{file}:build:width=64,has_constant={constant}"
        simulate(memory="none,checkpoint", workload=spec, batch="2", json="-")
        found.append(json_module.loads(capsys.readouterr().out)["forecasts"])
    for ours, theirs in zip(*found, strict=True):
        assert ours["peak"]["weights"] == theirs["peak"]["weights"] == 4 * (64 * 64 + 6 * 64)
        assert ours["peak"]["optimizer"] == theirs["peak"]["optimizer"]


def test_weights_without_values_make_no_difference():
    config = make_config({"workload": "resnet20"})
    recorded = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            workload = load_workload(config.workload, seed=1)
        replica = make_replica(workload, config, 1)
        assert {p.device.type for p in replica.model.parameters()} == {device}
        recorded.append(record_step(replica, 2))
    assert recorded[0] == recorded[1]


def test_a_saved_plan_keeps_the_modules_that_overwrite_their_input(tmp_path, capsys):
    asked, saved = {"workload": "digits-cnn", "batch": "32"}, tmp_path / "plan.json"
    simulate(**asked, memory="inplace", plan_out=saved, json="-")
    first = json_module.loads(capsys.readouterr().out)["forecasts"][0]
    plan = decode_memory_plan(saved.read_bytes(), "plan")
    again = tmp_path / "again.json"
    simulate(**asked, memory=f"laysa:plan={saved},mirror=none", plan_out=again, json="-")
    second = json_module.loads(capsys.readouterr().out)["forecasts"][0]
    assert plan.in_place
    assert decode_memory_plan(again.read_bytes(), "again").in_place == plan.in_place
    assert second["peak"]["activations"] == first["peak"]["activations"]
    saved.write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, in_place=("nowhere",))))
    with pytest.raises(UsageError, match="nowhere may not overwrite what it reads"):
        simulate(**asked, memory=f"laysa:plan={saved}")


CONTRASTIVE = """
import torch
from torch.nn import functional as F

class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def forward(self, x):
        made = self.layer(x)
        return made @ made.t()

def build():
    data = torch.utils.data.TensorDataset(torch.ones(64, 16), torch.zeros(64, dtype=torch.long))
    def loss(model, batch):
        made = model(batch[0])
        return F.cross_entropy(made, torch.arange(len(made)))
    return Pairs(), data, loss
"""


def test_sizes_that_do_not_grow_by_a_line_are_recorded(tmp_path):
    file = tmp_path / "pairs.py"
    file.write_text(CONTRASTIVE)
    for workload in (f"{file}:build", "digits-mlp"):
        config = make_config({"workload": workload, "batch_size": 512})
        replica = make_replica(load_workload(config.workload, seed=1), config, 1)
        found, real = Batches(replica).at(512), record_step(replica, 512)
        assert max(found.base) == pytest.approx(max(real.base), rel=0.01)
        sizes = [sum(v.num_bytes for v in each.values) for each in (found, real)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
