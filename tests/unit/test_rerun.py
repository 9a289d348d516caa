"""A stored run beside the same made again: what agrees, what need not, what may be why."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

from testbed.base.axes import AXES
from testbed.base.config import make_config, to_arguments
from testbed.base.errors import Unavailable
from testbed.cli import make_app
from testbed.commands.settings import values_of
from testbed.launch.plan_options import parts_of
from testbed.records.cell import decode_cell, encode_cell
from testbed.reporting.rerun import agrees, describe, rows_of, to_run
from tests.harness.runs import answer
from tests.unit.test_diff import made

ROOT = Path(__file__).parents[2]
STORED = sorted((ROOT / "runs").glob("**/cells/*.json"))
FOLDERS = sorted({path.parent for path in STORED})
DIGESTS = {"content_digest": "dd", "buffer_digest": "ee", "received_bytes_per_step": 4096.0}


def run(step_s=1.0, **changes):
    return made(step_s, **{**DIGESTS, "steps": 9, "consistency": "bsp", **changes})


def told(stored, now, repeats=()):
    return describe(stored, now, repeats or [stored], [])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_stored_cell_can_be_asked_for_again(folder, monkeypatch):
    """Its command line, read as `testbed run` reads it, is its configuration, and its parts fit."""
    monkeypatch.chdir(ROOT)
    command = get_command(make_app()).commands["run"]
    for path in folder.glob("*.json"):
        stored = decode_cell(path.read_bytes())
        config, changes = to_run(stored)
        read = command.make_context("run", to_arguments(config)).params
        names = type(config).__struct_fields__
        again = make_config(values_of({n: read[n] for n in names if n in read}))
        assert msgspec.structs.replace(again, repeat=config.repeat) == config
        opened = stored.opened_as
        assert config.backend == (opened or stored.config.backend)
        assert changes == ([f"the backend is opened as it was then: {opened}"] if opened else [])
        lacks = [axis.resolve(axis.of(again)).part.probe() for axis in AXES]
        with pytest.raises(Unavailable) if any(lacks) else nullcontext():  # such as NCCL
            parts_of(again)


def test_what_agrees_is_told():
    stored, now = run(), run(1.01)
    rows = rows_of(stored, now)
    assert {row.verdict for row in rows} == {"agree"}
    assert agrees(rows)
    words = told(stored, now, [run(t, repeat=i) for i, t in enumerate((0.99, 1.0, 1.02))])
    assert "digests and bytes agree" in words
    assert "within their range 990 ms .. 1.02 s" in words
    assert "outside their range" in told(stored, run(2.0), [run(1.0), run(1.01)])
    assert "one stored run has no interval" in told(stored, now)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("sample_digest", "samples"),
        ("content_digest", "sample contents"),
        ("initial_digest", "initial parameters"),
        ("final_digest", "final parameters"),
        ("buffer_digest", "final buffers"),
        ("wire_bytes_per_step", "bytes sent a step"),
        ("received_bytes_per_step", "bytes received a step"),
    ],
)
def test_each_that_differs_is_told(name, what):
    other = 4097.0 if name.endswith("step") else "zz"
    now = run(**{name: other})
    assert [row.what for row in rows_of(run(), now) if row.verdict == "DIFFER"] == [what]
    assert not agrees(rows_of(run(), now))
    assert f"{what} DIFFER" in told(run(), now)
    assert "nothing that is recorded of the environments explains it" in told(run(), now)


def test_what_old_records_lack_is_no_difference():
    old = run(content_digest="", buffer_digest="")
    assert agrees(rows_of(old, run()))
    assert "not recorded: sample contents, final buffers" in told(old, run())


def test_workers_that_run_ahead_need_not_end_alike():
    stored, now = (run(consistency="async", final_digest=d) for d in ("cc", "zz"))
    assert agrees(rows_of(stored, now))
    assert "under async no two runs need to end" in told(stored, now).replace("\n  ", " ")
    assert not agrees(rows_of(stored, msgspec.structs.replace(now, sample_digest="zz")))


def test_a_backend_is_opened_as_it_was_and_one_of_before_may_be_why():
    opened = "mpi-ring:switch_bytes=65536"
    stored = run(opened_as=opened)
    config, changes = to_run(stored)
    assert config.backend == opened
    assert changes == [f"the backend is opened as it was then: {opened}"]
    now = run(opened_as=opened, wire_bytes_per_step=4097.0)
    words = told(run(), now).replace("\n  ", " ")
    assert f"the backend measures options when opened ({opened} now), and the record does" in words
    assert "measures options" not in told(stored, now)


def test_what_may_be_why_is_told():
    stored = run(environment={"cpu": "X", "torch_threads": 1}, plan_digest="p", link={"a": 1})
    now = run(environment={"cpu": "Y", "torch_threads": 1}, plan_digest="q", final_digest="zz")
    words = told(stored, now)
    assert "the plan is another one, which was made from what the run measured first" in words
    assert "another cpu can round or sum differently" in words
    assert "cpu X then, Y now" in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("aa/bank",), "holds 28 runs; name one as aa/bank:KEY"),
        (("aa/bank:nosuch",), "no cell is 'nosuch'"),
        (("nosuch.json",), "no folder or file 'nosuch.json'"),
        (("aa/aa.json",), "is no testbed.cell/1"),
        (("aa/bank:0", "--json", "no/x.json"), "there is no folder 'no'"),
    ],
)
def test_what_cannot_be_run_again_is_told(words, message, monkeypatch):
    monkeypatch.chdir(ROOT / "runs")
    done = answer("rerun", *words)
    assert (done.status, message in done.err) == (2, True), done.err


def test_a_failed_run_is_not_run_again(tmp_path):
    failed = run(status="failed", error="Traceback\nRankLost: rank 1", command="testbed run --x")
    (tmp_path / "c.json").write_bytes(encode_cell(failed))
    done = answer("rerun", str(tmp_path / "c.json"))
    assert done.status == 2
    assert "the stored run failed (RankLost: rank 1)" in done.err
    assert "to run it anew: testbed run --x" in done.err


@pytest.mark.parametrize(
    ("cell", "json"),
    [
        ("bank/cells/{}.json", "bank/cells/{}.json"),
        ("bank:{}", "bank/cells/../cells/{}.json"),
        ("bank/cells/{}.json", "linked.json"),
        ("bank/cells/{}.json", "bank/sweep.json"),
        ("bank/cells:{}", "bank/sweep.json"),
        ("alone.json", "alone.json"),
        ("bank.tar.gz:{}", "bank.tar.gz"),
    ],
)
def test_a_stored_run_is_not_written_over(cell, json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "runs/aa/bank", "bank")
    stored = min(Path("bank/cells").glob("*.json"))
    shutil.copy(stored, "alone.json")
    Path("linked.json").symlink_to(stored)
    assert answer("pack", "bank").status == 0
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    done = answer("rerun", cell.format(stored.stem), "--json", json.format(stored.stem))
    assert (done.status, "would be replaced" in done.err) == (2, True), done.err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
