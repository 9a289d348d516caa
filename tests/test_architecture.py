"""The shape of the house: imports point one way, nothing happens at import, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "testbed").rglob("*.py"), *(ROOT / "models").rglob("*.py")])

# Packages, and what each may import of the project. A package may always import itself. `backends`
# and `control` know nothing of training; `training` knows backends and control by their protocols
# alone; only `commands` and `cli` know everything.
PROTOCOLS = {"backends.protocol", "control.protocol"}
BASE = {"base", "workloads.workload", "workloads.kinds"}
ALLOWED = {
    "base": set(),
    "statistics": BASE,
    "noise": BASE | PROTOCOLS | {"records", "sweeping", "training", "profiling"},
    "prediction": BASE | {"statistics"},
    "scheduling": BASE | {"prediction", "statistics"},
    "records": BASE | {"prediction"},
    "control": BASE,
    "cluster": BASE,
    "compression": BASE,
    # a parameter server merges compressed payloads
    "backends": BASE | {"control", "compression"},
    "models": BASE,
    "training": BASE
    | PROTOCOLS
    | {"records", "statistics", "scheduling", "prediction", "compression"}
    | {"noise.steal_time", "noise.steady"},
    "profiling": BASE
    | PROTOCOLS
    | {"prediction", "statistics", "training", "models", "compression", "noise.steady"}
    | {"noise.steal_time", "noise.steady"},
    "launch": BASE
    | {"control", "backends", "training", "profiling", "records", "statistics"}
    | {"scheduling", "prediction", "workloads", "cluster", "noise"},
    "reporting": BASE | {"records", "statistics", "prediction", "sweeping", "noise"},
    "sweeping": BASE | {"records", "statistics", "backends.protocol", "noise.reruns"},
    "microbench": BASE
    | {"control", "backends", "records", "statistics", "launch", "profiling", "prediction"}
    | {"cluster"},
    "replay": BASE | {"prediction", "models.samples"},
    "workloads": {"base", "models"},
    "adopt": BASE | PROTOCOLS | {"launch", "training", "scheduling", "prediction"},
    "simulation": BASE
    | {"prediction", "scheduling", "compression", "launch", "records", "profiling"},
    "studies": BASE
    | {"compression", "training", "records", "statistics", "sweeping", "workloads"}
    | {"prediction", "scheduling", "cluster"},
    "recipes": BASE | {"sweeping"},
}
EVERYTHING = {"commands", "cli", "__main__", "__init__"}


def place_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "models":
        return "models"
    return parts[1]


def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("testbed."):
            found.append((node.lineno, node.module.removeprefix("testbed.")))
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, name.name.removeprefix("testbed."))
                for name in node.names
                if name.name.startswith("testbed.")
            ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    place = place_of(path)
    if place in EVERYTHING:
        return
    allowed = ALLOWED[place] | {place}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports testbed.{module}"
        for line, module in imports_of(path)
        if module.split(".")[0] not in allowed and ".".join(module.split(".")[:2]) not in allowed
    ]
    assert not wrong


def test_the_dense_way_knows_nothing_of_compressors() -> None:
    paths = list((ROOT / "testbed/training/exchange").glob("*.py"))
    assert len(paths) > 5
    of_training = {
        f"{path.name}:{line} imports testbed.{module}": module
        for path in paths
        for line, module in imports_of(path)
        if module.startswith(("training", "compression"))
    }
    assert [
        words
        for words, module in of_training.items()
        if not module.startswith("training.exchange.") and module != "training.exchange.setup"
    ] == []


def test_every_package_is_installed() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "testbed").rglob("__init__.py")
    }
    assert listed == found | {"testbed.models", "testbed.recipes"}


@pytest.mark.parametrize("module", ["testbed.cli", "testbed.reporting.make"])
def test_no_torch_no_mpi_no_zmq_until_they_are_needed(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'mpi4py.MPI', 'zmq', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_replay_is_checked_without_loading_torch() -> None:
    code = (
        "import sys; from testbed.commands.checks import check_workload; "
        "check_workload('replay:resnet50-v100', 10.0); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_runs_at_import(path: Path) -> None:
    if path.name == "__main__.py":
        return
    tree = ast.parse(path.read_text())
    calls = [
        n.lineno for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
    ]
    assert not calls, f"{path}: statements at module level in lines {calls}"
    globals_ = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert not globals_, f"{path}: global in lines {globals_}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_hold_one_idea(path: Path) -> None:
    limit = 420 if path.name == "session.py" else 400  # its states are about to be parted
    assert len(path.read_text().splitlines()) <= limit
