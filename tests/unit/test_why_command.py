"""`testbed why` on the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from testbed.base.axes import AXES, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.causes.summary import why as find_why
from testbed.cli import make_app
from testbed.launch.plan_options import parts_of
from testbed.records.cell import Cell, encode_cell
from testbed.records.timeline import Timeline, encode_timeline
from testbed.scheduling.protocol import make_plan
from tests.harness import page_cells
from tests.harness.event_logs import make_log


def run(*arguments: str) -> str:
    done = CliRunner().invoke(make_app(), ["why", *arguments])
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


def cell_of(timeline: Timeline, began: str = "", **changes: Any) -> Cell:
    """The record of the run that a timeline is of."""
    values = {
        "scheduler": timeline.scheduler,
        "config": RunConfig(backend=timeline.backend, workers=timeline.num_workers),
        "environment": {"began": began} if began else {},
        **changes,
    }
    workers = timeline.num_workers
    return Cell(backend=timeline.backend, workload="w", num_workers=workers, **values)


def written(folder: Path, cell: Cell, timeline: Timeline) -> Path:
    (folder / "a.timeline.json").write_bytes(encode_timeline(timeline))
    (folder / "a.json").write_bytes(encode_cell(cell))
    return folder / "a.json"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timeline = make_log("late rank", 3).timeline
    return written(tmp_path_factory.mktemp("why"), cell_of(timeline), timeline)


def test_text_fits_100_columns_and_names_the_rank(cell: Path) -> None:
    log = make_log("late rank", 3)
    assert log.window is not None
    text = run(str(cell), "--steps", f"{log.window[0]}-{log.window[-1]}")
    assert max(map(len, text.splitlines())) <= 100
    assert "first cause: late rank" in text
    assert f"rank {log.rank} by " in text
    assert f"advice: rank {log.rank} as fast as the others: " in text


def test_json_holds_what_the_text_tells(cell: Path) -> None:
    log = make_log("late rank", 3)
    assert log.window is not None
    found = json.loads(run(str(cell), "--json", "--steps", f"{log.window[0]}-{log.window[-1]}"))
    assert found["schema"] == "testbed.why/1"
    assert found["first"] == "late rank"
    assert sum(c["exposed_s"] for c in found["causes"]) == pytest.approx(found["exposed_s"])
    assert sum(t["exposed_s"] for t in found["tensors"]) == pytest.approx(
        found["exposed_s"], rel=0.02
    )
    assert len(found["ranks"]) == found["num_workers"]
    waiting = [r["waiting_s"] for r in found["ranks"]]
    assert min(range(len(waiting)), key=waiting.__getitem__) == log.rank


def test_the_timelines_own_file_is_read_as_well(cell: Path) -> None:
    assert run(str(cell)) == run(str(cell.with_name("a.timeline.json")))


@pytest.mark.parametrize(
    ("steps", "told"),
    [("x", "--steps is 'x'"), ("7-3", "--steps is '7-3'"), ("900", "the timeline holds steps")],
)
def test_wrong_steps_are_refused(cell: Path, steps: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run(str(cell), "--steps", steps)


def test_only_ranks_that_wait_for_each_other_are_explained() -> None:
    other = msgspec.structs.replace(make_log("late rank", 3).timeline, consistency="ssp:2")
    with pytest.raises(UsageError, match=r"consistency=ssp:2.*bsp can be explained"):
        find_why(other)


def test_notes_tell_a_gpu_and_steps_that_are_missing() -> None:
    timeline = make_log("late rank", 3).timeline
    steps = [*timeline.exposed_s, 10**6]
    notes = find_why(msgspec.structs.replace(timeline, device="cuda:0"), steps).notes
    assert notes[0] == "times of compute on cuda:0 are those of launching it"
    assert "too few other steps: these are compared with nothing" in notes
    assert "1 of the steps that were asked for are not in the timeline" in notes


def test_a_record_without_a_timeline_is_refused(tmp_path: Path) -> None:
    alone = cell_of(make_log("late rank", 3).timeline)
    (tmp_path / "b.json").write_bytes(encode_cell(alone))
    with pytest.raises(UsageError, match=r"no b\.timeline\.json beside it.*--timeline"):
        run(str(tmp_path / "b.json"))
    with pytest.raises(UsageError, match="cannot be read"):
        run(str(tmp_path / "c.json"))
    (tmp_path / "d.timeline.json").write_text("{}")
    with pytest.raises(UsageError, match="is no timeline"):
        run(str(tmp_path / "d.timeline.json"))
    (tmp_path / "e.json").write_text("{}")
    with pytest.raises(UsageError, match=r"e\.json is no record of a run"):
        run(str(tmp_path / "e.json"))


def test_a_folder_is_refused_however_it_is_called(
    cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cell.parent)
    for name in (".", "..", str(cell.parent)):
        with pytest.raises(UsageError, match="is a folder; expected the record of one run"):
            run(name)


def test_of_a_failed_run_nothing_is_explained_by_what_another_one_left_there(
    tmp_path: Path,
) -> None:
    timeline = make_log("late rank", 3).timeline
    failed = cell_of(timeline, status="failed", error="exit status 1\nRankLost: rank 1 is lost")
    path = written(tmp_path, failed, timeline)
    with pytest.raises(UsageError, match=r"failed \(RankLost: rank 1 is lost\)"):
        run(str(path))
    assert "first cause" in run(str(path.with_name("a.timeline.json")))


NOON, LATER = "2026-11-25T12:00:00.000+00:00", "2026-11-25T12:30:00.000+00:00"


@pytest.mark.parametrize(
    ("began", "changes", "told"),
    [
        (LATER, {}, f"began {LATER} in the cell, {NOON} there"),
        (NOON, {"scheduler": "p3:under_way=3"}, "scheduler p3:under_way=3 in the cell"),
        (NOON, {"num_workers": 99}, "workers 99 in the cell"),
        (NOON, {"backend": "zmq-ps:servers=dedicated:7"}, "backend zmq-ps:servers=dedicated:7 in"),
    ],
)
def test_a_timeline_of_another_run_is_refused(
    began: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    timeline = make_log("late rank", 3).timeline
    timeline = msgspec.structs.replace(timeline, environment={"began": NOON})
    other = msgspec.structs.replace(cell_of(timeline, began), **changes)
    with pytest.raises(UsageError, match=f"is of another run than .*{re.escape(told)}"):
        run(str(written(tmp_path, other, timeline)))


def test_what_an_older_record_does_not_tell_is_not_compared(tmp_path: Path) -> None:
    timeline = make_log("late rank", 3).timeline
    dated = msgspec.structs.replace(timeline, environment={"began": NOON})
    expected = run(str(written(tmp_path, cell_of(timeline), timeline)))
    assert run(str(written(tmp_path, cell_of(timeline, scheduler=""), dated))) == expected
    assert run(str(written(tmp_path, cell_of(timeline, NOON), timeline))) == expected
    assert run(str(written(tmp_path, cell_of(timeline, NOON), dated))) == expected


@pytest.mark.parametrize("setting", [{"clip_norm": 1.0}, {"precision": "fp16"}])
def test_advice_counts_on_no_overlap_that_the_run_cannot_have(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """The run's plan, and any other, is simulated as a run with this setting carries it out."""
    spec = "dear:mib=0.1"
    plan = make_plan(spec, page_cells.TRACE, page_cells.LINK)
    exposed_s = {step: [5e-3, 5e-3] for step in range(3)}
    timeline = msgspec.structs.replace(
        page_cells.timeline(), plan=plan, scheduler=spec, exposed_s=exposed_s
    )

    def gained_s(**settings: Any) -> float:
        config = RunConfig(backend="gloo", scheduler=spec, **settings)
        path = written(tmp_path, cell_of(timeline, config=config), timeline)
        advice = json.loads(run(str(path), "--json"))["advice"]
        return max((a["gain_s"] for a in advice if a["options"]), default=0.0)

    # half of its bytes travel in the next forward pass: 15.96 ms a step, as a whole 18.36 ms
    assert gained_s(**setting) > 1e-3
    assert gained_s() == 0


def test_what_a_run_could_take_does_not_depend_on_this_machine():
    config = RunConfig(backend="nccl", workload="nowhere.py:build")
    axes = [axis for axis in AXES if axis is not WORKLOADS]
    assert parts_of(config, axes, here=False)["backend"].part.name == "nccl"
    wrong = msgspec.structs.replace(config, compressor="topk", precision="fp16")
    with pytest.raises(UsageError, match="cannot stand beside"):
        parts_of(wrong, axes, here=False)
