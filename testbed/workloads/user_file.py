"""A workload in a user's file, `path/to/my_model.py:build:key=value,...`, checked without torch."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.base.axes import WorkloadFacts
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError, closest
from testbed.base.parts import Part, Resolved
from testbed.base.spec import parse_options, parse_spec
from testbed.workloads.workload import Workload, target_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OwnModel:
    """Where the user's function stands, and its options as text."""

    path: Path
    function: str
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        """As it is written before its options."""
        return f"{self.path}:{self.function}"


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


_BINDS_UNSEEN = {
    *("exec", "eval", "globals", "locals", "vars", "setattr", "*"),
    *("builtins.exec", "builtins.eval", "sys.modules"),
    *("__getattr__", "__dict__", "__signature__", "__code__"),
}
_SUPPLIED = {"seed", "data_dir"}  # parameters that are no options


def surely_lacks(own: OwnModel) -> str | None:
    """That a file surely lacks the function, or the function an option; found without running.

    None: it may have them.

    A file that may get names in other ways than its text shows is left to whoever runs it, as is
    one that is no Python; so are options of a function that is decorated, bound more than once, or
    takes any keyword.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        tree = ast.parse(own.path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    names = list(_names_in(tree))
    if _BINDS_UNSEEN & {name for name, _ in names}:
        return None
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if own.function not in {name for name, _ in names}:
        return no_function(own, [name for name in functions if name[0] != "_"])
    found, times = functions.get(own.function), names.count((own.function, True))
    if found is None or times > 1 or found.decorator_list or found.args.kwarg:
        return None
    taken = {a.arg for a in (*found.args.args, *found.args.kwonlyargs)} - _SUPPLIED
    fields = [(name, str, field(default="")) for name in sorted(taken)]
    try:
        parse_options(own.name, own.options, make_dataclass("Options", fields))
    except UsageError as error:
        return str(error)
    return None


def no_function(own: OwnModel, functions: Iterable[str]) -> str:
    """That a file lacks the function, which it has, and which of them was perhaps meant.

    Example:
        >>> no_function(OwnModel(Path("nets.py"), "buidl", {}), ["build"])
        "'nets.py' has no function 'buidl'; it has: build; did you mean 'build'?"
    """
    known = sorted(functions)
    told = f"'{own.path}' has no function {own.function!r}; it has: {', '.join(known) or 'none'}"
    return told + closest(own.function, known)


def _names_in(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """All names in a text, and whether each is bound there; `*` for whatever another file has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Name):
            yield node.id, not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0], True
        elif isinstance(node, ast.Attribute):
            if not isinstance(node.ctx, ast.Load):
                yield node.attr, True
            elif isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}", False
            if node.attr.startswith("__"):
                yield node.attr, False
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            yield node.name, True
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, True


def _refuses(own: OwnModel, config: RunConfig) -> str | None:
    try:
        if not own.path.is_file():
            return f"workload is {config.workload!r}, but there is no file {str(own.path)!r}"
        return surely_lacks(own)
    except OSError as error:
        return f"workload is {config.workload!r}, whose file cannot be read ({error.strerror})"


def check_dilation(workload: Resolved[WorkloadFacts], dilation: float) -> None:
    """Refuse to stretch what cannot be stretched.

    Raises:
        UsageError: the workload really computes; its compute takes as long as it takes.
    """
    if dilation != 1 and not workload.facts.stretches:
        raise UsageError(
            f"dilation is {dilation:g}, but workload {workload.text!r} really computes and cannot "
            "be made slower; replay a recorded trace of it, or use dilation=1"
        )


EXAMPLE = """\
    import torch
    def build(width: int = 64):
        x, y = torch.randn(512, width), torch.randint(10, (512,))
        data = torch.utils.data.TensorDataset(x, y)
        return torch.nn.Linear(width, 10), data
"""

_EXPECTED = (
    "expected a function that returns a model and a dataset (or model, dataset and loss, or a "
    f"testbed.workloads.workload.Workload), such as\n\n{EXAMPLE}"
)
_SCALARS = {str, int, float, bool}


def _build(own: OwnModel, *, seed: int, data_dir: str | None) -> Workload:
    """Load the file, call the function and take what it returns for a workload.

    The file's folder can be imported from while the function runs. An error that the user's code
    raises comes through unchanged, with a note of where it happened.

    Args:
        own: file, function and options.
        seed: passed on if the function has a parameter of this name.
        data_dir: passed on if the function has a parameter of this name.

    Raises:
        UsageError: file or function are missing, an option does not fit the function's signature,
            `data_dir` is given but not taken, or the result is no workload.
    """
    if not own.path.is_file():
        raise UsageError(f"there is no file '{own.path}'; {_EXPECTED}")
    with _importable(own.path.resolve().parent):
        try:
            build = _find(own)
            result = build(**_arguments(own, build, {"seed": seed, "data_dir": data_dir}))
        except UsageError:
            raise
        except Exception as error:
            error.add_note(f"while the workload '{own.name}' was built")
            raise
    return _to_workload(own, result)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _find(own: OwnModel) -> Callable[..., Any]:
    module = _load_module(own.path.resolve())
    build = getattr(module, own.function, None)
    if not callable(build):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise UsageError(f"{no_function(own, names)}; {_EXPECTED}")
    return typing.cast("Callable[..., Any]", build)


