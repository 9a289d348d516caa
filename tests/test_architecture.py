"""The shape of the house: imports point one way, nothing happens at import, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from testbed.base.axes import AXES
from tests.harness.source_tree import (
    ROOT,
    Source,
    circles,
    code_lines,
    heavy_modules,
    is_heavy,
    names,
    sources,
)

MAX_FILES = 310
MAX_CODE_LINES = 27_451
MAX_LINES_OF_FILE = 400

# Packages, and what each may import of the project. A package may always import itself. `backends`
# and `control` know nothing of training; `training` knows backends and control by their protocols
# alone; only `commands` and `cli` know everything.
PROTOCOLS = {"backends.protocol", "control.protocol"}
BASE = {"base", "workloads.workload", "workloads.user_file"}
ALLOWED = {
    "base": set(),
    "forking": set(),
    "statistics": BASE,
    "noise": BASE | {"records"},
    "prediction": BASE | {"statistics"},
    "scheduling": BASE | {"prediction", "statistics"},
    "records": BASE | {"prediction"},
    "control": BASE,
    "cluster": BASE,
    "compression": BASE,
    "memory": BASE,
    # a parameter server merges compressed payloads
    "backends": BASE | {"control", "compression", "forking"},
    "workloads": {"base"},
    "models": {"base", "workloads"},
    "training": BASE
    | PROTOCOLS
    | {"records", "statistics", "scheduling", "prediction", "compression"}
    | {"noise"},
    "profiling": BASE
    | PROTOCOLS
    | {"prediction", "statistics", "training", "models", "compression", "noise"},
    "noise.rehearsal": BASE | PROTOCOLS | {"noise", "training", "profiling"},
    "launch": BASE
    | {"control", "backends", "training", "profiling", "records", "statistics"}
    | {"scheduling", "prediction", "workloads", "cluster", "noise", "forking"}
    | {"compression.protocol"},
    "reporting": BASE | {"records", "statistics", "prediction", "sweeping", "noise"},
    "sweeping": BASE | {"records", "statistics", "backends.protocol", "noise", "forking"},
    "microbench": BASE
    | {"control", "backends", "records", "statistics", "launch", "profiling", "prediction"}
    | {"cluster"},
    "replay": BASE | {"prediction", "workloads.samples"},
    "adopt": BASE | PROTOCOLS | {"launch", "training", "scheduling", "prediction"},
    "simulation": BASE
    | {"prediction", "scheduling", "compression", "launch", "records", "profiling"},
    "studies": BASE
    | {"compression", "training", "records", "statistics", "sweeping", "workloads"}
    | {"prediction", "scheduling", "cluster"},
    "recipes": BASE | {"sweeping"},
}
EVERYTHING = {"commands", "cli", "__main__", "__init__"}

# Modules that import inside functions, and why. What they import there loads a heavy library;
# nothing else is imported inside a function.
NO_TORCH = "the command line answers without torch"
ONLY_WHEN_OPENED = "a kind is found and asked without its library; what opens it loads that"
OPTIONAL = "an optional dependency, or one that only some workloads need"
LAZY = {
    "testbed.backends.mpi": ONLY_WHEN_OPENED,
    "testbed.backends.none": ONLY_WHEN_OPENED,
    "testbed.backends.torch_groups": ONLY_WHEN_OPENED,
    "testbed.backends.zmq_ps": ONLY_WHEN_OPENED,
    "testbed.commands.checks": NO_TORCH,
    "testbed.commands.comm": NO_TORCH,
    "testbed.commands.comm_fit": NO_TORCH,
    "testbed.commands.profile": NO_TORCH,
    "testbed.commands.run": NO_TORCH,
    "testbed.compression.none": NO_TORCH,
    "testbed.launch.join": "the command line resolves backends here; only ranks load torch and MPI",
    "testbed.launch.rendezvous": "MPI and torch are loaded only where ranks meet by their means",
    "testbed.models.digits": OPTIONAL,
    "testbed.models.image_folder": OPTIONAL,
    "testbed.models.transformer": OPTIONAL,
    "testbed.prediction.fit": "scipy takes longer to load than most commands take",
    "testbed.profiling.shipped": OPTIONAL,
    "testbed.replay.kind": "a trace is checked without torch",
    "testbed.simulation": NO_TORCH,
    "testbed.workloads.user_file": NO_TORCH,
}


def of_project(target: str) -> str | None:
    """`a.b` for testbed.a.b, None for other libraries."""
    head, _, rest = target.partition(".")
    return rest if head == "testbed" and rest else None


def at(source: Source, line: int) -> str:
    return f"{source.short}:{line}"


def test_imports_point_one_way() -> None:
    wrong = []
    for source in sources().values():
        if source.place in EVERYTHING:
            continue
        allowed = ALLOWED[source.place] | {source.place}
        for found in source.imports:
            module = of_project(found.target)
            if module is not None and not {
                module.split(".")[0],
                ".".join(module.split(".")[:2]),
            } & set(allowed):
                wrong.append(f"{at(source, found.line)} imports testbed.{module}")
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    """Whatever is imported counts, inside a function or for type checkers alone as well."""
    graph = {
        name: {i.target for i in source.imports if i.target in names() and i.target != name}
        for name, source in sources().items()
    }
    assert sum(len(targets) for targets in graph.values()) > 1000
    assert circles(graph) == []


def test_no_package_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for source in sources().values():
        into = graph.setdefault(source.place, set())
        for found in source.imports:
            if found.target in names() and sources()[found.target].place != source.place:
                into.add(sources()[found.target].place)
    del graph["__init__"]  # exports what packages offer
    assert circles(graph) == []


def test_the_picture_shows_which_way_imports_point() -> None:
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    rows = [re.split(r"\s{2,}", line)[0].split(", ") for line in picture.strip().splitlines()]
    row_of = {package: row for row, packages in enumerate(rows) for package in packages}
    assert row_of.keys() == ALLOWED.keys() | {"commands", "cli"}
    for package, allowed in ALLOWED.items():
        for other in {name.split(".")[0] for name in allowed} - {package}:
            assert row_of[other] < row_of[package], f"{package} may import {other}"


def test_the_dense_way_knows_nothing_of_compressors() -> None:
    inside = [s for name, s in sources().items() if name.startswith("testbed.training.exchange.")]
    assert len(inside) > 5
    wrong = [
        f"{at(source, found.line)} imports {found.target}"
        for source in inside
        for found in source.imports
        if found.target.startswith(("testbed.training", "testbed.compression"))
        and not found.target.startswith("testbed.training.exchange.")
    ]
    assert wrong == []


def test_only_what_is_listed_imports_inside_functions() -> None:
    heavy = heavy_modules()
    assert "testbed.training.session" in heavy
    assert "testbed.base.config" not in heavy
    wrong, used = [], set()
    for name, source in sources().items():
        for found in source.imports:
            if not found.lazy:
                continue
            used.add(name)
            where = f"{at(source, found.line)} imports {found.target} inside a function"
            if name not in LAZY:
                wrong.append(f"{where}; import it at the top, or list {name} with the reason")
            elif not is_heavy(found.target, heavy):
                wrong.append(f"{where}, though it loads nothing heavy; import it at the top")
    assert wrong == []
    assert sorted(LAZY.keys() - used) == []


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
        "import sys; from testbed.base.config import RunConfig; "
        "from testbed.launch.plan_options import parts_of; "
        "parts_of(RunConfig(workload='replay:resnet50-v100')); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# Words that name no part where they are compared: the other side is a setting of its own.
OTHER_WORDS = {
    "precision": {"fp16", "bf16"},  # of `RunConfig`, not the compressor
    "awake": {"auto"},  # of an emulated cluster
}
# Modules of which a part is the subject: where parts live, and tables about named ones.
ABOUT_PARTS = {
    "testbed.base.axes": "the table itself",
    "testbed.base.spec": "`none` of an option stands for None",
    "testbed.profiling.shipped": "builds the published models behind the shipped traces",
}
ROOMS_OF_PARTS = {
    "backends",
    "scheduling",
    "compression",
    "memory",
    "models",
    "replay",
    "studies",
    "recipes",
}


def test_no_generic_module_knows_a_part() -> None:
    wrong = [
        f"{at(source, line)} {what}"
        for name, source in sources().items()
        if name not in ABOUT_PARTS and ROOMS_OF_PARTS.isdisjoint(name.split(".")[1:2])
        for line, what in parts_known_to(source.tree)
    ]
    assert not wrong, "\n".join(wrong)


def parts_known_to(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of modules that hold a part, and comparisons with a registered name."""
    paths = [path for axis in AXES for path in axis.builtin.values()]
    modules = {path.partition(":")[0] for path in paths}
    known = {name for axis in AXES for name in axis.builtin}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield node.lineno, f"imports {node.module}"
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"imports {a.name}") for a in node.names if a.name in modules)
        if isinstance(node, ast.Compare):
            subject = getattr(node.left, "attr", "")
            words = {w for side in node.comparators for w in literals(side)} & known
            if words - OTHER_WORDS.get(subject, set()):
                yield node.lineno, f"compares: {ast.unparse(node)}"
        if isinstance(node, ast.match_case) and literals(node.pattern) & known:
            yield node.pattern.lineno, f"compares: {ast.unparse(node.pattern)}"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "get"):
            words = {w for side in node.args[:1] for w in literals(side)} & known
            if words:
                yield node.lineno, f"asks for: {ast.unparse(node)}"


