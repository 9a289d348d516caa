"""A package of somebody else adds parts of each family without a change to the project."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import testbed as testbed_api
from testbed.base import parts
from testbed.base.axes import SCHEDULERS
from testbed.base.errors import Unavailable
from tests.harness.packages import for_children, install
from tests.harness.rank_agent import Answer, Setup
from tests.harness.rank_pool import Job, RankPool, why_skipped
from tests.harness.runs import answer, testbed

PACKAGE = Path(__file__).parents[1] / "toy_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy package installed."""
    return install(PACKAGE, tmp_path_factory.mktemp("toy"))


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process finds the package, and forgets it afterwards."""
    monkeypatch.syspath_prepend(site)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_plugin"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_list_shows_its_parts() -> None:
    done = answer("list", "--json")
    assert done.status == 0, done.err
    document = json.loads(done.out)
    for family, name in (
        ("backends", "toy-notes"),
        ("schedulers", "toy-doubling"),
        ("compressors", "toy-int8"),
        ("workloads", "toy-line"),
        ("memory", "toy-one-by-one"),
    ):
        found = [part for part in document[family] if part["name"] == name]
        assert [part["available"] for part in found] == [True], document[family]
        assert found[0]["summary"]


def test_run_trains_with_them(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    for_children(site, monkeypatch)
    done = testbed(
        *("run", "--workload", "toy-line:slope=3", "--workers", "2"),
        *("--backend", "toy-notes:patience_s=20", "--steps", "25", "--momentum", "0"),
        *("--json", str(record)),
    )
    assert done.status == 0, done.err
    cell = json.loads(record.read_text())
    assert cell["status"] == "ok"
    assert cell["backend"] == "toy-notes:patience_s=20"
    assert cell["identical_work"] is True
    assert cell["wire_bytes_per_step"] == 2 * 4  # weight and bias, to one other rank
    assert cell["samples"]["loss"][-1] < cell["samples"]["loss"][0] / 10


def test_its_scheduler_and_compressor_train_over_a_backend_of_ours(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "cell.json"
    for_children(site, monkeypatch)
    done = testbed(
        *("run", "--workload", "digits-mlp", "--backend", "gloo"),
        *("--scheduler", "toy-doubling:first=2", "--compressor", "ef+toy-int8"),
        *("--memory", "toy-one-by-one"),
        *("--steps", "20", "--json", str(record)),
    )
    assert done.status == 0, done.err
    cell = json.loads(record.read_text())
    config = cell["config"]
    chosen = (cell["scheduler"], config["compressor"], config["memory"])
    assert chosen == ("toy-doubling:first=2", "ef+toy-int8", "toy-one-by-one")
    assert cell["samples"]["loss"][-1] < cell["samples"]["loss"][0] / 2


@pytest.mark.usefixtures("installed")
def test_its_memory_strategy_is_put_on_the_model_of_a_loop_of_one_s_own() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = testbed_api.distribute(model, optimizer, "gloo", memory="toy-one-by-one")
    session.close()
    assert [group["foreach"] for group in optimizer.param_groups] == [False]


def broken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds an entry point of a scheduler at this path, beside the project's own."""
    theirs = importlib.metadata.EntryPoint("toy-broken", path, SCHEDULERS.group)
    monkeypatch.setattr(
        parts, "entry_points", lambda group: [theirs] if group == SCHEDULERS.group else []
    )
    monkeypatch.syspath_prepend("/nowhere")  # names are looked for anew on another path


@pytest.mark.parametrize("path", ["json:nothing", "json:dumps", "no_such_module_at_all:X"])
def test_a_broken_package_of_somebody_else_hinders_nobody(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(path, monkeypatch)
    assert "wfbp" in SCHEDULERS.which(lambda facts: not facts.needs_profile)
    with pytest.raises(Unavailable, match="toy-broken"):
        SCHEDULERS.resolve("toy-broken")
    rows = answer("list", "schedulers").out.splitlines()
    assert [row for row in rows if "toy-broken" in row and "unavailable" in row]


@pytest.mark.usefixtures("installed")
def test_its_options_are_checked() -> None:
    done = answer("run", "--workload", "toy-line", "--backend", "toy-notes:pace=2")
    assert done.status == 2
    assert "patience_s" in done.err


@pytest.mark.usefixtures("installed")
def test_cases_are_skipped_only_for_what_its_backend_does_not_declare() -> None:
    asked, other = Answer(0, None, "trace back", "cannot fold"), Answer(1, None, "trace back")
    assert why_skipped("toy-notes:patience_s=2", [asked, asked]) == "cannot fold"
    for found in ([asked, other], [asked, None], [asked, Answer(1)], [Answer(0)]):
        assert not why_skipped("toy-notes", found)
    assert not why_skipped("gloo", [asked, asked])


def test_a_rank_tells_that_a_backend_did_not_declare_a_channel() -> None:
    pool = RankPool(Job("loopback", 1, Setup()))
    try:
        (answer,) = pool.answers("tests.contracts.channel_cases:one_channel_does_not_hold_another")
    finally:
        pool.leave()
    assert answer is not None
    assert answer.not_declared.startswith("channel is ")
    assert "NotDeclared" in answer.error


def test_without_it_the_names_are_unknown() -> None:
    done = answer("run", "--workload", "toy-line", "--steps", "1")
    assert done.status == 2
    assert "toy-line" in done.err
