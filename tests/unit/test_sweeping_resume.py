"""A sweep that goes on: what it takes, on which hosts, beside whose runs, with which links."""

import io
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import save_link
from testbed.base.link import Link
from testbed.cli import make_app
from testbed.records.cell import Cell
from testbed.records.environment import describe_environment
from testbed.records.forecast import link_digest, load_forecast
from testbed.sweeping.grid import Sweep
from testbed.sweeping.recipe import load_toml
from testbed.sweeping.run import begin, carry_out, make_plan, process_runner
from testbed.sweeping.study import study_store
from tests.harness.runs import answer
from tests.unit.test_sweeping_store import finish_at_once

SWEEP = Sweep("mine", tuple(RunConfig(backend="gloo", workers=w) for w in (2, 4)), repeats=1)
LINK = Link(backend="gloo", num_workers=4, latency_s=1e-3, seconds_per_byte=1.3e-9)
SLOWER = msgspec.structs.replace(LINK, latency_s=2e-3)
BEFORE = "h1 slots=2\n"
NOW = {"hosts": (("h3", 2), ("h4", 2))}  # as `testbed.cli` tells what a launcher gave


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments, obj=None):
    result = CliRunner().invoke(make_app(), [str(a) for a in arguments], obj=obj)
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def begun(sweep=SWEEP, **changes):
    return begin(msgspec.structs.replace(make_plan(sweep), **changes), Path("mine"))


def finish(store, *environments, cluster=None):
    """Finished cells of the first runs, made in these environments."""
    for (key, config), made_in in zip(store.read_plan().runs(), environments, strict=False):
        cell = Cell(
            backend=config.backend,
            workload=config.workload,
            num_workers=config.workers,
            step_time_s=0.1,
            environment=made_in,
            cluster=cluster,
            config=config,
        )
        store.write_cell(key, cell)


def go_on(store):
    """What is told, line by line, while cells take no time."""
    out = io.StringIO()
    assert carry_out(store, finish_at_once, out) == 0
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "5"], "--repeats 5 beside --resume"),
        (["--order-seed", "2", "--tune", "trials=9"], "--order-seed 2 --tune trials=9 beside"),
        (["--timeline"], "--timeline, but the sweep in mine was begun without"),
        (["--name", "other"], "--name is other, but mine holds mine"),
        (["--output", "there"], "2 folders to go on in: mine and there"),
        (["--hostfile", "nosuch"], "--hostfile is nosuch: No such file"),
        (["--hostfile", "empty"], "--hostfile is empty, which is empty"),
    ],
)
def test_what_resume_does_not_take_is_refused_by_name(words, message):
    begun()
    Path("empty").write_text("\n")
    with pytest.raises(UsageError, match=message):
        invoke("sweep", "--resume", "mine", *words, "--dry-run")


def test_what_says_the_same_as_the_sweep_that_was_begun_is_taken():
    begun(timeline=True)
    axes = ["--backend", "gloo", "--workers", "2,4", "--repeats", "1", "--name", "mine"]
    said = invoke("sweep", *axes, "--timeline", "--resume", "mine", "--dry-run")
    assert said.count("testbed run ") == said.count("--timeline") == 2


def test_a_dry_run_changes_nothing():
    store = begun()
    plan = store.read_plan()
    Path("now").write_text("h2 slots=4\n")
    with pytest.raises(UsageError, match="--interface is 'ib0', but the sweep was begun with none"):
        invoke("sweep", "--resume", "mine", "--interface", "ib0")
    anew = ("--max-again", "4", "--hostfile", "now", "--interface", "ib0")
    said = invoke("sweep", "--resume", "mine", *anew, "--dry-run")
    assert said.count("--hostfile hostfile --interface ib0") == 2
    assert store.read_plan() == plan
    assert not store.hostfile.exists()


