"""What a session has more where a compressor carries its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from testbed.backends.protocol import Backend
from testbed.base.plan import Plan, decode_plan, encode_plan
from testbed.control.protocol import Control
from testbed.records.cell import CompressionResult
from testbed.training.compressed.costs import summarise
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.reducer import Comparison, CompressedFlight, Shapes, shapes_of
from testbed.training.compressed.spec import Compression, refuse_unfit
from testbed.training.compressed.state import carried, packed, unpacked
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.setup import agree_on


class Compressing:
    """Conversations, and the comparison of their means with the true ones.

    Args:
        compression: the compressor.
        backend: opened.
        control: the job's control plane.
        named: the parameters that are trained.
        optimizer: theirs; its learning rate is told to the compressor.
        check_finite: see `Session`.
        patience_s: see `Session`.

    Raises:
        UsageError: see `refuse_unfit`.
        Disagreement: ranks were given different compressors.
    """

    def __init__(
        self,
        compression: Compression,
        backend: Backend,
        control: Control,
        named: Sequence[tuple[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        check_finite: bool,
        patience_s: float,
    ) -> None:
        refuse_unfit(compression, backend, named, optimizer, check_finite)
        agree_on("compressors", [f"{compression.text} {compression.seed}"], control, backend.size)
        self.conversations = Conversations(compression, backend, named[0][1].device)
        self.comparison = Comparison(
            backend,
            control,
            self.conversations.num_workers,
            compression.compared_steps,
            patience_s,
        )
        self._backend = backend
        self._optimizer = optimizer
        self._shapes: Sequence[Shapes] = ()

    def adopt(self, plan: Plan, keys: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Carry out this plan from now on."""
        self._shapes = shapes_of(plan, parameters)
        self.conversations.adopt(plan, keys)

    def flight(
        self, plan: Plan, fusion: GradientBuckets, keys: Sequence[str], step: int
    ) -> GradientReducer:
        """The messages of a step."""
        return CompressedFlight(
            *(plan, fusion, keys, self._backend, step),
            conversations=self.conversations,
            shapes=self._shapes,
            rate=self._learning_rate,
            keeps={} if self.comparison.due else None,
        )

    def saved(self) -> dict[str, Any]:
        """What is kept between steps, for a checkpoint of this rank.

        The tensors are those that the next step overwrites: save or copy them before it.
        """
        plan, keys = self.conversations.adopted
        states = packed(self.conversations.states)
        return {"states": states, "plan": encode_plan(plan), "keys": list(keys)}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Go on with what `saved` gave.

        The plan may be another one by now (another scheduler, or a link measured anew): what was
        held back follows its elements, as when a plan is made anew in a run.
        """
        states = unpacked(saved["states"], device)
        old = decode_plan(saved["plan"], "checkpoint")
        self.conversations.states = carried(states, old, saved["keys"], *self.conversations.adopted)

    def result(self, first_step: int) -> CompressionResult:
        """The record of this rank, from the costs of all steps from `first_step`."""
        conversations = self.conversations
        steps = [c for step, c in sorted(conversations.costs.items()) if step >= first_step]
        return summarise(
            conversations.compression.text,
            steps,
            self.comparison.relative_errors,
            conversations.state_bytes,
            conversations.compression.note,
        )

    def compare(self, flight: GradientReducer, keys: Sequence[str], step: int) -> None:
        """Compare a step's means with the true ones, if it is one of the first."""
        if isinstance(flight, CompressedFlight):
            self.comparison.compare(flight, keys, step)

    def _learning_rate(self) -> float | None:
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        return rates.pop() if len(rates) == 1 else None
