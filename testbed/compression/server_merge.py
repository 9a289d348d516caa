"""Merging of compressed payloads on a parameter server, and its description as JSON.

The description holds the name of a known part and its options, nested where a part holds another.
Nothing is unpickled or imported by name; a server builds known parts only.

    {"merger": {"part": "topk", "ratio": 0.01}, "num_elements": 700, "dtype": "float32",
     "again": null, "seed": 0}
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.types import CUT_BYTES, shard_bounds
from testbed.compression.gathered import Codec
from testbed.compression.protocol import Arrived, Context, Merger, State, can_cut, can_unite

PLAIN = (bool, int, float, str)  # options; whatever else a part holds is a part
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ELEMENT_BYTES if getattr(torch, name).is_floating_point
}


@functools.cache
def known_parts() -> Mapping[str, type]:
    """What payloads can be merged by, as all compressors declare it.

    Example:
        >>> known_parts()["topk"], "gtopk" in known_parts()
        (<class 'testbed.compression.topk.TopK'>, False)
    """
    found = map(COMPRESSORS.find, COMPRESSORS.paths())
    return {word: part for each in found if each for word, part in each.facts.merged_by.items()}


@functools.cache
def _words() -> Mapping[type, str]:
    return {part: word for word, part in known_parts().items()}


@dataclass(frozen=True)
class Merging:
    """How a server merges the payloads of a message.

    Attributes:
        merger: combines payloads.
        num_elements: n of the message.
        dtype: of its values.
        again: encodes the mean for the way back (see `merge`); None: lossless.
        seed: of the run, for the draws of `again`.
    """

    merger: Merger
    num_elements: int
    dtype: torch.dtype
    again: Codec | None = None
    seed: int = 0

    @property
    def dense_bytes(self) -> int:
        """Bytes of the message uncompressed."""
        return self.num_elements * self.dtype.itemsize

    def like(self) -> torch.Tensor:
        """A tensor of the message's size and dtype."""
        return torch.empty(self.num_elements, dtype=self.dtype)


def can_describe(merger: object) -> bool:
    """Whether `describe` knows a merger or codec; others can only be gathered.

    Example:
        >>> from testbed.compression.topk import TopK
        >>> can_describe(TopK(0.1)), can_describe(object())
        (True, False)
    """
    if type(merger) not in _words():
        return False
    held = [getattr(merger, f.name) for f in _fields(merger)]
    return all(isinstance(value, PLAIN) or can_describe(value) for value in held)


def describe(
    merger: Merger,
    num_elements: int,
    dtype: torch.dtype,
    again: Codec | None = None,
    seed: int = 0,
) -> str:
    """A merging as JSON; `build` is the way back.

    Raises:
        UsageError: a merger that no server knows, or a dtype that is no floating point.

    Example:
        >>> from testbed.compression.sparse_mean import SparseMerger
        >>> describe(SparseMerger(), 700, torch.float32).partition(", ")[0]
        '{"merger": {"part": "sparse"}'
    """
    for part in (merger, again):
        if part is not None:
            _name_of(part)
    held: Any = (merger, again)  # known, so frozen: they can be looked up
    return _described(*held, num_elements, dtype, seed)


@functools.lru_cache(maxsize=4096)
def _described(merger: Any, again: Any, num_elements: int, dtype: torch.dtype, seed: int) -> str:
    """Kept, as each message comes with the same one in every step; known parts never change."""
    names = [name for name, known in DTYPES.items() if known == dtype]
    if not names:
        raise UsageError(f"dtype is {dtype}; a merged message has one of {', '.join(DTYPES)}")
    words = {
        "merger": _describe_part(merger),
        "num_elements": num_elements,
        "dtype": names[0],
        "again": None if again is None else _describe_part(again),
        "seed": seed,
    }
    return json.dumps(words)


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    merger: dict[str, Any]
    num_elements: int
    dtype: str
    again: dict[str, Any] | None = None
    seed: int = 0


@functools.lru_cache(maxsize=1024)
def build(text: str | bytes) -> Merging:
    """What `describe` described; kept, as each message comes with the same one in every step.

    All callers get the same object: known parts cannot be changed once they are made.

    Raises:
        UsageError: no JSON of this form, an unknown part or option, or a value out of range.

    Example:
        >>> from testbed.compression.topk import TopK
        >>> build(describe(TopK(0.5), 10, torch.bfloat16)).merger
        TopK(ratio=0.5)
    """
    try:
        words = msgspec.json.decode(text, type=_Words)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"a merger's description is {text!r:.200}: {error}") from error
    if words.dtype not in DTYPES or words.num_elements < 0:
        raise UsageError(
            f"a merger's description has {words.num_elements} elements of {words.dtype}; expected "
            f"none or more, of {', '.join(DTYPES)}"
        )
    again = None if words.again is None else _build_part(words.again, "encode")
    return Merging(
        _build_part(words.merger, "combine"),
        words.num_elements,
        DTYPES[words.dtype],
        again,
        words.seed,
    )


def bounds_of(merger: Merger, like: torch.Tensor, num_mergers: int) -> tuple[int, ...]:
    """Which range of a message [n] each server merges: all of it one server, where it is not cut.

    Example:
        >>> from testbed.compression.topk import TopK
        >>> bounds_of(TopK(0.1), torch.zeros(700), num_mergers=2)
        (0, 700)
    """
    if num_mergers == 1 or like.nbytes < CUT_BYTES or not can_cut(merger):
        return (0, like.numel())
    return shard_bounds(like.numel(), num_mergers)


