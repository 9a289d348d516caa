"""Mergers in words: every merger of every compressor comes back, and nothing else is built."""

import json

import pytest
import torch

from testbed.base.errors import UsageError
from testbed.compression.lockstep import Lockstep, carry_out
from testbed.compression.protocol import Context
from testbed.compression.quantize import Natural, Quantised
from testbed.compression.server_merge import (
    build,
    can_describe,
    describe,
    encoder_of,
    known_parts,
    merge,
)
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.topk import TopK
from tests.harness.compressors import SHAPES, SPECS, messages, resolve_compressor


def rounds_of(spec, num_workers=2):
    """All rounds of one exchange over two ranks."""
    seen = []

    def answer(rounds):
        seen.append(rounds)
        return carry_out(rounds)

    job = Lockstep(resolve_compressor(spec), num_workers, shapes=SHAPES, answer=answer)
    job.exchange(messages(num_workers))
    return seen


def with_mergers():
    return [spec for spec in SPECS if any(r[0].merger is not None for r in rounds_of(spec))]


def test_compressors_that_gather_and_combine_have_mergers():
    # What sums, delivers or gathers regions has none.
    assert {"topk", "dgc", "sign", "qsgd", "natural", "onebit"} <= set(with_mergers())
    assert not {"none", "fp16", "randomk", "gtopk", "oktopk", "powersgd"} & set(with_mergers())


@pytest.mark.parametrize("spec", with_mergers())
def test_a_merger_comes_back_and_merges_alike(spec):
    for rounds in rounds_of(spec):
        merger, payloads = rounds[0].merger, tuple(given.parts[0] for given in rounds)
        text = describe(merger, 700, torch.float32, again=encoder_of(merger, True), seed=5)
        back = build(text)
        assert describe(back.merger, 700, torch.float32, again=back.again, seed=5) == text
        assert type(back.merger) is type(merger)
        assert (back.num_elements, back.dtype, back.seed) == (700, torch.float32, 5)
        assert back.dense_bytes == 2800
        for again in (None, encoder_of(merger, True)):
            context, like = Context(rank=2), torch.zeros(700)
            ours = merge(merger, payloads, like, {}, context, again)[0]
            theirs = merge(back.merger, payloads, back.like(), {}, context, again and back.again)[0]
            assert torch.equal(ours.payload, theirs.payload)
            assert ours.lossless == theirs.lossless == (again is None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_comes_back(dtype):
    assert build(describe(SparseMerger(), 3, dtype)).like().dtype == dtype


def test_every_part_is_used_by_a_compressor_or_within_one():
    used = json.dumps([describe(r[0].merger, 1, torch.float32) for s in SPECS
                       for r in rounds_of(s) if r[0].merger is not None])  # fmt: skip
    assert all(f'\\"part\\": \\"{name}\\"' in used for name in known_parts())


class Foreign(SparseMerger):
    """A merger that no server knows; it must not pass for its base class."""


def test_what_no_server_knows_can_only_be_gathered():
    assert can_describe(Quantised(Natural()))
    for unknown in (Foreign(), Quantised(Foreign()), object()):
        assert not can_describe(unknown)
    with pytest.raises(UsageError, match="no server can merge by Foreign; known"):
        describe(Foreign(), 3, torch.float32)
    with pytest.raises(UsageError, match="int32; a merged message has one of float64"):
        describe(SparseMerger(), 3, torch.int32)


def words(**changes):
    return json.dumps(json.loads(describe(TopK(0.1), 700, torch.float32)) | changes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a merger's description"),
        (b"\xff\xfe", "a merger's description"),
        ("{}", "merger"),
        (words(num_elements=-1), "-1 elements"),
        (words(dtype="int64"), "700 elements of int64"),
        (words(more=1), "more"),
        (words(merger={}), "part is None; expected one of topk, sparse"),
        (words(merger={"part": "os.system"}), "part is 'os.system'"),
        (words(merger={"part": ["topk"]}), "part is"),
        (words(merger={"part": "levels", "bits": 4}), "part is 'levels'"),  # not a merger
        (words(again={"part": "sparse"}), "part is 'sparse'; expected one of topk"),
        (words(merger={"part": "topk", "ration": 1}), "no option ration; it has ratio"),
        (words(merger={"part": "topk", "ratio": 2}), "0 < ratio"),
        (words(merger={"part": "topk", "ratio": "1"}), "cannot be made of"),
        (words(merger={"part": "topk", "ratio": {"part": "sparse"}}), "part is 'sparse'"),
        (words(merger={"part": "quantised"}), "cannot be made of"),
        (words(merger={"part": "quantised", "quantiser": 3}), "cannot be made of"),
        (words(merger={"part": "quantised", "quantiser": {"part": "sign"}}), "part is 'sign'"),
    ],
)
def test_other_words_are_refused(text, complaint):
    with pytest.raises(UsageError, match=complaint):
        build(text)
