"""Means that a compressor makes: the way to deliver gradients of a session with a compressor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from testbed.backends.protocol import Backend
from testbed.base.plan import decode_plan, encode_plan
from testbed.base.types import Traffic
from testbed.control.protocol import Control
from testbed.records.cell import CompressionResult
from testbed.training.compressed.costs import summarise
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.reducer import CompressedReducer, ErrorProbe, Shapes, shapes_of
from testbed.training.compressed.spec import Compression, refuse_unfit
from testbed.training.compressed.state import carried, packed, unpacked
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer, StepState
from testbed.training.exchange.setup import agree_on
from testbed.training.exchange.update import MeanGradients


class CompressionEngine(MeanGradients):
    """See `Delivery`: a compressor exchanges the messages and makes their means.

    Args:
        compression: the compressor.
        backend: opened.
        control: the job's control plane.
        named: the parameters that are trained.
        optimizer: theirs; its learning rate is told to the compressor.
        check_finite: see `Session`.
        patience_s: see `Session`.

    Attributes:
        driver: runs the compressor's rounds.
        probe: compares means with the true ones.

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
        super().__init__(backend, 1, check_finite)
        refuse_unfit(compression, backend, named, optimizer, check_finite)
        agree_on("compressors", [f"{compression.text} {compression.seed}"], control, backend.size)
        self._device = named[0][1].device
        self.driver = Conversations(compression, backend, self._device)
        self.probe = ErrorProbe(
            *(backend, control, self.driver.num_workers, compression.compared_steps, patience_s)
        )
        self._optimizer = optimizer
        self._shapes: Sequence[Shapes] = ()

    def adopt(self, buckets: GradientBuckets) -> None:
        """See `Delivery.adopt`; halves are no matter, a compressor's rounds are exchanged whole."""
        self._buckets = buckets
        self._shapes = shapes_of(buckets.plan, buckets.parameters)
        self.driver.adopt(buckets.plan, buckets.keys)

    def reducer(self, step: StepState) -> GradientReducer:
        """See `Delivery.reducer`."""
        return CompressedReducer(
            *(self._buckets, self._backend, step),
            driver=self.driver,
            shapes=self._shapes,
            rate=self._learning_rate,
            probe=self.probe,
        )

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps, for a checkpoint of this rank."""
        plan, keys = self._buckets.plan, self._buckets.keys
        return {"states": packed(self.driver.states), "plan": encode_plan(plan), "keys": keys}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        The plan may be another one by now (another scheduler, or a link measured anew): what was
        held back follows its elements, as when a plan is made anew in a run.
        """
        states = unpacked(saved["states"], self._device)
        old, buckets = decode_plan(saved["plan"], "checkpoint"), self._buckets
        self.driver.states = carried(states, old, saved["keys"], buckets.plan, buckets.keys)

    def result(self, num_steps: int) -> CompressionResult:
        """The record of this rank, from the costs of the last `num_steps` steps."""
        driver = self.driver
        return summarise(
            driver.compression.text,
            [costs for _, costs in sorted(driver.costs.items())][-num_steps:],
            self.probe.relative_errors,
            driver.state_bytes,
            driver.compression.note,
        )

    @property
    def excluded_traffic(self) -> Traffic:
        """What was moved to compare means with the true ones."""
        return self.probe.traffic

    def take_excluded_s(self) -> float:
        """Seconds that comparing took since the last call."""
        spent_s, self.probe.spent_s = self.probe.spent_s, 0.0
        return spent_s

    def close(self) -> None:
        """End the threads that compress; whatever is still under way fails."""
        self.driver.close()

    def _learning_rate(self) -> float | None:
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        return rates.pop() if len(rates) == 1 else None