@pytest.mark.parametrize(
    ("words", "hosts"),
    [(["--hostfile", "now"], "h2 slots=4\n"), ([], "h3 slots=2\nh4 slots=2\n")],
    ids=["the user's", "the launcher's"],
)
def test_hosts_of_now_replace_those_of_before(words, hosts):
    store = begun(hostfile=BEFORE)
    finish(store, {}, {})
    Path("now").write_text("h2 slots=4\n")
    own = ("--interface", "ib0") if words else ()
    invoke("sweep", "--resume", "mine", *words, *own, obj=NOW)
    assert store.read_plan().hostfile == store.hostfile.read_text() == hosts
    assert store.read_plan().interface == ("ib0" if words else "")
    with process_runner(store) as runner:
        command = runner.command(store.read_plan().cells[0], Path("c.json"))
    assert ("--interface" in command) == bool(words)


def test_hosts_are_not_replaced_while_a_sweep_is_at_work():
    store = begun(hostfile=BEFORE)
    with store.locked(), pytest.raises(UsageError, match="another sweep is at work in"):
        invoke("sweep", "--resume", "mine", obj=NOW)
    assert store.read_plan().hostfile == store.hostfile.read_text() == BEFORE


def test_a_launcher_on_one_machine_does_not_go_on_with_hosts_of_another_allocation():
    begun(hostfile=BEFORE)
    Path("now").write_text("h2 slots=4\n")
    words = ("sweep", "--resume", "mine", "--dry-run")
    with pytest.raises(UsageError, match="tells of none but this one; say with --hostfile"):
        invoke(*words, obj={"hosts": ()})
    assert "--hostfile hostfile" in invoke(*words, "--hostfile", "now", obj={"hosts": ()})
    assert "--hostfile hostfile" in invoke(*words)


def test_tasks_of_an_array_take_no_hosts():
    begun(tasks=2)
    with pytest.raises(UsageError, match="for a sweep that --submit shared out"):
        invoke("sweep", "--resume", "mine", "--dry-run", obj=NOW)


