"""`testbed sweep` and `testbed report` as a user types them."""

import csv
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.base.config import RunConfig
from testbed.base.errors import Unavailable, UsageError
from testbed.cli import make_app
from testbed.records.store import Store
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, make_plan

BACKEND, SCHEDULER = re.compile(r"--backend (\S+)"), re.compile(r"--scheduler (\S+)")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments, status=0):
    result = CliRunner().invoke(make_app(), [str(a) for a in arguments])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_dry_run_prints_every_command_and_makes_nothing(tmp_path):
    said = invoke("sweep", "quick", "--dry-run", "--backend", "none,gloo", "--seed", "1,2")
    commands = [line for line in said.splitlines() if line.startswith("testbed run ")]
    assert len(commands) == 8
    assert sum("--seed 2" in line for line in commands) == 4
    assert not list(tmp_path.iterdir())


def test_an_array_s_script_shares_the_runs_and_can_be_written_anew(tmp_path):
    axes = ["--backend", "none,zmq-ps:servers=dedicated:2", "--workers", "2,4", "--name", "50 %"]
    words = [*axes, "--submit", "slurm", "--output", "my folder"]
    (line,) = invoke("sweep", *words, "--cell-timeout", "9").splitlines()
    script = tmp_path / "my folder" / "array.sbatch"
    assert shlex.split(line) == ["sbatch", str(script)]
    text = script.read_text()
    assert text.startswith("#!/bin/sh\n")
    given = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    options = dict("".join(shlex.split(option)).split("=", 1) for option in given if "=" in option)
    assert (options["array"], options["ntasks"], options["chdir"]) == ("0-3", "6", str(tmp_path))
    assert options["job-name"] == "testbed-50 %"
    assert options["output"] == f"{tmp_path}/my folder/task-%a.log"
    command = f"--resume '{tmp_path}/my folder' --cell-timeout 9.0 --share \"$SLURM_ARRAY_TASK_ID\""
    assert text.endswith(f"{command}\n")
    invoke("sweep", "--resume", "my folder", "--submit", "slurm", "--tasks", "12")
    assert "--array=0-11" in script.read_text()
    assert Store(script.parent).read_plan().tasks == 12


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["quick", "--submit", "pbs"], "--submit is 'pbs'; expected slurm"),
        (["quick", "--tasks", "2"], "are for --submit slurm"),
        (["quick", "--go"], "are for --submit slurm"),
        (["quick", "--share", "0"], "sweep --resume FOLDER --share NUMBER"),
        (["quick", "--submit", "slurm", "--tasks", "11"], r"--tasks is 11; expected 1 \.\. 10"),
    ],
)
def test_what_an_array_cannot_have_is_told(words, reason, tmp_path):
    with pytest.raises(UsageError, match=reason):
        invoke("sweep", *words)
    assert not list(tmp_path.iterdir())


def test_without_sbatch_the_script_is_written_and_the_rest_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["quick", "--submit", "slurm", "--go", "--output", "here"]
    result = CliRunner().invoke(make_app(), ["sweep", *words])
    assert isinstance(result.exception, Unavailable)
    assert (tmp_path / "here" / "array.sbatch").is_file()


