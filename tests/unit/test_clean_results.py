"""A sweep's folder is made ready to be committed: what has no use elsewhere goes, nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.records.cell import Cell
from testbed.records.store import PLAN, Store, cell_key
from testbed.reporting.aggregate import collect_cells
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import carry_out, make_plan
from tests.tools.clean_results import clean, main


def swept(folder: Path, *configs: RunConfig) -> Store:
    """A folder as a sweep leaves it, with paths of this machine in its records."""
    store = Store(folder)
    for each in (store.cells, store.scratch, store.others):
        each.mkdir(parents=True)
    store.write_plan(make_plan(Sweep("tiny", configs, repeats=1)))

    def at_once(config: RunConfig, json_path: Path, log_path: Path) -> Cell:
        log_path.write_text("told")
        return Cell(
            backend=config.backend,
            workload="w",
            num_workers=2,
            step_time_s=0.1,
            config=config,
            environment={"variables": {"OMPI_MCA_initial_wdir": str(Path.cwd())}},
            plan_reason=f"read {Path.cwd()}/runs/links/x.json and /somewhere/else.py, 10.0.0.0/24",
        )

    carry_out(store, at_once)
    return store


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_scratch_locks_and_logs_go_and_paths_become_relative(tmp_path: Path) -> None:
    folder = tmp_path / "swept"
    store = swept(folder, RunConfig(backend="gloo"), RunConfig(backend="mpi-ring"))
    (store.scratch / "half").write_text("half of a cell")
    (folder / "lock-3").write_text("")
    (folder / "task-3.log").write_text("")
    (store.cells / ".x.json.17.partial").write_text("{")
    (folder / "report.md").write_text("kept")
    outside = tmp_path / "outside.log"
    outside.write_text("not ours")
    (folder / "link.log").symlink_to(outside)
    before = store.read_cells()
    assert {"lock", "scratch"} <= names(folder)
    assert main([str(folder)]) == 0
    keys = {f"cells/{cell_key(cell.config)}.json" for cell in before.values()}
    left = {"cells", "again", PLAN, "report.md", "link.log"} | keys
    assert names(folder) == left
    assert outside.read_text() == "not ours"
    for key, cell in store.read_cells().items():
        assert cell.environment["variables"] == {"OMPI_MCA_initial_wdir": "."}
        assert cell.plan_reason == "read runs/links/x.json and else.py, 10.0.0.0/24"
        same = ("environment", "plan_reason")
        for name in set(cell.__struct_fields__) - set(same):
            assert getattr(cell, name) == getattr(before[key], name)
    assert str(Path.cwd()) not in (folder / PLAN).read_text()
    assert len(collect_cells([folder]).cells) == len(before)
    assert clean(folder)[1:] == ([], [])  # a second time changes nothing


def test_settings_that_hold_paths_are_listed_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(backend="gloo", trace="/somewhere/trace.json")
    store = swept(tmp_path / "swept", config)
    assert main([str(store.path)]) == 1
    (cell,) = store.read_cells().values()
    assert cell.config == config
    assert cell_key(cell.config) in store.read_cells()
    told = capsys.readouterr().out
    assert f"cells/{cell_key(config)}.json" in told
    assert PLAN in told


def test_a_file_with_a_digest_of_itself_is_not_changed(tmp_path: Path) -> None:
    store = swept(tmp_path / "swept", RunConfig(backend="gloo"))
    sealed = store.path / "forecast.json"
    sealed.write_bytes(msgspec.json.encode({"digest": "12", "name": "/somewhere/x.json"}))
    before = sealed.read_bytes()
    assert clean(store.path)[2] == ["forecast.json"]
    assert sealed.read_bytes() == before


def test_a_folder_in_use_and_one_of_no_sweep_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = swept(tmp_path / "swept", RunConfig(backend="gloo"))
    before = names(store.path)
    for share in (None, 2):
        with store.locked(share):
            assert main([str(store.path)]) == 2
        assert "another sweep is at work" in capsys.readouterr().err
    assert names(store.path) - {"lock-2"} == before
    (tmp_path / "note.log").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "no sweep was begun there" in capsys.readouterr().err
    assert (tmp_path / "note.log").exists()
