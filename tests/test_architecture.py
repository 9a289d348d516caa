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

MAX_FILES = 411
MAX_CODE_LINES = 47_707
MAX_LINES_OF_FILE = 400

# Packages, and what each may import of the project. A package may always import itself. `backends`
# and `control` know nothing of training; `training` knows backends and control by their protocols
# alone; only `commands` and `cli` know everything.
PROTOCOLS = {"backends.protocol", "control.protocol"}
BASE = {"base", "workloads.workload", "workloads.user_file"}
ALLOWED = {
    "base": set(),
    "forking": {"base.folders"},
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
    | {"noise", "memory"},
    "profiling": BASE
    | PROTOCOLS
    | {"prediction", "statistics", "training", "models", "compression", "noise"},
    "noise.rehearsal": BASE | PROTOCOLS | {"noise", "training", "profiling"},
    "launch": BASE
    | {"control", "backends", "training", "profiling", "records", "statistics"}
    | {"scheduling", "prediction", "workloads", "cluster", "noise", "forking"}
    | {"compression.protocol", "memory"},
    "reporting": BASE | {"records", "statistics", "prediction", "sweeping", "noise"},
    "causes": BASE | {"records", "prediction", "scheduling", "noise"},
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
    | {"prediction", "scheduling", "cluster", "memory"}
    | {"launch", "profiling", "reporting"},
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
    "testbed.commands.forecast": NO_TORCH,
    "testbed.commands.profile": NO_TORCH,
    "testbed.commands.run": NO_TORCH,
    "testbed.commands.simulate_memory": NO_TORCH,
    "testbed.commands.tuning": NO_TORCH,
    "testbed.compression.none": NO_TORCH,
    "testbed.launch.join": "the command line resolves backends here; only ranks load torch and MPI",
    "testbed.launch.rendezvous": "MPI and torch are loaded only where ranks meet by their means",
    "testbed.memory.planning.bounds": "scipy takes longer to load than most commands take",
    "testbed.memory.mirror": NO_TORCH,
    "testbed.models.digits": OPTIONAL,
    "testbed.models.image_folder": OPTIONAL,
    "testbed.models.transformer": OPTIONAL,
    "testbed.prediction.fit": "scipy takes longer to load than most commands take",
    "testbed.profiling.shipped": OPTIONAL,
    "testbed.replay.kind": "a trace is checked without torch",
    "testbed.simulation": NO_TORCH,
    "testbed.statistics.differences": "scipy takes longer to load than most commands take",
    "testbed.statistics.runs": "likewise",
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


def test_memory_is_planned_apart_from_what_records_and_runs_it() -> None:
    planners = [s for s in sources().values() if s.name.startswith("testbed.memory.planning.")]
    assert len(planners) >= 10
    wrong = [
        f"{at(source, found.line)} imports {found.target}"
        for source in planners
        for found in source.imports
        if found.target.startswith(("torch", "testbed.memory."))
        and not found.target.startswith("testbed.memory.planning")
    ]
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
# Names that mean other things as well: told only where something is compared with them.
COMMON_WORDS = {"none", "auto", "warmup", "fp16", "bf16", "checkpoint"}
LOOKS_INTO = {"startswith", "endswith", "removeprefix", "get", "index"}
# Modules of which a part is the subject: where parts live, and tables about named ones.
ABOUT_PARTS = {
    "testbed.base.axes": "the table itself",
    "testbed.base.config": "the defaults of RunConfig",
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
    """Imports from where a part lives, and constants that are a registered name."""
    known = {name for axis in AXES for name in axis.builtin}
    prose, compared = prose_of(tree), compared_in(tree)
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((node.lineno, f"imports {t}") for t in targets if is_a_part_s_own(t))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            word = node.value.partition(":")[0]
            if word in known and (word not in COMMON_WORDS or compared.get(id(node), False)):
                yield node.lineno, f"has the name {node.value!r}"


def is_a_part_s_own(target: str) -> bool:
    """Whether a module, or a name in it, is what holds a part or lies in such a package."""
    homes = {path.partition(":")[0] for axis in AXES for path in axis.builtin.values()}
    return any(f"{target}.".startswith(f"{home}.") for home in homes)


def prose_of(tree: ast.Module) -> set[int]:
    """Docstrings and pieces of longer texts, by their identity."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            found |= {id(value) for value in node.values}
    return found


def compared_in(tree: ast.Module) -> dict[int, bool]:
    """Constants that something is compared with, by identity; False: with another setting."""
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        words: set[str] = set()
        within: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            words, within = OTHER_WORDS.get(getattr(node.left, "attr", ""), set()), [node]
        elif isinstance(node, ast.match_case):
            within = [node.pattern]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOOKS_INTO:
            within = list(node.args[:1])
        for constant in (n for tree in within for n in ast.walk(tree)):
            if isinstance(constant, ast.Constant):
                found[id(constant)] = constant.value not in words
    return found


@pytest.mark.parametrize(
    "code",
    [
        "from testbed.backends.zmq_ps import ZMQ_PS",
        "from testbed.backends import mpi",
        "from testbed.backends.mpi.options import RingOptions",
        "import testbed.scheduling.dear",
        "spec.name == 'mpi-ring'",
        "'gloo' == name",
        "name in ('gloo', 'nccl')",
        "NAMES = ('gloo', 'nccl')",
        "scheduler.startswith('sequential')",
        "name.removeprefix('topk')",
        "{'gloo': 1}[name]",
        "match name:\n  case 'topk': pass",
        "config.precision == 'topk'",
        "config.compressor == 'fp16'",
        "'none' != backend",
        "text.startswith('auto')",
        "resolve('zmq-ps:servers=colocated')",
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
