"""Specifications of compressors, and what is refused."""

import pytest

from testbed.base.errors import Disagreement, UnknownName, UsageError
from testbed.base.spec import split_chain, split_specs
from testbed.base.types import Op
from testbed.compression.gathered import Gathered
from testbed.compression.lockstep import Lockstep, carry_out
from testbed.compression.protocol import Round
from testbed.compression.topk import TopK
from testbed.compression.wrappers import BySize, ErrorFeedback
from tests.harness.compressors import messages, resolve_compressor


def test_a_chain_is_built_from_right_to_left():
    built = resolve_compressor("by-size:min_elements=9+ef+topk:ratio=0.5")
    assert isinstance(built, BySize)
    assert isinstance(built.inner, ErrorFeedback)
    assert built.inner.inner == Gathered(TopK(0.5))


def test_lists_of_chains_and_exponents():
    text = "ef+topk:ratio=0.01,by-size:min_elements=10,small=fp16+ef+sign,qsgd"
    assert split_specs(text) == (
        "ef+topk:ratio=0.01",
        "by-size:min_elements=10,small=fp16+ef+sign",
        "qsgd",
    )
    (link,) = split_chain("threshold:value=1e+3")
    assert resolve_compressor(link).codec.value == 1000


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:ratio=1.5", r"topk ratio is 1.5; expected 0 < ratio <= 1; for 1.5 % write 0.015"),
        ("topk:ratio=0", r"expected 0 < ratio <= 1$"),
        ("topk:ratio=-0.1", r"expected 0 < ratio <= 1$"),
        ("topk-sampled:ratio=nan", r"expected 0 < ratio <= 1$"),
        ("randomk:ratio=2", r"for 2 % write 0.02"),
        ("gtopk:ratio=0", r"gtopk ratio"),
        ("gtopk:residual=lost", r"expected one of conserving, published"),
        ("oktopk:every=0", r"oktopk every is 0; expected 1 to"),
        ("dgc:ratio=5", r"dgc ratio is 5"),
        ("dgc:momentum=1", r"dgc momentum is 1; expected 0 to 0.9999"),
        ("threshold:value=0", r"expected a number above 0"),
        ("threshold:value=inf", r"expected a number above 0"),
        ("qsgd:bits=9", r"qsgd bits is 9; expected 2 to 8"),
        ("qsgd:bucket=3", r"expected 8 or more, or 0"),
        ("onebit:bucket=7", r"onebit bucket is 7"),
        ("sign:bucket=7", r"sign bucket is 7"),
        ("ef-sign:bucket=-8", r"ef-sign bucket is -8"),
        ("terngrad:clip_sigmas=-1", r"terngrad clip_sigmas is -1"),
        ("powersgd:rank=0", r"rank is 0; expected 1 to 4096"),
        ("topk:k=3", r"'topk' has no option 'k'; known options: ratio"),
        ("ef", r"'ef' needs a compressor to its right; write ef\+NAME"),
        ("topk+ef", r"'ef' needs a compressor to its right"),
        ("topk+sign", r"'topk' cannot stand left of another compressor; only wrappers can"),
        ("ef+dgc", r"already keeps what it does not send; leave ef out"),
        ("ef+powersgd", r"add feedback=0"),
        ("ef+ef+topk", r"already keeps"),
        ("warmup+sign", r"warmup needs a compressor with a ratio to its right, not Sign"),
        ("warmup:start=0+topk", r"warmup start ratio is 0"),
        ("by-size:min_elements=-1+topk", r"by-size min_elements is -1"),
        ("ef+", r"has no name"),
    ],
)
def test_bad_specifications_are_refused_by_name(spec, message):
    with pytest.raises(UsageError, match=message):
        resolve_compressor(spec)


def test_unknown_names_list_the_known():
    with pytest.raises(UnknownName, match=r"no compressor 'topkk'; known: .*did you mean 'topk'"):
        resolve_compressor("ef+topkk")


def test_residuals_belong_to_one_message():
    ranks = Lockstep(resolve_compressor("ef+topk"), 1)
    ranks.exchange(messages(1, 0, 50))
    with pytest.raises(UsageError, match="has 60 elements, the residual kept for it 50"):
        ranks.exchange(messages(1, 0, 60))


def test_units_of_updates_need_a_learning_rate():
    ranks = Lockstep(resolve_compressor("ef:units=update+topk"), 1)
    with pytest.raises(UsageError, match="needs a learning rate above 0"):
        ranks.exchange(messages(1))


def test_shapes_must_fit_the_message():
    ranks = Lockstep(resolve_compressor("powersgd"), 1, shapes=((4, 4),))
    with pytest.raises(UsageError, match="hold 16 elements, the message 700"):
        ranks.exchange(messages(1))


def test_ranks_that_converse_differently_are_refused():
    rounds = [Round(Op.ALL_REDUCE, ()), Round(Op.ALL_GATHER, ())]
    with pytest.raises(Disagreement, match="different operations: all-gather, all-reduce"):
        carry_out(rounds)
