"""Every part is described: rule or equation, units, errors, an example, its source, departures."""

from __future__ import annotations

import builtins
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

from testbed.base import errors
from testbed.base.axes import AXES, COMPRESSORS

PARTS = [(axis, name) for axis in AXES for name in axis.builtin]

SHAPE = r"\[[A-Za-z](, [^\]]*)?\]"  # of a tensor, as in [B, 3, S, S]
UNITS = re.compile(
    rf"\b([Bb]ytes?|[KM]iB|bits?|seconds?|in s|elements?|shares?|steps?)\b|\(s\)|{SHAPE}"
)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Reference):$")


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by their headings; "" = what stands before the first."""
    found, heading = {"": ""}, ""
    for line in inspect.cleandoc(text).splitlines():
        match = SECTION.match(line)
        heading = match[1] if match else heading
        found[heading] = found.get(heading, "") + ("" if match else line + "\n")
    return found


def lacks(text: str) -> list[str]:
    """What a description has not."""
    found = sections(text)
    told = "".join(found.get(heading, "") for heading in ("", "Args", "Attributes"))
    raised = re.findall(r"^    (\w+(?:, \w+)*): \S", found.get("Raises", ""), re.MULTILINE)
    named = [name for names in raised for name in names.split(", ")]
    examples = doctest.DocTestParser().get_examples(found.get("Example", ""))
    source = found.get("Reference", "")
    has = {
        "rule or equation": re.search(r"^    \S", found[""], re.MULTILINE),
        "units": UNITS.search(told),
        "errors": named and all(hasattr(errors, n) or hasattr(builtins, n) for n in named),
        "example": any(example.want for example in examples),
        "source": re.search(r"\b(19|20)\d\d\b", source),
        "departures": re.search(r"\bDeparts\b", source),
    }
    return [what for what, there in has.items() if not there]


def meant(thing: Any) -> Iterator[Any]:
    """Where the description of what builds a part goes on.

    In what a function without a docstring uses, or in what a docstring names in backticks.
    """
    if not isinstance(thing, FunctionType):
        return
    cells = dict(zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True))
    scope = thing.__globals__ | {name: cell.cell_contents for name, cell in cells.items()}
    names: list[str] = re.findall(r"`(\w+)`", thing.__doc__ or "")
    if not thing.__doc__:
        names = [*thing.__code__.co_names, *cells]
        for module in [name for name in names if name.startswith("testbed.")]:
            scope = scope | vars(importlib.import_module(module))  # imported inside the function
    yield from (scope[name] for name in names if name in scope)


def descriptions(part: Any) -> Iterator[str]:
    """Docstrings that may stand for a part, the nearest first."""
    found, seen = [part.options, part.build], []
    while found:
        thing = found.pop(0)
        ours = str(getattr(thing, "__module__", "")).startswith("testbed.")
        if ours and callable(thing) and thing not in seen:
            seen.append(thing)
            found += meant(thing)
            if thing.__doc__:
                yield thing.__doc__


@pytest.mark.parametrize(("axis", "name"), PARTS, ids=[f"{a.what}-{n}" for a, n in PARTS])
def test_part_is_described(axis: Any, name: str) -> None:
    tried: list[list[str]] = []
    for text in descriptions(axis.load(name)):
        tried.append(lacks(text))
        if not tried[-1]:
            return
    nearest = min(tried, key=len, default=["a docstring"])
    pytest.fail(f"{axis.what} {name} ({axis.builtin[name]}) lacks: {', '.join(nearest)}")


def test_no_part_is_described_by_that_of_another_module() -> None:
    described: dict[str, set[str]] = {}
    for axis, name in PARTS:
        complete = next((d for d in descriptions(axis.load(name)) if not lacks(d)), None)
        if complete is not None:
            module = axis.builtin[name].partition(":")[0]
            described.setdefault(complete, set()).add(module)
    assert len(described) > 30
    assert [sorted(modules) for modules in described.values() if len(modules) > 1] == []


COMPLETE = """One line.

    T(M) = alpha + beta M

M in bytes.

Raises:
    UsageError: an option is given.

Example:
    >>> 1 + 1
    2

Reference:
    Fisher, 1922, London. Departs: nothing.
"""


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("rule or equation", "    T(M)", "T(M)"),
        ("units", " in bytes", ""),
        ("errors", "    UsageError: an option is given.\n", ""),
        ("errors", "UsageError", "UsualError"),
        ("example", "    2\n", ""),
        ("source", ", 1922", ""),
        ("departures", " Departs: nothing.", ""),
    ],
)
def test_what_is_missing_is_noticed(what: str, old: str, new: str) -> None:
    assert lacks(COMPLETE) == []
    assert lacks(COMPLETE.replace(old, new)) == [what]


def test_what_a_compressor_declares_is_what_it_claims() -> None:
    specs = [name for name in COMPRESSORS.builtin if not COMPRESSORS.load(name).wraps]
    differing = []
    for spec in [*specs, "dgc:momentum=0", "ef+topk"]:
        found = COMPRESSORS.resolve(spec)
        declared = any(link.facts.carries_momentum for link in found.links)
        if found.build().claims.carries_momentum != declared:
            differing.append(spec)
    assert not differing
