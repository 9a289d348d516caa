"""Part specifications: `name` or `name:key=value,...`, on the command line and in recipes.

A part may say that one of its options can be given without its key: `replay:resnet50-v100`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from testbed.base.errors import UsageError, closest

T = TypeVar("T")

# Metadata of the field of an options dataclass that a first value without a key sets.
BARE_OPTION: Mapping[str, Any] = types.MappingProxyType({"bare": True})


def former_names(*names: str) -> Mapping[str, Any]:
    """Metadata of a field of an options dataclass: names that are still accepted for it."""
    return types.MappingProxyType({"former_names": names})


_IN_WORDS: Mapping[Any, str] = {int: "a whole number, as in 4", float: "a number, as in 0.5"}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True)
class PartSpec:
    """A part's name and its options as text, not yet checked against the part.

    A first option that was given without its key has the key "".
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        pieces = [f"{key}={value}" if key else value for key, value in self.options.items()]
        return f"{self.name}:" + ",".join(pieces)


def parse_spec(text: str) -> PartSpec:
    """The name and options of one part.

    Raises:
        UsageError: an option other than the first is not `key=value`.

    Example:
        >>> parse_spec("zmq-ps:servers=dedicated:2,consistency=ssp:4").options["consistency"]
        'ssp:4'
        >>> parse_spec("peer:ddp,bucket_mib=10").options
        {'': 'ddp', 'bucket_mib': '10'}
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for number, piece in enumerate(filter(None, rest.split(","))):
        key, equals, value = piece.partition("=")
        if not equals and number == 0:
            options[""] = piece.strip()
            continue
        if not equals or not key.strip():
            raise _not_key_value(name, piece)
        options[key.strip()] = value.strip()
    if not name:
        raise UsageError(f"part {text!r} has no name; write name or name:key=value,...")
    return PartSpec(name, options)


def split_specs(text: str) -> tuple[str, ...]:
    """Cut a comma-separated list of specifications, keeping each part's own options with it.

    A piece that reads `key=value` before any colon continues the part to its left.

    Example:
        >>> split_specs("mpi:blocking=1,gloo,zmq-ps:servers=dedicated:2,consistency=bsp")
        ('mpi:blocking=1', 'gloo', 'zmq-ps:servers=dedicated:2,consistency=bsp')
    """
    parts: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if parts and re.match(r"^[A-Za-z_][A-Za-z0-9_-]*=", piece):
            parts[-1] += ("," if ":" in parts[-1] else ":") + piece
        else:
            parts.append(piece)
    return tuple(parts)


def split_chain(text: str) -> tuple[str, ...]:
    """The links of a chain, `ef+topk:ratio=0.01`.

    A `+` cuts where a name follows, so that numbers may hold one (`1e+3`).

    Example:
        >>> split_chain("ef+topk:ratio=1e+3")
        ('ef', 'topk:ratio=1e+3')
    """
    return tuple(re.split(r"\+(?![0-9])", text))


def options_class(**defaults: Any) -> type:
    """A frozen dataclass of options with these defaults; a default of None takes text.

    Example:
        >>> parse_options("net", {"width": "32"}, options_class(width=16)).width
        32
    """
    fields = [
        (name, str | None if default is None else type(default), field(default=default))
        for name, default in defaults.items()
    ]
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def parse_options(part: str, options: Mapping[str, str], into: type[T]) -> T:
    """Fill a frozen dataclass of typed options from text.

    Raises:
        UsageError: an unknown option (the known ones are listed), or a value of the wrong kind.
    """
    fields = {f.name: f for f in dataclasses.fields(into)}  # type: ignore[arg-type]
    bare = next((f.name for f in fields.values() if BARE_OPTION.items() <= f.metadata.items()), "")
    former = {old: f.name for f in fields.values() for old in f.metadata.get("former_names", ())}
    hints = typing.get_type_hints(into)
    values: dict[str, Any] = {}
    for key, text in options.items():
        name = key.replace("-", "_") or bare
        name = former.get(name, name)
        if not name:
            raise _not_key_value(part, text)
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            told = f"{part!r} has no option {key!r}; known options: {known}"
            raise UsageError(told + closest(name, sorted(fields)))
        values[name] = _convert(part, name, text, hints[name])
    return into(**values)


def _not_key_value(part: str, piece: str) -> UsageError:
    return UsageError(f"option {piece!r} of {part!r} is not key=value; write {part}:key=value,...")


def _convert(part: str, key: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if text.lower() == "none" else _convert(part, key, text, inner[0])
    if typing.get_origin(kind) is typing.Literal:
        allowed = typing.get_args(kind)
        if text not in allowed:
            raise UsageError(f"{part}: {key} is {text!r}; expected one of {', '.join(allowed)}")
        return text
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise UsageError(f"{part}: {key} is {text!r}; expected 1 or 0")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError as error:
        wanted = _IN_WORDS.get(kind, kind.__name__)
        raise UsageError(f"{part}: {key} is {text!r}; expected {wanted}") from error