def _load_module(path: Path) -> types.ModuleType:
    # A private name: the file must not take the place of an installed module of the same name.
    name = f"_testbed_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _arguments(
    own: OwnModel, build: Callable[..., Any], supplied: dict[str, Any]
) -> dict[str, Any]:
    parameters = {
        name: _evaluated(build, parameter)
        for name, parameter in inspect.signature(build).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if supplied["data_dir"] is not None and "data_dir" not in parameters:
        raise UsageError(
            f"--data is {supplied['data_dir']!r}, but {own.function} in '{own.path}' takes no "
            "data_dir; add the parameter data_dir, or leave --data out"
        )
    options = {n: p for n, p in parameters.items() if n not in supplied}
    given = _convert_options(own, options)
    missing = [n for n, p in options.items() if p.default is p.empty and n not in given]
    if missing:
        raise UsageError(
            f"{own.function} in '{own.path}' needs {', '.join(missing)}; "
            f"write {own.name}:{missing[0]}=..., or give it a default"
        )
    return {n: v for n, v in supplied.items() if n in parameters} | given


def _convert_options(own: OwnModel, options: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    fields = [
        (name, _kind_of(parameter), field(default=None)) for name, parameter in options.items()
    ]
    for key in own.options:
        name = key.replace("-", "_")
        if name in options and not _is_plain(_kind_of(options[name])):
            raise UsageError(
                f"'{own.path}': option {key!r} of {own.function} is annotated "
                f"{options[name].annotation}; an option can be str, int, float, bool, a Literal "
                "of strings, or one of these or None"
            )
    converted = vars(parse_options(own.name, own.options, make_dataclass("Options", fields)))
    return {key.replace("-", "_"): converted[key.replace("-", "_")] for key in own.options}


def _evaluated(build: Callable[..., Any], parameter: inspect.Parameter) -> inspect.Parameter:
    """With the type that a text annotation names; Any where its name is not there at run time."""
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        kind = eval(parameter.annotation, getattr(inspect.unwrap(build), "__globals__", {}))
    except Exception:  # of the user's file, which may name types for a checker alone
        kind = Any
    return parameter.replace(annotation=kind)


def _kind_of(parameter: inspect.Parameter) -> Any:
    """The type of an option: its annotation, else its default's type, else text."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    return str if parameter.default in (parameter.empty, None) else type(parameter.default)


def _is_plain(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return len(inner) == 1 and _is_plain(inner[0])
    if origin is typing.Literal:
        return all(isinstance(value, str) for value in typing.get_args(kind))
    return kind in _SCALARS


def _to_workload(own: OwnModel, result: Any) -> Workload:
    from torch import nn

    workload = result
    if isinstance(result, tuple) and len(result) in (2, 3):
        model, dataset, *rest = result
        workload = Workload(model, dataset, loss=rest[0] if rest else None)
    if not isinstance(workload, Workload):
        kind = type(result).__name__
        what = f"a {kind} of {len(result)}" if isinstance(result, tuple) else f"a {kind}"
        raise UsageError(f"{own.function} in '{own.path}' returned {what}; {_EXPECTED}")
    if not isinstance(workload.model, nn.Module):
        kind = type(workload.model).__name__
        raise UsageError(
            f"{own.function} in '{own.path}' returned a {kind} as the model; {_EXPECTED}"
        )
    return replace(workload, loss=_as_loss(own, workload.loss))


def _as_loss(own: OwnModel, loss: Any) -> Any:
    """A criterion of torch takes (outputs, targets); any other function (model, batch)."""
    from torch import nn

    if loss is None:
        return loss
    if not callable(loss):
        raise UsageError(
            f"{own.function} in '{own.path}' returned a {type(loss).__name__} as the loss; "
            "expected a function loss(model, batch) or a criterion such as torch.nn.MSELoss()"
        )
    if not (isinstance(loss, nn.Module) or _module_of(loss).startswith("torch.")):
        return loss
    criterion = loss

    def criterion_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        value: torch.Tensor = criterion(model(batch[0]), target_of(batch))
        return value

    return criterion_loss


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def user_part(spec_text: str) -> tuple[Part, OwnModel] | None:
    """The workload of a user's file, and where it stands; None if the text names no Python file.

    Raises:
        UsageError: see `parse_own_model`.
    """
    own = parse_own_model(spec_text)
    if own is None:
        return None
    return Part(own.name, "the user's own", _build, OwnModel, refuses=_refuses), own
