"""Which kinds of workload there are here and what each may be given.

Loads torch only for a kind that computes: replayed ones and the user's own are checked without.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from testbed.base.axes import WORKLOADS
from testbed.base.errors import Unavailable, UsageError, closest
from testbed.base.spec import BARE_OPTION, parse_options, parse_spec
from testbed.workloads.workload import WorkloadKind

# What names the user's own model: `path/to/my_model.py:build:key=value,...`.


@dataclass(frozen=True)
class OwnModel:
    """Where the user's function stands, and its options as text."""

    path: Path
    function: str
    options: Mapping[str, str]


def parse_own_model(spec_text: str) -> OwnModel | None:
    """The parts of `file.py:function:key=value,...`; None if the text names no Python file.

    Raises:
        UsageError: the function is missing, or an option is not `key=value`.

    Example:
        >>> own = parse_own_model("nets/my_model.py:build:width=32")
        >>> own.function, dict(own.options)
        ('build', {'width': '32'})
    """
    match = re.fullmatch(r"(.+?\.py)(?::(.*))?", spec_text.strip(), re.DOTALL)
    if match is None:
        return None
    spec = parse_spec(match[2] or "") if match[2] else None
    if spec is None or not spec.name.isidentifier():
        raise UsageError(
            f"workload is {spec_text!r}; expected a file and a function in it: "
            f"{match[1]}:build or {match[1]}:build:key=value,..."
        )
    return OwnModel(Path(match[1]), spec.name, spec.options)


_BINDS_UNSEEN = {"exec", "globals", "vars", "setattr", "__getattr__", "*"}


def check_function(own: OwnModel) -> None:
    """Refuse a function that the file surely does not have, without running the file.

    A file that may get names by other ways than its text shows is left to whoever runs it, as is
    one that is no Python.

    Raises:
        UsageError: names the function, and what it may have been meant to be.
        OSError: the file cannot be read.
    """
    try:
        tree = ast.parse(own.path.read_bytes())
    except (SyntaxError, ValueError):
        return
    names = _names_in(tree)
    if own.function in names or names & _BINDS_UNSEEN:
        return
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    raise UsageError(no_function(own, functions))


def no_function(own: OwnModel, functions: Iterable[str]) -> str:
    """That a file lacks the function, which it has, and which of them was perhaps meant.

    Example:
        >>> no_function(OwnModel(Path("nets.py"), "buidl", {}), ["build"])
        "'nets.py' has no function 'buidl'; it has: build; did you mean 'build'?"
    """
    known = sorted(functions)
    told = f"'{own.path}' has no function {own.function!r}; it has: {', '.join(known) or 'none'}"
    return told + closest(own.function, known)


def _names_in(tree: ast.AST) -> set[str]:
    """All names in a text, and `*` where it imports whatever another file has."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def workload_availability(name: str) -> tuple[str, str] | None:
    """None where the workload can be used here, else (reason, what to install).

    Raises:
        UnknownName: no such workload.
    """
    try:
        kind: WorkloadKind = WORKLOADS.load(name)
    except Unavailable as error:
        return error.reason, error.remedy
    return kind.probe()


def imports_of(spec_text: str) -> tuple[str, ...]:
    """Modules that a workload will import; none are known of the user's own."""
    if parse_own_model(spec_text) is not None:
        return ()
    kind: WorkloadKind = WORKLOADS.load(parse_spec(spec_text).name)
    return kind.imports


def check_dilation(spec_text: str, dilation: float) -> None:
    """Refuse to stretch what cannot be stretched.

    Raises:
        UsageError: the workload really computes; its compute takes as long as it takes.
    """
    if dilation == 1:
        return
    if parse_own_model(spec_text) is None:
        kind: WorkloadKind = WORKLOADS.load(parse_spec(spec_text).name)
        if kind.stretches:
            return
    raise UsageError(
        f"dilation is {dilation:g}, but workload {spec_text!r} really computes and cannot be made "
        "slower; replay a recorded trace of it, or use dilation=1"
    )


def kind_options(kind: WorkloadKind, given: Mapping[str, str]) -> dict[str, Any]:
    """All options of a workload: its defaults, and the given ones converted to the same types.

    Raises:
        UsageError: an unknown option (the known ones are listed), or a value of the wrong kind.
    """
    fields = [
        (
            name,
            str | None if default is None else type(default),
            field(default=default, metadata=BARE_OPTION if name == kind.bare_option else None),
        )
        for name, default in kind.options.items()
    ]
    options = dict(vars(parse_options(kind.name, given, make_dataclass("Options", fields))))
    kind.check(options)
    return options
