"""Traces of well-known models without a profile: sizes are exact, times follow operation counts.

Legend: c channels, k kernel width, hw height (= width) of the output, H hidden size. A weight costs
its multiplications per sample, normalisations 8 operations per output value, biases nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from testbed.base.trace import Trace, TraceTensor


class Tensor(NamedTuple):
    """A parameter tensor and its share of the computation."""

    name: str
    num_elements: int
    cost: int


RESNET_BLOCKS = {
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}


def synthetic_trace(
    model: str, backward_s: float, forward_s: float | None = None, batch_size: int = 32
) -> Trace:
    """A trace whose backward and forward time are spread over the tensors by their cost.

    Args:
        model: resnet50, resnet101, resnet152 or bert-base.
        backward_s: of the whole model.
        forward_s: of the whole model; None = half of `backward_s`.
        batch_size: for the record; nothing depends on it.

    Example:
        >>> trace = synthetic_trace("resnet50", 0.0648)
        >>> len(trace.tensors), trace.num_bytes // 4
        (161, 25557032)
    """
    tensors = list(_bert_base() if model == "bert-base" else _resnet(RESNET_BLOCKS[model]))
    total = sum(t.cost for t in tensors)
    forward = backward_s / 2 if forward_s is None else forward_s
    return Trace(
        name=model,
        device="synthetic",
        batch_size=batch_size,
        tensors=tuple(
            TraceTensor(
                name=t.name,
                num_elements=t.num_elements,
                forward_s=t.cost / total * forward,
                backward_s=t.cost / total * backward_s,
            )
            for t in tensors
        ),
    )


def _resnet(blocks: tuple[int, ...]) -> Iterator[Tensor]:
    yield from _conv("stem.conv", 3, 64, 7, 112)
    yield from _norm("stem.norm", 64, 112)
    channels = 64
    for stage, count in enumerate(blocks):
        width, hw = 64 << stage, 56 >> stage
        for block in range(count):
            name = f"stage{stage}.block{block}"
            # The first block of a later stage halves the resolution in its 3x3 convolution.
            before = 2 * hw if block == 0 and stage > 0 else hw
            yield from _conv(f"{name}.conv1", channels, width, 1, before)
            yield from _norm(f"{name}.norm1", width, hw)
            yield from _conv(f"{name}.conv2", width, width, 3, hw)
            yield from _norm(f"{name}.norm2", width, hw)
            yield from _conv(f"{name}.conv3", width, 4 * width, 1, hw)
            yield from _norm(f"{name}.norm3", 4 * width, hw)
            if block == 0:
                yield from _conv(f"{name}.shortcut", channels, 4 * width, 1, hw)
                yield from _norm(f"{name}.shortcut_norm", 4 * width, hw)
            channels = 4 * width
    yield Tensor("classifier.weight", 2048 * 1000, 2048 * 1000)
    yield Tensor("classifier.bias", 1000, 0)


def _conv(name: str, c_in: int, c_out: int, k: int, hw: int) -> Iterator[Tensor]:
    num_elements = c_in * c_out * k * k
    yield Tensor(f"{name}.weight", num_elements, num_elements * hw * hw)


def _norm(name: str, c: int, hw: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", c, 8 * c * hw * hw)
    yield Tensor(f"{name}.bias", c, 0)


def _bert_base(hidden: int = 768) -> Iterator[Tensor]:
    yield Tensor("embeddings.words", 30522 * hidden, 4096 * hidden)
    yield Tensor("embeddings.positions", 512 * hidden, 0)
    yield Tensor("embeddings.types", 2 * hidden, 0)
    yield from _layer_norm("embeddings.norm", hidden)
    for layer in range(12):
        name = f"layer{layer}"
        for part in ("query", "key", "value", "output"):
            yield from _linear(f"{name}.attention.{part}", hidden, hidden)
        yield from _layer_norm(f"{name}.attention.norm", hidden)
        yield from _linear(f"{name}.wide", hidden, 4 * hidden)
        yield from _linear(f"{name}.narrow", 4 * hidden, hidden)
        yield from _layer_norm(f"{name}.norm", hidden)
    yield from _linear("pooler", hidden, hidden)


def _linear(name: str, num_in: int, num_out: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", num_in * num_out, 4096 * num_in * num_out)
    yield Tensor(f"{name}.bias", num_out, 0)


def _layer_norm(name: str, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", hidden, 16384 * hidden)
    yield Tensor(f"{name}.bias", hidden, 0)