def test_a_report_that_cannot_be_written_is_told_before_the_first_cell(tmp_path):
    axes = ["--backend", "none", "--workers", "1", "--steps", "4", "--output", "one"]
    with pytest.raises(UsageError, match=r"--json is 'no/one\.json', but there is no folder 'no'"):
        invoke("sweep", *axes, "--json", "no/one.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("json", ["runs/one/report.json", "runs/report.json"])
def test_a_report_may_go_where_the_sweep_makes_folders(json):
    axes = ["--backend", "none", "--workers", "1", "--output", "runs/one"]
    assert "testbed run " in invoke("sweep", *axes, "--json", json, "--dry-run")


FOUR = Sweep("mine", tuple(RunConfig(workers=w) for w in (1, 2, 3, 4)), repeats=1)


def test_runs_of_another_commit_are_told_before_the_first_cell():
    store, here = begun(FOUR), describe_environment()
    other = {**here, "commit": "a630c3"}
    finish(store, here, other, other)
    where = here["platform"]
    assert go_on(store)[0] == (
        f"3 of 4 runs are there already, 2 made by commit a630c3 on {where}; this is commit "
        f"{here['commit'] or 'unknown'} on {where}: a report names both"
    )
    assert go_on(store) == ["4 of 4 runs are there already"]  # none is measured beside them


@pytest.mark.parametrize(
    ("changes", "told"),
    [({}, True), ({"hostfile": BEFORE}, False)],
    ids=["on this machine", "on other hosts, whose platform is not this one's"],
)
def test_runs_of_another_platform_are_told_where_cells_run_on_this_one(changes, told):
    store = begun(FOUR, **changes)
    finish(store, {**describe_environment(), "platform": "Linux-1.0"})
    assert ("on Linux-1.0; this is commit" in go_on(store)[0]) == told


def test_runs_of_another_library_processor_or_variable_are_told(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    store, here = begun(FOUR), describe_environment()
    other = {"versions": {**here["versions"], "torch": "0.1"}, "cpu": "X", "variables": {}}
    finish(store, {**here, **other})
    told = go_on(store)[0]
    made_by, this = told.split("; this is ")
    assert "1 made by commit" in made_by
    assert made_by.endswith("with cpu X and torch 0.1")
    assert f"cpu {here['cpu']} and torch {here['versions']['torch']} and " in this
    assert " OMP_DYNAMIC true" in this  # beside what other tests have set


def test_of_runs_made_alike_nothing_is_told():
    store, here = begun(FOUR), describe_environment()
    own = {"OMP_NUM_THREADS": "1", "OMPI_MCA_num_procs": "2", **here["variables"]}
    finish(store, here, {**here, "variables": own, "torch_threads": 1, "device": "cpu"})
    assert go_on(store)[0] == "2 of 4 runs are there already"


def test_variables_that_an_emulated_cluster_sets_are_not_told(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl", "^ofi")
    here = describe_environment()
    emulated = {**here["variables"], "OMPI_MCA_btl": "tcp,self"}
    for place, (cluster, alike) in enumerate([({"spec": "nodes=2"}, True), (None, False)]):
        store = begin(make_plan(FOUR), Path(f"mine{place}"))
        finish(store, {**here, "variables": emulated}, cluster=cluster)
        assert (go_on(store)[0] == "1 of 4 runs are there already") == alike


def linked():
    """A sweep with a link from a file, nominal numbers, a file that is not there, and no link."""
    save_link(LINK, "link.json")
    links = ("link.json", "rate=10gbit,latency=50us", "no.json", None)
    return Sweep("mine", tuple(RunConfig(link=link) for link in links), repeats=1)


def test_a_plan_holds_the_digests_of_link_files():
    sweep = linked()
    digests = {"link.json": link_digest(LINK)}
    assert begun(sweep).read_plan().links == digests
    assert study_store(Path("study"), sweep).read_plan().links == digests


def test_a_plan_and_a_forecast_have_the_same_digests():
    save_link(LINK, "link.json")
    cell = RunConfig(
        workload="replay:resnet50-v100",
        backend="gloo",
        workers=4,
        cluster="nodes=4,rate=10gbit,dilation=10",
        link="link.json",
        predict=True,
    )
    names = ("workload", "backend", "cluster", "link")
    lines = [f'{name} = "{getattr(cell, name)}"' for name in names]
    Path("my.toml").write_text("\n".join(["[base]", *lines, "workers = 4", "predict = true"]))
    done = answer("forecast", "my.toml", "-o", "forecast.json")
    assert done.status == 0, done.err
    sweep = load_toml(Path("my.toml"))
    assert sweep.cells == (cell,)
    assert begun(sweep).read_plan().links == load_forecast(Path("forecast.json")).links != {}


def test_a_link_file_that_has_changed_is_refused_until_it_is_back():
    store = begun(linked())
    save_link(SLOWER, "link.json")
    both = f"{link_digest(LINK)} when the sweep in mine began, and has {link_digest(SLOWER)} now"
    with pytest.raises(UsageError, match=f"link link.json had the digest {both}; put that file"):
        go_on(store)
    Path("link.json").unlink()
    with pytest.raises(UsageError, match="and cannot be read from here now"):
        go_on(store)
    assert store.finished() == set()
    save_link(LINK, "link.json")
    go_on(store)
    assert len(store.finished()) == 4


def test_a_link_file_that_says_the_same_in_another_layout_is_the_same():
    store = begun(linked())
    file = Path("link.json")
    before = file.read_bytes()
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(before)))
    assert file.read_bytes() != before
    go_on(store)


def test_links_of_older_sweeps_and_of_finished_ones_are_not_asked_for():
    store = begun(linked())
    plan = store.read_plan()
    store.write_plan(msgspec.structs.replace(plan, links={}))
    save_link(SLOWER, "link.json")
    go_on(store)
    store.write_plan(plan)
    assert go_on(store) == ["4 of 4 runs are there already"]
