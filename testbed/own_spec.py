"""What names the user's own model: `path/to/my_model.py:build:key=value,...`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import UsageError, closest
from testbed.spec import parse_spec


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