def test_schedulers_are_an_axis_whose_options_stay_with_them():
    axes = ["--backend", "gloo", "--scheduler", "wfbp,bucket:mib=4,dear", "--repeats", "1"]
    said = invoke("sweep", *axes, "--dry-run")
    commands = [line for line in said.splitlines() if line.startswith("testbed run ")]
    found = {line.partition("--scheduler ")[2].partition(" ")[0] for line in commands}
    assert {"bucket:mib=4", "dear"} <= found
    assert len(commands) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"nothing to sweep; give a recipe \(backends, .*, quick, .*, paper-shapes, .*\)"),
        (["nosuch"], "no recipe 'nosuch'"),
        (["no.toml"], "no file no.toml"),
        (["quick", "folder"], "one word too many"),
        (["quick", "--workers", "0,two"], "--workers is '0,two'"),
        (["quick", "--workers", "0"], "5 combination"),
        (["quick", "--repeats", "0"], "repeats is 0"),
        (["quick", "--max-again", "-1"], "max_again is -1; expected a number of runs"),
        (["quick", "--again-within-min", "0"], "again_within_min is 0.0; expected minutes"),
        (["quick", "--scheduler", "dear,wfpb"], "schedulers that cannot be run:\n  wfpb: .*wfbp"),
        (["quick", "--compressor", "topk:rato=0.1"], "compressors that cannot be run"),
        (["--backend", "ddp", "--compressor", "topk"], "exchanges gradients by itself"),
        (["--backend", "ddp", "--scheduler", "dear"], "schedules by itself"),
        (["--compressor", "by-size+dgc"], "leave by-size out"),
        (["--compressor", "warmup+qsgd"], "warmup needs a compressor with a ratio"),
        (["--backend", "zmq-ps:update=server", "--clip-norm", "1"], "use update=worker"),
        (["--resume"], "nothing to resume"),
        (["--resume", "no/folder"], "there is no no/folder; give the folder of a sweep"),
        (["--resume", "nosuch"], "no recipe 'nosuch'"),
        (["quick", "--resume", "folder"], "no sweep was begun there"),
        (["quick", "--hostfile", "nosuch"], "--hostfile is nosuch: No such file"),
    ],
)
def test_sweep_says_what_was_asked_for_wrongly(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        invoke("sweep", *arguments)
    assert not list(tmp_path.iterdir())


def test_combinations_that_cannot_be_are_told_once_with_the_reason_and_left_out():
    axes = ["--backend", "gloo,ddp", "--scheduler", "wfbp,bucket,dear", "--workers", "2,4"]
    said = invoke("sweep", *axes, "--repeats", "2", "--dry-run")
    commands = [line for line in said.splitlines() if line.startswith("testbed run ")]
    ran = {(BACKEND.search(c)[1], (SCHEDULER.search(c) or ["", "wfbp"])[1]) for c in commands}
    assert ran == {("gloo", "wfbp"), ("gloo", "bucket"), ("gloo", "dear"), ("ddp", "wfbp")}
    assert len(commands) == 2 * 2 * 4
    told = said.split("left out:")[1].split("sweep:")[0].strip().splitlines()
    assert "4 of 12 cells cannot be" in said
    assert len(told) == 1  # one reason, which is said once
    assert "backend 'ddp' schedules by itself" in told[0]
    for scheduler in ("bucket", "dear"):
        for workers in (2, 4):
            assert f"digits-cnn, ddp, {scheduler}, {workers} workers" in told[0]


def test_what_a_users_own_file_surely_lacks_is_told_before_anything_runs():
    Path("mine.py").write_text("def build(width: int = 3): ...\nraise RuntimeError('run')\n")
    said = invoke("sweep", "--workload", "mine.py:build:width=4", "--backend", "gloo", "--dry-run")
    assert "--workload mine.py:build:width=4" in said
    long = f"{'a' * 300}.py"
    own = f"mine.py:build:widht=4,mine.py:buidl,no.py:build,{long}:build,digits-mlp"
    with pytest.raises(UsageError, match="workloads that cannot be run") as caught:
        invoke("sweep", "--workload", own, "--backend", "gloo", "--dry-run")
    for told in (
        "'mine.py:build' has no option 'widht'; known options: width; did you mean 'width'?",
        "'mine.py' has no function 'buidl'; it has: build; did you mean 'build'?",
        "there is no file 'no.py'",
        "whose file cannot be read (File name too long)",
    ):
        assert told in str(caught.value)


def test_a_sweep_that_has_begun_goes_on_though_the_users_file_has_changed():
    Path("mine.py").write_text("def build(width: int = 3): ...\n")
    words = ["sweep", "--workload", "mine.py:build:width=4", "--backend", "gloo", "--repeats", "1"]
    invoke(*words, "--output", "begun", "--submit", "slurm", "--tasks", "1")
    Path("mine.py").write_text("def build(other: int = 3): ...\n")
    assert "mine.py:build:width=4" in invoke(*words, "--resume", "--output", "begun", "--dry-run")


def test_cells_that_a_cluster_has_no_place_for_are_left_out():
    backends = "mpi-ring,zmq-ps:servers=dedicated:1,loopback"
    said = invoke("sweep", "--backend", backends, "--cluster", "nodes=2,rate=1gbit", "--dry-run")
    commands = [line for line in said.splitlines() if line.startswith("testbed run ")]
    assert {BACKEND.search(c)[1] for c in commands} == {"mpi-ring"}
    assert "2 workers and 1 dedicated servers need 3 places" in said
    assert "joins threads of one process" in said


def test_resume_refuses_another_grid(tmp_path):
    begin(make_plan(Sweep("mine", (RunConfig(),), repeats=1)), tmp_path / "mine")
    with pytest.raises(UsageError, match="was begun with other cells"):
        invoke("sweep", "--backend", "gloo", "--resume", tmp_path / "mine")


def test_resume_takes_its_folder_in_either_place(tmp_path):
    begin(make_plan(Sweep("mine", (RunConfig(backend="gloo"),), repeats=1)), tmp_path / "mine")
    for words in (["--resume", "mine"], ["--resume", "--output", "mine"], ["mine", "--resume"]):
        assert "--backend gloo" in invoke("sweep", *words, "--dry-run")


def test_how_many_may_run_again_is_decided_anew_on_resume(tmp_path):
    sweep = Sweep("mine", (RunConfig(workers=1, backend="none"),), repeats=1)
    store = begin(make_plan(sweep), tmp_path / "mine")
    slurm = ("--submit", "slurm")  # writes the plan and runs nothing
    invoke("sweep", "--resume", store.path, "--max-again", "4", *slurm)
    assert store.read_plan().max_again == 4
    invoke("sweep", "--resume", store.path, "--again-within-min", "9", *slurm)
    assert (store.read_plan().max_again, store.read_plan().again_within_min) == (4, 9.0)


def test_a_plan_is_not_written_while_a_sweep_is_at_work(tmp_path):
    sweep = Sweep("mine", (RunConfig(workers=1, backend="none"),), repeats=1)
    store = begin(make_plan(sweep), tmp_path / "mine")
    again = ("sweep", "--resume", store.path, "--max-again", "4", "--submit", "slurm")
    for share in (0, None):
        with store.locked(share), pytest.raises(UsageError, match="another sweep is at work in"):
            invoke(*again)
    assert store.read_plan().max_again == 0


def test_hostfile_and_interface_reach_every_cell(tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=2\n")
    where = ("--hostfile", "hosts", "--interface", "ib0")
    said = invoke("sweep", "--backend", "gloo", *where, "--dry-run")
    assert said.count("--hostfile hostfile --interface ib0") == 3
    with pytest.raises(UsageError, match="--interface is 'ib0' beside --cluster"):
        invoke("sweep", "--cluster", "nodes=2", "--interface", "ib0", "--dry-run")
    with pytest.raises(UsageError, match="host is 'h1 slots=2' beside --cluster"):
        invoke("sweep", "--cluster", "nodes=2", "--hostfile", "hosts", "--dry-run")
    begun = begin(make_plan(Sweep("mine", (RunConfig(cluster="nodes=2"),))), tmp_path / "mine")
    with pytest.raises(UsageError, match="host is 'h1 slots=2' beside --cluster"):
        invoke("sweep", "--resume", begun.path, "--hostfile", "hosts")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--interface", "ib0"), "no cells for interface"),
        (("there",), "no cells for a second word"),
        (("--cell-timeout", "5", "--go"), "no cells for go, cell-timeout"),
    ],
)
def test_a_study_refuses_what_it_has_no_cells_for(given, told):
    with pytest.raises(UsageError, match=told):
        invoke("sweep", "accuracy-compressed", *given)