def cut(
    merger: Merger, payload: torch.Tensor, like: torch.Tensor, bounds: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """The payload of a message [n] for each server of `bounds_of`."""
    if len(bounds) == 2:
        return (payload,)
    assert can_cut(merger)
    return merger.cut(payload, like, bounds)


def encoder_of(merger: Merger, repacks: bool | None) -> Codec | None:
    """What encodes the mean again for the way back; None: it goes back without loss.

    Args:
        merger: of the payloads. One that only combines them cannot encode.
        repacks: whether to encode again; None: where the authors of the compressor do.

    Example:
        >>> from testbed.compression.topk import TopK
        >>> from testbed.compression.sparse_mean import SparseMerger
        >>> encoder_of(TopK(0.1), True), encoder_of(SparseMerger(), True)
        (TopK(ratio=0.1), None)
        >>> encoder_of(TopK(0.1), None) is None
        True
    """
    codec: Any = merger
    if not hasattr(codec, "encode"):
        return None
    wanted = codec.claims.requantised if repacks is None else repacks
    return codec if wanted else None


def _fields(part: object) -> tuple[dataclasses.Field[Any], ...]:
    # A part without options need not be a dataclass.
    return dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()


def _name_of(part: object) -> str:
    name = _words().get(type(part))
    if name is None:
        raise UsageError(
            f"no server can merge by {type(part).__name__}; known are {', '.join(known_parts())}; "
            "gather its payloads instead"
        )
    return name


def _describe_part(part: object) -> dict[str, Any]:
    name = _name_of(part)
    values = {f.name: getattr(part, f.name) for f in _fields(part)}
    return {"part": name} | {
        key: value if isinstance(value, PLAIN) else _describe_part(value)
        for key, value in values.items()
    }


def _build_part(words: dict[str, Any], ability: str) -> Any:
    """The part, which must have the method `ability`."""
    name = words.get("part")
    kind = known_parts().get(name) if isinstance(name, str) else None
    if kind is None or not hasattr(kind, ability):
        able = ", ".join(known for known, part in known_parts().items() if hasattr(part, ability))
        raise UsageError(f"a merger's part is {name!r}; expected one of {able}")
    given = {key: value for key, value in words.items() if key != "part"}
    hints = _hints(kind)
    if set(given) - set(hints):
        unknown = ", ".join(sorted(set(given) - set(hints)))
        raise UsageError(f"merger {name!r} has no option {unknown}; it has {', '.join(hints)}")
    try:
        return kind(**{key: _option(value, hints[key]) for key, value in given.items()})
    except (TypeError, msgspec.ValidationError) as error:
        raise UsageError(f"merger {name!r} cannot be made of {given!r:.200}: {error}") from error


def _option(value: Any, hint: Any) -> Any:
    return _build_part(value, "decode") if isinstance(value, dict) else msgspec.convert(value, hint)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    return {name: hints[name] for name in names}


# The parameter server's half: payloads of all ranks become one payload for all ranks.
#
# A server that merges answers an all-gather with one payload instead of those of all ranks: push,
# merge, pull. Lossless, the pulled payload holds the union of what was pushed. Encoded again (by
# `again`, with the server's own error feedback) it is as short as a pushed one.


@dataclass(frozen=True)
class Pulled:
    """What a server sends to all ranks.

    Attributes:
        payload: uint8, one dimension.
        lossless: it was packed by `Merger.pack_mean`; else it is a payload of the codec `again`.
    """

    payload: torch.Tensor
    lossless: bool

    def arrived(self) -> Arrived:
        """What a rank's conversation is answered with."""
        if self.lossless:
            return Arrived(pulled=self.payload)
        return Arrived(parts=(self.payload,))


def merge(
    merger: Merger,
    payloads: tuple[torch.Tensor, ...],
    like: torch.Tensor,
    state: State,
    context: Context,
    again: Codec | None = None,
) -> tuple[Pulled, State]:
    """One payload for all ranks, and the server's new state for this message.

    Args:
        merger: of the round that the payloads come from.
        payloads: one of each rank, in rank order.
        like: [n]: size, dtype and device of the message.
        state: what the last merge of this message returned; {} at first.
        context: of the message; its rank should be none of the workers', so that draws differ.
        again: encodes the mean plus the server's `residual` [n] for the way back; a codec whose
            payloads `merger` can combine (`topk` for every sparse compressor, a quantiser for
            itself); None: lossless, no state.

    Reference:
        Tang et al., 2019, ICML (DoubleSqueeze) for the second compression.

    Example:
        >>> from testbed.compression.topk import TopK
        >>> codec, like = TopK(0.5), torch.zeros(2)
        >>> parts = tuple(codec.encode(torch.tensor(v), Context()).payload
        ...               for v in ([2.0, 1.0], [0.0, 4.0]))
        >>> pulled, _ = merge(codec, parts, like, {}, Context())
        >>> codec.unpack_mean(pulled.payload, like).tolist()
        [1.0, 2.0]
        >>> pulled, state = merge(codec, parts, like, {}, Context(), again=codec)
        >>> codec.combine(pulled.arrived().parts, like).tolist(), state["residual"].tolist()
        ([0.0, 2.0], [1.0, 0.0])
    """
    if again is None:
        return Pulled(_united(merger, payloads, like), lossless=True), state
    mean = merger.combine(payloads, like)
    if "residual" in state:
        mean += state["residual"]
    encoded = again.encode(mean, context)
    return Pulled(encoded.payload, lossless=False), {"residual": encoded.subtract_sent(mean)}


def _united(merger: Merger, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    if can_unite(merger):
        return merger.unite(payloads, like)
    return merger.pack_mean(merger.combine(payloads, like))
