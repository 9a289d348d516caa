"""Options of a command for the fields of `RunConfig`, as these declare them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from testbed.base.config import RunConfig, Setting, option, read_values, settings
from testbed.base.spec import split_specs

C = TypeVar("C", bound=Callable[..., None])


def takes_settings(command: C) -> C:
    """The command with an option for each field of `RunConfig`, in place of its `**given`.

    What it is given then are the values that a user has written, or that have a default.
    """
    return _with(command, (_single(name, *each) for name, each in settings().items()))


def takes_lists(command: C) -> C:
    """The command with an option for each field of which a sweep may have several values."""
    listed = {name: each for name, each in settings().items() if each[1].listed}
    return _with(command, (_list(name, *each) for name, each in listed.items()))


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of `takes_settings` were given, as values of the fields.

    Raises:
        UsageError: a text is no value of its field.
    """
    return {
        name: read_values(name, [value])[0] if settings()[name][1].read else value
        for name, value in given.items()
        if value is not None
    }


def lists_of(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What the options of `takes_lists` were given; a part's own options stay with it.

    Raises:
        UsageError: a text is no value of its field.

    Example:
        >>> lists_of({"backend": "mpi:blocking=1,gloo", "workers": "2,4", "seed": None})
        {'backend': ('mpi:blocking=1', 'gloo'), 'workers': (2, 4)}
    """
    return {n: read_values(n, split_specs(text)) for n, text in given.items() if text is not None}


def _single(name: str, kind: Any, setting: Setting) -> inspect.Parameter:
    text, default = _help(kind, setting), getattr(RunConfig(), name)
    if get_origin(kind) is Literal:
        kind = str
    elif setting.read is not None:
        kind, default = str | None, f"{default:g}" if default else None
    if setting.unset:
        kind, default = kind | None, None
    names = (option(name),) if kind is bool else ()  # without a --no-predict
    made = typer.Option(
        *names, help=text, show_default=setting.unset or True, hidden=setting.hidden
    )
    return _parameter(name, kind, made, default)


def _list(name: str, kind: Any, setting: Setting) -> inspect.Parameter:
    made = typer.Option(help=_help(kind, setting), metavar="LIST")
    return _parameter(name, str | None, made, None)


def _help(kind: Any, setting: Setting) -> str:
    choices = ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""
    return f"{setting.help}: {choices}" if choices else setting.help


def _parameter(name: str, kind: Any, made: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
    )


def _with(command: C, made: Iterable[inspect.Parameter]) -> C:
    hints = get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(command).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*made, *own]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
