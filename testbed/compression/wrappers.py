"""Compressors around another one: error feedback, warm-up, and by message size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from testbed.base.errors import UsageError
from testbed.base.parts import OURS, PUBLISHED, Part
from testbed.compression.casts import Cast, Dense
from testbed.compression.common import (
    nested,
    ratio_of,
    require_between,
    require_form,
    require_ratio,
    taken_from,
    with_ratio,
)
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Compressor,
    Context,
    Conversation,
    Exchanged,
    State,
)


@dataclass(frozen=True)
class FeedbackOptions:
    """Options of `ef`.

    Attributes:
        units: what is kept is a `gradient`, or an `update` (gradient times learning rate), which
            an old residual then enters with the rate of its own step. They differ only where the
            learning rate changes.
    """

    units: Literal["gradient", "update"] = "gradient"


@dataclass(frozen=True)
class ErrorFeedback:
    """`ef+C`: what compressor C did not send is added to the next gradient.

        v = x + residual;  send C(v);  residual = v - sent

    Over any number of steps what was sent plus what is kept equals what was given.

    Bytes: those of C. State: n elements, and C's own.

    Attributes:
        inner: the compressor C.
        options: see `FeedbackOptions`.

    Raises:
        UsageError: C keeps its own residual already; `update` without a learning rate.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> from testbed.compression.topk import TopK
        >>> job = Lockstep(ErrorFeedback(Gathered(TopK(0.5))), num_workers=1)
        >>> [job.exchange([torch.tensor([3.0, 2.0])])[0].mean.tolist() for step in range(2)]
        [[3.0, 0.0], [0.0, 4.0]]

    Reference:
        Seide et al., 2014, Interspeech; Karimireddy et al., 2019, ICML (EF-SGD). Departs: the
        residual is in units of gradients unless `units=update`.
    """

    inner: Compressor
    options: FeedbackOptions = FeedbackOptions()

    def __post_init__(self) -> None:
        if self.inner.claims.keeps:
            raise UsageError(
                "ef stands left of a compressor that already keeps what it does not send; leave "
                "ef out (for powersgd and acp-sgd: or add feedback=0)"
            )

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims(
            mean_of_sent=self.inner.claims.mean_of_sent, keeps=True, feedback=self.options.units
        )

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state` holds `residual` [n] and the inner state."""
        require_form(values, context)
        before = state.get("residual")
        if before is None:
            wanted = values.clone()
        else:
            _require_same_size(values, before, context)
            # A caller who gives up its values gives up the old residual, too: its memory is kept.
            memory = before if context.out is values else None
            aging = self.aging(state, context.learning_rate)
            wanted = torch.add(values, before, alpha=aging, out=memory)
        done = yield from self.send(wanted, state, context)

        def subtract_sent(given: torch.Tensor) -> torch.Tensor:
            # What was sent is what was wanted (the values and the old residual) less what is kept.
            given.add_(done.state["residual"]).sub_(values)
            return given if before is None else given.sub_(before, alpha=aging)

        return Exchanged(done.mean, done.state, subtract_sent)

    def send(self, wanted: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Feedback.send`."""
        done = yield from self.inner.exchange(wanted, taken_from("inner", state), context)
        kept = {"residual": done.subtract_sent(wanted), **nested("inner", done.state)}
        if self.options.units == "update":
            rate = _above_zero(context.learning_rate)
            kept["learning_rate"] = torch.tensor(rate, dtype=torch.float64)
        return Exchanged(done.mean, kept, done.subtract_sent)

    def aging(self, state: State, learning_rate: float | None) -> float:
        """See `Feedback.aging`: old over new learning rate, in units of updates."""
        if self.options.units == "gradient":
            return 1.0
        rate = _above_zero(learning_rate)
        return float(state["learning_rate"]) / rate if "learning_rate" in state else 1.0

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self.inner.payload_bytes(num_elements, element_bytes, context)


def _require_same_size(values: torch.Tensor, residual: torch.Tensor, context: Context) -> None:
    if values.shape != residual.shape:
        raise UsageError(
            f"message {context.key!r} has {values.numel()} elements, the residual kept for it "
            f"{residual.numel()}; state belongs to one message of one plan"
        )


def _above_zero(learning_rate: float | None) -> float:
    if not learning_rate:
        given = "parameter groups have several" if learning_rate is None else "this step's is 0"
        raise UsageError(
            "ef:units=update needs a learning rate above 0, the same for all parameters, and "
            f"{given}; let a schedule begin and end above 0, or write ef without units"
        )
    return learning_rate


# Small messages go uncompressed: their cost is latency, not bytes.


@dataclass(frozen=True)
class BySizeOptions:
    """Options of `by-size`.

    Attributes:
        min_elements: messages with fewer elements take `small`.
        small: `none`, `fp16` or `bf16`.
    """

    min_elements: int = 1024
    small: Literal["none", "fp16", "bf16"] = "none"

    def __post_init__(self) -> None:
        require_between("by-size", "min_elements", self.min_elements, 0, float("inf"))


@dataclass(frozen=True)
class BySize:
    """`by-size+C`: compressor C for messages of `min_elements` and more, else a dense one.

        n >= min_elements:  C;  else: small

    What small messages cost is start-up time, which compression does not shorten. What C holds back
    of a message is lost where a new plan makes its elements part of a small one; `ef+by-size+C`
    sends it.

    Bytes: those of C or of `small`.

    Attributes:
        inner: C, for the large ones.
        options: see `BySizeOptions`.

    Raises:
        UsageError: C does the optimizer's momentum, which small messages would then lack.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> from testbed.compression.topk import TopK
        >>> job = Lockstep(BySize(Gathered(TopK(0.1)), BySizeOptions(4)), num_workers=1)
        >>> job.exchange([torch.ones(3)])[0].mean, job.exchange([torch.ones(4)])[0].mean
        (tensor([1., 1., 1.]), tensor([1., 0., 0., 0.]))

    Reference:
        Common practice, as in Lin et al., 2018, ICLR (DGC), who leave biases uncompressed. Departs:
        the size of the message decides, not the kind of its tensors.
    """

    inner: Compressor
    options: BySizeOptions

    def __post_init__(self) -> None:
        if self.inner.claims.carries_momentum:
            raise UsageError(
                "by-size stands before a compressor that does the momentum of SGD itself, so that "
                "small messages would train without any; leave by-size out (of few elements "
                "dgc sends few bytes), or give the compressor momentum=0"
            )

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`; those that hold for messages of either size."""
        return Claims(
            mean_of_sent=self.inner.claims.mean_of_sent and self.options.small == "none",
            keeps=self.inner.claims.keeps,
        )

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        chosen = self._for(values.numel())
        return chosen.exchange(values, state if chosen is self.inner else {}, context)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self._for(num_elements).payload_bytes(num_elements, element_bytes, context)

    def _for(self, num_elements: int) -> Compressor:
        if num_elements >= self.options.min_elements:
            return self.inner
        return Dense() if self.options.small == "none" else Cast(self.options.small)


# Sparsify gently at first: a ratio that falls to its final value in stages.


def density_at(
    step: int, final: float, stage_steps: int, start: float = 0.25, factor: float = 0.25
) -> float:
    """The ratio of a step: start factor^(step // stage_steps), but never below `final`.

    Example:
        >>> [density_at(s, 0.001, 100) for s in (0, 99, 100, 399, 400)]
        [0.25, 0.25, 0.0625, 0.00390625, 0.001]

    Reference:
        Lin et al., 2018, ICLR (DGC): 25, 6.25, 1.56, 0.39, 0.1 %, an epoch each.
    """
    # From where on it is `final` anyway, the power is not needed and might underflow.
    return max(final, start * factor ** min(step // stage_steps, 1000))


@dataclass(frozen=True)
class WarmUpOptions:
    """Options of `warmup`.

    Attributes:
        stage_steps: steps of each stage.
        start: ratio of the first stage.
        factor: from one stage's ratio to the next.
    """

    stage_steps: int = 100
    start: float = 0.25
    factor: float = 0.25

    def __post_init__(self) -> None:
        require_between("warmup", "stage_steps", self.stage_steps, 1, 1e9)
        require_ratio("warmup start", self.start)
        require_between("warmup", "factor", self.factor, 0.0, 0.999)


@dataclass(frozen=True)
class WarmUp:
    """`warmup+C`: a compressor whose ratio falls from `start` to its own, in stages.

        ratio(step) = max(ratio of C, start factor^floor(step / stage_steps))

    Bytes: those of C at the ratio of the step.

    Attributes:
        inner: C, any compressor with a ratio, however deep.
        options: see `WarmUpOptions`.

    Raises:
        UsageError: C has no ratio.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> from testbed.compression.topk import TopK
        >>> job = Lockstep(WarmUp(Gathered(TopK(0.1)), WarmUpOptions(stage_steps=1)), num_workers=1)
        >>> [int(job.exchange([torch.ones(10)])[0].mean.count_nonzero()) for step in range(3)]
        [3, 1, 1]

    Reference:
        Lin et al., 2018, ICLR (DGC). Departs: the length of a stage is an option, not an epoch; any
        compressor with a ratio.
    """

    inner: Compressor
    options: WarmUpOptions

    def __post_init__(self) -> None:
        ratio_of(self.inner)

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return replace(self.inner.claims, feedback="none")  # its ratio is another at each step

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; the state is the inner one's."""
        return self._at(context.step).exchange(values, state, context)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self._at(context.step).payload_bytes(num_elements, element_bytes, context)

    def _at(self, step: int) -> Compressor:
        o = self.options
        ratio = density_at(step, ratio_of(self.inner), o.stage_steps, o.start, o.factor)
        compressor: Compressor = with_ratio(self.inner, ratio)
        return compressor


EF = Part(
    name="ef",
    summary="error feedback around the compressor to its right (units)",
    origin=PUBLISHED,
    build=ErrorFeedback,
    options=FeedbackOptions,
    wraps=True,
)

WARMUP = Part(
    name="warmup",
    summary="a ratio that falls to that on its right (stage_steps, start, factor)",
    origin=PUBLISHED,
    build=WarmUp,
    options=WarmUpOptions,
    wraps=True,
)

BY_SIZE = Part(
    name="by-size",
    summary="the compressor to its right for large messages only (min_elements, small)",
    origin=OURS,
    build=BySize,
    options=BySizeOptions,
    wraps=True,
)
