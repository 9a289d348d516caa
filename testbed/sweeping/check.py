"""Looks at the parts that a sweep asks for, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from testbed.config import RunConfig
from testbed.errors import Unavailable, UsageError
from testbed.spec import parse_options, parse_spec


def check_backends(cells: Iterable[RunConfig], load: Callable[[str], Any]) -> None:
    """Whether every backend takes the options that it is given.

    A backend that is unavailable here is no mistake of the grid: its cells fail when they run, say
    why, and the others are measured all the same.

    Args:
        cells: of the sweep.
        load: name -> `BackendKind`, as `registry.BACKENDS.load`.

    Raises:
        UsageError: lists every specification that no backend takes.
    """
    problems = []
    for text in dict.fromkeys(cell.backend for cell in cells):
        spec = parse_spec(text)
        try:
            parse_options(spec.name, spec.options, load(spec.name).options)
        except Unavailable:
            continue
        except UsageError as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise UsageError("backends that cannot be run:\n  " + "\n  ".join(problems))


def check_specs(what: str, texts: Iterable[str], resolve: Callable[[str], object]) -> None:
    """Whether every specification is one, with options that it takes.

    Args:
        what: kind of part, for the error.
        texts: specifications, as `topk:ratio=0.01`.
        resolve: finds the part and checks its options.

    Raises:
        UsageError: lists every specification that is none.

    Example:
        >>> check_specs("number", ["1", "2"], int)
    """
    problems = []
    for text in dict.fromkeys(texts):
        try:
            resolve(text)
        except UsageError as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise UsageError(f"{what}s that cannot be run:\n  " + "\n  ".join(problems))