def test_a_report_of_runs_that_are_yet_to_come_is_refused():
    with pytest.raises(UsageError, match="--json with --submit"):
        invoke("sweep", "quick", "--submit", "slurm", "--json", "out.json")


def test_a_real_sweep_with_a_failed_cell_and_its_report(tmp_path):
    axes = ["--backend", "loopback", "--workers", "2", "--repeats", "1"]
    said = invoke("sweep", *axes, "--steps", "8", "--output", "one", "--json", "one.json")
    assert "digits-cnn, 2 workers" in said
    (cell,) = json.loads((tmp_path / "one.json").read_text())["cells"]
    assert cell["status"] == "ok"
    assert cell["step_time_low_s"] is cell["step_time_high_s"] is None  # of one run
    assert cell["step_time_p5_s"] <= cell["step_time_s"] <= cell["step_time_p95_s"]
    (row,) = csv.DictReader(io.StringIO(invoke("report", "one", "--format", "csv")))
    assert float(row["step_time_s"]) == cell["step_time_s"]
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "one" / "cells").iterdir()}
    assert "1 of 1 runs are there already" in invoke("sweep", "--resume", "one")
    assert before == {f: f.stat().st_mtime_ns for f in (tmp_path / "one" / "cells").iterdir()}
    # More samples a step than there are: known only when the workload has been built.
    invoke("sweep", *axes, "--batch-size", "5000", "--output", "two", status=1)
    said = invoke("report", "one", "two", "--format", "md")
    assert "- loopback: failed: " in said
    assert "--batch-size" in said
