"""Means that a compressor makes: the way to deliver gradients of a session with a compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from testbed.backends.protocol import Backend
from testbed.base.errors import UsageError
from testbed.base.plan import Message, Plan, decode_plan, encode_plan
from testbed.base.types import Traffic
from testbed.control.protocol import Control
from testbed.memory.strategy import Mirror
from testbed.records.cell import CompressionResult
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.mirror import (
    Lost,
    MirrorBuckets,
    MirrorReducer,
    refuse_unmirrored,
)
from testbed.training.compressed.reducer import CompressedReducer, ErrorProbe, Shapes
from testbed.training.compressed.spec import Compression, refuse_unfit
from testbed.training.compressed.state import carried, packed, unpacked
from testbed.training.compressed.work import summarise
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.setup import agree_on
from testbed.training.exchange.step_state import StepState
from testbed.training.exchange.update import MeanGradients
from testbed.training.optimizers import shared_learning_rate


def shapes_of(plan: Plan, parameters: Sequence[torch.Tensor]) -> list[Shapes]:
    """For each message the shapes of its parts: a whole tensor's own, a slice has one dimension.

    Example:
        >>> from testbed.base.plan import TensorSlice
        >>> plan = Plan(scheduler="x", names=("a",), num_elements=(6,), dtypes=("float32",),
        ...             messages=(Message(parts=(TensorSlice(0, 0, 6),)),
        ...                       Message(parts=(TensorSlice(0, 0, 4),))))
        >>> shapes_of(plan, [torch.zeros(2, 3)])
        [((2, 3),), ((4,),)]
    """
    return [_shapes(message, parameters) for message in plan.messages]


def _shapes(message: Message, parameters: Sequence[torch.Tensor]) -> Shapes:
    found = []
    for part in message.parts:
        parameter, length = parameters[part.tensor], part.stop - part.start
        whole = length == parameter.numel() and parameter.dim() > 0
        found.append(tuple(parameter.shape) if whole else (length,))
    return tuple(found)


class CompressionEngine(MeanGradients):
    """See `Delivery`: a compressor exchanges the messages and makes their means.

    Args:
        compression: the compressor.
        mirror: where and how what was not sent is kept; None = as the compressor does.
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
        mirror: Mirror | None,
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
        self._learning_rate = partial(shared_learning_rate, optimizer)
        self._shapes: Sequence[Shapes] = ()
        self._mirror = mirror
        self._lost = Lost()

    def adopt(self, buckets: GradientBuckets) -> None:
        """See `Delivery.adopt`; halves are no matter, a compressor's rounds are exchanged whole."""
        self._buckets = buckets
        self._shapes = shapes_of(buckets.plan, buckets.parameters)
        self.driver.adopt(buckets.plan, buckets.keys)
        if self._mirror is not None:
            self._buckets = MirrorBuckets(
                *(buckets, self._mirror, self.driver, self._learning_rate, self._lost)
            )

    def reducer(self, step: StepState) -> GradientReducer:
        """See `Delivery.reducer`."""
        more: Any = {
            "driver": self.driver,
            "shapes": self._shapes,
            "rate": self._learning_rate,
            "probe": self.probe,
        }
        if isinstance(self._buckets, MirrorBuckets):
            return MirrorReducer(self._buckets, self._backend, step, **more)
        return CompressedReducer(self._buckets, self._backend, step, **more)

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps, for a checkpoint of this rank."""
        plan, keys = self._buckets.plan, self._buckets.keys
        kept = packed(self.driver.states)
        return {"of": self.name, "states": kept, "plan": encode_plan(plan), "keys": keys}

    @property
    def name(self) -> str:
        """What its state belongs to: the state of another compressor, or world, says nothing."""
        return f"compressor {self.driver.compression.text!r} among {self._backend.size} ranks"

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        The plan may be another one by now (another scheduler, or a link measured anew): what was
        held back follows its elements, as when a plan is made anew in a run.
        """
        states = unpacked(saved["states"], self._device)
        old, buckets = decode_plan(saved["plan"], "checkpoint"), self._buckets
        self.driver.states = carried(states, old, saved["keys"], buckets.plan, buckets.keys)
        if isinstance(buckets, MirrorBuckets):
            buckets.settle_all()

    def result(self, num_steps: int) -> CompressionResult:
        """The record of this rank, from the costs of the last `num_steps` steps."""
        driver = self.driver
        return summarise(
            driver.compression.text,
            [costs for _, costs in sorted(driver.costs.items())][-num_steps:],
            self.probe.relative_errors,
            driver.state_bytes,
            "; ".join(filter(None, (driver.compression.note, self._lost.note))),
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


def resumption(
    engine: CompressionEngine | None, saved: Mapping[str, Any] | None
) -> Callable[[], None]:
    """What goes on with what a session saved of its compressor; it is checked before.

    Args:
        engine: of the session that goes on; None: it has no compressor.
        saved: by `CompressionEngine.state_dict`; None: that session had none.

    Raises:
        UsageError: they are not of the same compressor and number of ranks.
    """
    own = "no compressor" if engine is None else engine.name
    theirs = "no compressor" if saved is None else saved.get("of", own)
    if own != theirs:
        raise UsageError(
            f"the session's state was saved under {theirs} and this one has {own}; what a "
            "compressor held back fits no other: go on with the same"
        )
    if engine is None or saved is None:
        return lambda: None
    return partial(engine.load_state_dict, saved)


def engine_of(
    compression: Compression | None,
    mirror: Mirror | None,
    backend: Backend,
    control: Control,
    named: Sequence[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    check_finite: bool,
    patience_s: float,
) -> CompressionEngine | None:
    """See `CompressionEngine`; None where nothing is compressed.

    Raises:
        UsageError: see `refuse_unmirrored`.
    """
    if mirror is not None:
        refuse_unmirrored(mirror, compression, named)
    if compression is None:
        return None
    return CompressionEngine(
        *(compression, mirror, backend, control, named, optimizer),
        check_finite=check_finite,
        patience_s=patience_s,
    )
