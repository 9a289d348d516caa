"""Error feedback: what was not sent is added to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from testbed.compression.checks import require_form
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Compressor,
    Context,
    Conversation,
    Exchanged,
    State,
)
from testbed.compression.state import nested, taken_from
from testbed.errors import UsageError


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
    """Around any compressor C: wanted = gradient + residual; send C(wanted); keep the rest.

    Over any number of steps what was sent plus what is kept equals what was given.

    Bytes: those of C. State: n elements, and C's own.

    Attributes:
        inner: the compressor C.
        options: see `FeedbackOptions`.

    Raises:
        UsageError: C keeps its own residual already; `update` without a learning rate.

    Reference:
        Seide et al., 2014, Interspeech; Karimireddy et al., 2019, ICML (EF-SGD).
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
        return Claims(mean_of_sent=self.inner.claims.mean_of_sent, keeps=True)

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
            wanted = torch.add(values, before, alpha=self._aging(state, context), out=memory)
        inner_state = taken_from("inner", state)
        done = yield from self.inner.exchange(wanted, inner_state, context)
        kept = {"residual": done.subtract_sent(wanted), **nested("inner", done.state)}
        if self.options.units == "update":
            kept["learning_rate"] = torch.tensor(_learning_rate(context), dtype=torch.float64)

        def subtract_sent(given: torch.Tensor) -> torch.Tensor:
            # What was sent is what was wanted (the values and the old residual) less what is kept.
            given.add_(kept["residual"]).sub_(values)
            return (
                given if before is None else given.sub_(before, alpha=self._aging(state, context))
            )

        return Exchanged(done.mean, kept, subtract_sent)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self.inner.payload_bytes(num_elements, element_bytes, context)

    def _aging(self, state: State, context: Context) -> float:
        """What the residual is multiplied by: old over new learning rate, in units of updates."""
        if self.options.units == "gradient":
            return 1.0
        return float(state["learning_rate"]) / _learning_rate(context)


def _require_same_size(values: torch.Tensor, residual: torch.Tensor, context: Context) -> None:
    if values.shape != residual.shape:
        raise UsageError(
            f"message {context.key!r} has {values.numel()} elements, the residual kept for it "
            f"{residual.numel()}; state belongs to one message of one plan"
        )


def _learning_rate(context: Context) -> float:
    if not context.learning_rate:
        raise UsageError("ef:units=update needs a learning rate above 0; give the step's own")
    return context.learning_rate
