"""Compressor specifications: `name:key=value,...`, wrappers before it with `+`: `ef+topk`."""

from __future__ import annotations

import re

from testbed.compression.protocol import Compressor, CompressorKind
from testbed.errors import UsageError
from testbed.registry import COMPRESSORS
from testbed.spec import PartSpec, parse_options, parse_spec


def parse_chain(text: str) -> tuple[PartSpec, ...]:
    """The links of a chain, the compressor itself last.

    A `+` cuts where a name follows, so that numbers may hold one (`1e+3`).

    Raises:
        UsageError: a link has no name, or an option is not `key=value`.

    Example:
        >>> [str(link) for link in parse_chain("ef+topk:ratio=0.01")]
        ['ef', 'topk:ratio=0.01']
    """
    return tuple(parse_spec(link) for link in re.split(r"\+(?![0-9])", text))


def resolve_compressor(text: str) -> Compressor:
    """The compressor of a specification.

    Raises:
        UnknownName: no compressor of this name; the message lists the known ones.
        UsageError: an option that it does not have, a value that it cannot use, a wrapper without
            a compressor to its right, or a compressor with one.

    Example:
        >>> resolve_compressor("ef+topk:ratio=0.01").claims.keeps
        True
    """
    *wrappers, last = parse_chain(text)
    kind: CompressorKind = COMPRESSORS.load(last.name)
    if kind.wraps:
        raise UsageError(f"{last.name!r} needs a compressor to its right; write {last.name}+topk")
    compressor = kind.build(parse_options(last.name, last.options, kind.options), None)
    for link in reversed(wrappers):
        kind = COMPRESSORS.load(link.name)
        if not kind.wraps:
            raise UsageError(
                f"{link.name!r} cannot stand left of another compressor; only wrappers can, for "
                f"example ef+{last.name}"
            )
        compressor = kind.build(parse_options(link.name, link.options, kind.options), compressor)
    return compressor
