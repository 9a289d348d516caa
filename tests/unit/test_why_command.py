"""`testbed why` on the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from testbed.base.errors import UsageError
from testbed.causes.summary import why as find_why
from testbed.cli import make_app
from testbed.records.timeline import encode_timeline
from tests.harness.event_logs import make_log


def run(*arguments: str) -> str:
    done = CliRunner().invoke(make_app(), ["why", *arguments])
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why")
    log = make_log("late rank", 3)
    (folder / "a.timeline.json").write_bytes(encode_timeline(log.timeline))
    (folder / "a.json").write_text("{}")
    return folder / "a.json"


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
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no b\.timeline\.json beside it.*--timeline"):
        run(str(tmp_path / "b.json"))
    with pytest.raises(UsageError, match="cannot be read"):
        run(str(tmp_path / "c.json"))
    (tmp_path / "d.timeline.json").write_text("{}")
    with pytest.raises(UsageError, match="is no timeline"):
        run(str(tmp_path / "d.timeline.json"))
