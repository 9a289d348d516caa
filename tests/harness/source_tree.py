"""The project's own source files: parsed once, with what each imports and where."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Folder -> what its modules' names begin with.
TOPS = {"testbed": "testbed", "models": "testbed.models"}
# Modules that stand above the rest of their package.
OWN_PLACES = {
    "testbed.noise.rehearsal",  # trains, and whoever trains asks the others what was stolen
}
# What takes long to load, or is not installed everywhere.
HEAVY_LIBRARIES = {"torch", "zmq", "mpi4py", "scipy", "sklearn", "transformers", "PIL"}


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        line: where.
        target: the module's full name.
        lazy: inside a function.
        typing: under `if TYPE_CHECKING`.
    """

    line: int
    target: str
    lazy: bool
    typing: bool


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """The package, or the module beside the packages, that it belongs to."""
        if self.name in OWN_PLACES:
            return self.name.removeprefix("testbed.")
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def short(self) -> str:
        """Its path from the project's root."""
        return str(self.path.relative_to(ROOT))

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever it stands."""
        inside = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        return tuple(_imports(self.tree, inside, False, False))


def _imports(node: ast.AST, package: str, lazy: bool, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield Import(node.lineno, name.name, lazy, typing)
    elif isinstance(node, ast.ImportFrom):
        assert node.level <= 1
        module = ".".join(filter(None, [package if node.level else "", node.module or ""]))
        for name in node.names:
            full = f"{module}.{name.name}"
            yield Import(node.lineno, full if full in names() else module, lazy, typing)
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, lazy, typing)


@functools.cache
def paths() -> Mapping[str, Path]:
    """Module name -> its file."""
    found = {}
    for folder, top in TOPS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [top, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def names() -> Collection[str]:
    """All modules of the project."""
    return paths().keys()


@functools.cache
def sources() -> Mapping[str, Source]:
    """Module name -> the file, parsed."""
    found = {}
    for name, path in paths().items():
        text = path.read_text()
        found[name] = Source(path, name, text, ast.parse(text))
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan, 1972), each in alphabetical order."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        open_nodes.append(node)
        for other in graph.get(node, ()):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in open_nodes:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            at = open_nodes.index(node)
            group = open_nodes[at:]
            del open_nodes[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in number:
            visit(node)
    return found


def heavy_modules() -> set[str]:
    """The project's modules whose import loads one of `HEAVY_LIBRARIES`."""
    at_import = {
        name: {i.target for i in source.imports if not i.lazy and not i.typing}
        for name, source in sources().items()
    }
    heavy: set[str] = set()
    while True:
        more = {
            name
            for name, targets in at_import.items()
            if name not in heavy and any(is_heavy(target, heavy) for target in targets)
        }
        if not more:
            return heavy
        heavy |= more


def is_heavy(target: str, heavy: Collection[str]) -> bool:
    """Whether importing this module loads a heavy library; its packages are imported with it."""
    parts = target.split(".")
    whole = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return parts[0] in HEAVY_LIBRARIES or any(name in heavy for name in whole)


def code_lines(source: Source) -> int:
    """Lines that hold code: not blank, no comment, no docstring."""
    documented: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            documented |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    text_lines = source.text.splitlines()
    return sum(1 for n in lines - documented if n <= len(text_lines) and text_lines[n - 1].strip())