def literals(tree: ast.AST) -> set[object]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}


@pytest.mark.parametrize(
    "code",
    [
        "from testbed.backends.zmq_ps import ZMQ_PS",
        "import testbed.scheduling.dear",
        "spec.name == 'mpi-ring'",
        "name in ('gloo', 'nccl')",
        "scheduler.startswith('sequential')",
        "match name:\n  case 'topk': pass",
        "config.precision == 'topk'",
    ],
)
def test_a_module_that_knows_a_part_is_found(code: str) -> None:
    assert list(parts_known_to(ast.parse(code)))


def test_nothing_runs_at_import() -> None:
    wrong = [
        f"{at(source, node.lineno)} calls at module level"
        for source in sources().values()
        if source.path.name != "__main__.py"
        for node in source.tree.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    assert wrong == []


def test_no_function_changes_a_global() -> None:
    wrong = [
        f"{at(source, node.lineno)} has a global"
        for source in sources().values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert wrong == []


def test_files_hold_one_idea() -> None:
    lengths = {s.short: len(s.text.splitlines()) for s in sources().values()}
    assert {p: n for p, n in lengths.items() if n > MAX_LINES_OF_FILE} == {}


def test_there_is_no_more_to_hold_than_before() -> None:
    """Files and lines of code, counted without blank lines, comments and docstrings."""
    assert len(sources()) <= MAX_FILES
    assert sum(map(code_lines, sources().values())) <= MAX_CODE_LINES
