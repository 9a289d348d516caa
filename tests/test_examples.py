"""Every example that is shown is run: in docstrings, in README and docs/, and in examples/."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from testbed.cli import make_app
from testbed.launch.mpirun import find_mpirun, mpirun_command, mpirun_environment
from testbed.launch.processes import base_environment
from tests.harness.packages import for_children, install
from tests.harness.runs import cell_of, testbed

ROOT = Path(__file__).parent.parent
SCHEDULER = ROOT / "examples/third_party_scheduler"
PAGES = [ROOT / "README.md", ROOT / "models/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.append(SCHEDULER / "README.md")


# Run by a process of its own: an example may load MPI, or leave a library's threads.
DOCTESTS = """
import doctest, importlib, json, sys
found = {name: doctest.testmod(importlib.import_module(name)) for name in sys.argv[1:]}
counts = {name: [result.failed, result.attempted] for name, result in found.items()}
print(json.dumps(counts), file=sys.stderr)
"""


def modules() -> Iterator[str]:
    """Names of the modules that hold examples."""
    for folder, package in (("testbed", "testbed"), ("models", "testbed.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            if ">>>" in path.read_text():
                yield ".".join((package, *(p for p in inner if p != "__init__")))


def test_examples_of_docstrings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOCTESTS, *modules()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, list[int]] = json.loads(done.stderr.splitlines()[-1])
    assert not [name for name, (failed, _) in counts.items() if failed], done.stdout
    assert sum(attempted for _, attempted in counts.values()) > 600


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language; "" = those that name none."""
    fenced = re.findall(r"^```(.*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for named, text in fenced if named == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_on_pages_can_be_compiled(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def commands(page: Path) -> list[list[str]]:
    """The `testbed ...` command lines of a page, whatever launches them."""
    found = []
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "testbed" in words:
                after = words[words.index("testbed") + 1 :]
                found.append(after[: after.index("&&")] if "&&" in after else after)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_on_pages_have_only_options_that_exist(page: Path) -> None:
    verbs = get_command(make_app()).commands  # type: ignore[attr-defined]
    wrong = []
    for words in commands(page):
        verb, *rest = words or [""]
        if verb not in verbs:
            wrong.append(f"testbed {shlex.join(words)}: no verb {verb!r}")
            continue
        known = {o for p in verbs[verb].params for o in (*p.opts, *p.secondary_opts)}
        given = rest[: rest.index("--")] if "--" in rest else rest
        wrong += [
            f"testbed {shlex.join(words)}: no option {w}"
            for w in given
            if w.startswith("-") and w.partition("=")[0] not in known | {"--help"}
        ]
    assert not wrong


def run_ranks(size: int, *command: str) -> str:
    """What a script printed that `mpirun` started."""
    launcher = find_mpirun()
    environment = mpirun_environment(launcher, base_environment(), size, 1)
    words = mpirun_command(launcher, size, [sys.executable, *command], None, environment)
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=90, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.mpi
def test_own_loop_learns_on_two_ranks() -> None:
    said = run_ranks(2, str(ROOT / "examples/own_loop.py"), "--steps", "30")
    match = re.search(r"2 ranks over mpi-ring: loss ([\d.]+) -> ([\d.]+)", said)
    assert match is not None, said
    assert float(match[2]) < float(match[1])


def test_own_model_trains(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    workload = f"{ROOT / 'examples/own_model.py'}:build:width=32"
    arguments = ("--backend", "gloo", "--steps", "20", "--json", str(record))
    done = testbed("run", "--workload", workload, *arguments)
    assert done.status == 0, done.err
    assert cell_of(record)["backend"] == "gloo"


def test_why_is_it_slow_tells_causes_and_makes_a_page(tmp_path: Path) -> None:
    folder, script = tmp_path / "results", ROOT / "examples/why_is_it_slow.sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", script, folder, f"{ROOT / 'examples/own_model.py'}:build", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first cause") >= 2
    assert "<script" in (folder / "report.html").read_text()
    assert len(list(folder.glob("cells/*.timeline.json"))) == 2


def test_third_party_scheduler_is_installed_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, record = install(SCHEDULER, tmp_path), tmp_path / "cell.json"
    for_children(site, monkeypatch)
    assert len((site / "when_free.py").read_text().splitlines()) < 60
    monkeypatch.syspath_prepend(site)
    try:
        shown = doctest.testmod(importlib.import_module("when_free"))
    finally:
        sys.modules.pop("when_free", None)
    assert (shown.failed, shown.attempted) == (0, 3)
    done = testbed(
        *("run", "--workload", "digits-mlp", "--backend", "gloo", "--steps", "20"),
        *("--scheduler", "when-free:min_kib=16", "--json", str(record)),
    )
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert (cell["scheduler"], cell["identical_work"]) == ("when-free:min_kib=16", True)
    assert 1 <= cell["num_messages"] <= 2  # of six tensors two have more than 16 KiB


def test_parts_on_the_page_are_those_that_are_tested() -> None:
    page = (ROOT / "docs/adding-a-part.md").read_text()
    package = ROOT / "tests/toy_plugin"
    for name in (
        "pyproject.toml",
        "scheduler.py",
        "compressor.py",
        "backend.py",
        "workload.py",
        "memory.py",
    ):
        assert (package / name).read_text().rstrip("\n") in page, f"{name} differs from the page"
