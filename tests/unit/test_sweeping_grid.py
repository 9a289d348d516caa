"""Grids, orders, recipes: what is pure about a sweep."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.config import RunConfig, read_values
from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import load_link
from testbed.sweeping.grid import Sweep, expand, interleave
from testbed.sweeping.progress import remaining_s
from testbed.sweeping.recipe import check_parts, load_recipe, load_toml, recipe_names, with_axes

ROOT = Path(__file__).parents[2]
AXES = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.lists(st.sampled_from(["gloo", "mpi", "zmq-ps"]), min_size=1, max_size=4),
        "workers": st.lists(st.integers(1, 5), min_size=1, max_size=4),
        "batch_size": st.lists(st.integers(1, 64), min_size=1, max_size=3),
        "seed": st.lists(st.integers(0, 3), min_size=1, max_size=3),
    },
)


@given(AXES)
def test_grid_is_every_combination_once(axes):
    cells = expand({"steps": 7}, axes)
    assert len(cells) == math.prod(len(set(values)) for values in axes.values())
    assert len(set(cells)) == len(cells)
    assert all(cell.steps == 7 for cell in cells)
    for name, values in axes.items():
        assert {getattr(cell, name) for cell in cells} == set(values)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=6))
def test_every_invalid_combination_is_named_before_anything_runs(workers):
    invalid = {w for w in workers if w < 1}
    if not invalid:
        assert {c.workers for c in expand({}, {"workers": workers})} == set(workers)
        return
    with pytest.raises(UsageError) as caught:
        expand({}, {"workers": workers})
    assert all(f"workers={w}:" in str(caught.value) for w in invalid)
    assert str(caught.value).startswith(f"{len(invalid)} combination(s)")


def test_explicit_cells_win_over_axes_and_base():
    cells = expand(
        {"steps": 3, "seed": 9}, {"workers": [2, 4]}, [{"backend": "mpi"}, {"workers": 8}]
    )
    assert [(c.backend, c.workers) for c in cells] == [("mpi", 2), ("mpi", 4), ("mpi-ring", 8)]
    assert {c.seed for c in cells} == {9}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"wokers": [2]}, "did you mean 'workers'"),
        ({"workers": ["two"]}, "Expected `int`"),
        ({"steps": [5], "epochs": [1]}, "give one of them"),
        ({"workers": []}, "has no values"),
        ({"repeat": [1]}, "no setting 'repeat'"),
    ],
)
def test_grid_says_what_is_wrong(axes, message):
    with pytest.raises(UsageError, match=message):
        expand({}, axes)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"backend": ["glo"]}, "did you mean 'gloo'"),
        ({"backend": ["gloo:x=1,fast"]}, "not key=value"),
        ({"workload": ["resnet2"]}, "no workload 'resnet2'"),
        ({"scheduler": ["wfbp:mib=1"]}, "no option 'mib'"),
        ({"compressor": ["topk:ratio=2"]}, "ratio"),
        ({"compressor": ["topk+qsgd"]}, "cannot stand left"),
    ],
)
def test_parts_of_a_sweep_are_looked_at_before_it_runs(axes, message):
    with pytest.raises(UsageError, match=message):
        check_parts(expand({}, axes))


def test_a_workload_of_the_users_own_needs_no_known_name():
    (cell,) = expand({}, {"workload": ["mine.py:net"]})
    assert cell.workload == "mine.py:net"
    check_parts([cell], files=False)
    with pytest.raises(UsageError, match="there is no file 'mine"):
        check_parts([cell])


@given(st.integers(1, 12), st.integers(1, 5), st.integers())
def test_every_round_holds_every_cell_once(num_cells, repeats, seed):
    order = interleave(num_cells, repeats, seed)
    assert len(order) == num_cells * repeats
    for repeat in range(repeats):
        run = order[repeat * num_cells : (repeat + 1) * num_cells]
        assert {r for _, r in run} == {repeat}
        assert Counter(index for index, _ in run) == Counter(range(num_cells))
    assert order == interleave(num_cells, repeats, seed)


def test_another_seed_gives_another_order():
    assert len({interleave(6, 2, seed) for seed in range(8)}) > 1


def test_values_from_a_command_line_get_their_kind():
    assert read_values("workers", ["2", "4"]) == (2, 4)
    assert read_values("backend", ["gloo"]) == ("gloo",)
    with pytest.raises(UsageError, match="--workers is 'x'"):
        read_values("workers", ["x"])
    with pytest.raises(UnknownName):
        read_values("repeat", ["1"])


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_name_parts_that_exist(name):
    sweep = load_recipe(name)
    assert sweep.name == name
    assert sweep.summary
    assert with_axes(sweep, {"seed": [1]}).cells == sweep.cells
    check_parts(sweep.cells)


def test_random_cells_are_those_of_the_list_that_was_drawn_beforehand():
    told = (ROOT / "runs/random-cells/drawn.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| ")]
    listed = [row[1:] for row in rows[1:] if row[0].isdigit()]
    cells = load_recipe("random-cells").cells
    assert len(listed) == len(set(cells)) == 60
    assert listed == [
        [c.workload.removeprefix("replay:"), c.cluster, c.backend, c.scheduler] for c in cells
    ]
    assert {c.workers for c in cells} == {2, 6, 8}


FORECAST = sorted(
    {path.stem.removesuffix("-second") for path in (ROOT / "runs/forecasts").glob("*.json")}
)


def test_the_sweeps_that_were_forecast_are_found():
    assert {"emulated", "ddp-pairs", "random-cells"} <= set(FORECAST)


@pytest.mark.parametrize("name", FORECAST)
def test_cells_that_are_forecast_measure_no_link(name):
    for cell in load_recipe(name).cells:
        if cell.backend != "none":
            assert cell.predict
            assert load_link(ROOT / cell.link).num_workers == 4
        assert not cell.rehearse
        assert cell.verify_steps < cell.warmup < cell.steps - 3


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(UnknownName, match="did you mean 'quick'"):
        load_recipe("quik")


def test_axes_of_the_command_line_replace_those_of_the_recipe():
    cells = with_axes(load_recipe("quick"), {"steps": [3], "backend": ["gloo"]}).cells
    assert [(c.backend, c.steps, c.epochs) for c in cells] == [("gloo", 3, None)]


def test_backends_that_take_no_such_option_are_all_named():
    cells = expand({}, {"backend": ["gloo:a=1", "gloo:fast", "zmq-ps:servers=x", "none"]})
    with pytest.raises(UsageError) as caught:
        check_parts(cells)
    assert "gloo:a=1: " in str(caught.value)
    assert "gloo:fast: " in str(caught.value)
    assert "zmq-ps:servers=x: " in str(caught.value)


TOML = """
name = "mine"
repeats = 2
seed = 7
[base]
steps = 4
target_accuracy = [0.9]
[axes]
workers = [2, 4]
[[cells]]
backend = "gloo"
[[cells]]
backend = "zmq-ps:servers=dedicated:1"
seed = 3
"""


def test_toml_describes_a_sweep(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(TOML)
    sweep = load_toml(path)
    assert (sweep.name, sweep.repeats, sweep.seed, len(sweep.cells)) == ("mine", 2, 7, 4)
    assert sweep.cells[3] == RunConfig(
        backend="zmq-ps:servers=dedicated:1",
        workers=4,
        seed=3,
        steps=4,
        target_accuracy=(0.9,),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeat = 3", "did you mean 'repeats'"),
        ("[base]\nwokers = 3", "did you mean 'workers'"),
        ("base = 3", "expected a table"),
        ("[axes]\nworkers = 3", "array"),
        ("repeats = 'x'", "Expected `int`"),
        ("repeats = 0", "above 0"),
        ("= 3", "no TOML"),
        ("name = 'a/b'", "can name a folder"),
    ],
)
def test_toml_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_toml(path)


def test_missing_toml_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        load_toml(tmp_path / "no.toml")


def test_a_sweep_needs_cells():
    with pytest.raises(UsageError, match="no cells"):
        Sweep("mine", ())


def test_remaining_time_uses_the_times_of_like_cells():
    assert remaining_s({}, ["a"]) is None
    assert remaining_s({"a": [1.0, 3.0], "b": [10.0]}, ["a", "b", "a"]) == 14.0
    assert remaining_s({"a": [2.0]}, ["c"]) == 2.0
