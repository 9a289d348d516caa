"""Which parameters no rank has used in a step: they get no gradient and stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.types import Op, Request
from testbed.control.protocol import Control, gather
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.step_state import StepState
from testbed.training.exchange.update import Unused

KEY = "(parameters in use)"


class UnusedParameters:
    """Finds out which parameters no rank has used.

    A mean that is zero everywhere may be that of such a parameter. All ranks hold the same means
    bit for bit, so that either all of them ask about a step or none.

    Args:
        backend: opened.
        control: asked where a request might meet one of another kind on other ranks.
        step: waits for votes.
        device: where votes lie if the backend takes no CPU tensors.
        timeout_s: how long to wait for the other ranks on the control plane.
        zeros_tell: False where a compressor makes many means zero: then a parameter counts as
            unused only where the first step has shown that some are.

    Attributes:
        ask_always: some were unused in the first step.
    """

    def __init__(
        self,
        backend: Backend,
        control: Control,
        step: StepState,
        device: torch.device,
        timeout_s: float,
        zeros_tell: bool,
    ) -> None:
        self.ask_always = not zeros_tell  # until the first step has shown it
        self._zeros_tell = zeros_tell
        self._independent = not backend.capabilities.exchanges
        self._size = backend.size
        self._control = control
        self._step = step
        self._device = device if "cpu" not in backend.capabilities.device_types else None
        self._timeout_s = timeout_s
        self._under_way: Work | None = None

    @property
    def asks(self) -> bool:
        """Whether a mean that is zero everywhere makes this ask, in the step that is computed."""
        return self._zeros_tell or self.ask_always

    def now(self, reducer: GradientReducer) -> Unused:
        """For a step whose messages have all ended: votes are exchanged when they are asked for."""

        def ask(tensors: Sequence[int]) -> set[int]:
            if not self.asks:
                return set()
            return self._counted(tensors, self._submit(tensors, reducer))

        return ask

    def later(self, reducer: GradientReducer, num_tensors: int) -> Unused:
        """For a step whose messages are on their way.

        Where parameters were unused before, votes are submitted at once; else they go over the
        control plane when they are asked for.
        """
        if self._independent:  # the means differ from rank to rank, and so do the questions
            return reducer.absent.intersection
        if self.ask_always:
            tensors = range(num_tensors)
            votes = self._under_way = self._submit(tensors, reducer)
            found = functools.cache(lambda: self._counted(tensors, votes))
        elif self._zeros_tell:
            found = functools.cache(lambda: self._all_gathered(reducer.absent))
        else:
            return lambda doubtful: set()
        return lambda doubtful: found().intersection(doubtful)

    def end(self) -> None:
        """Wait for votes that nobody has asked for."""
        votes, self._under_way = self._under_way, None
        if votes is not None and not votes.done():
            self._step.wait(votes, KEY)

    def _all_gathered(self, absent: set[int]) -> set[int]:
        self.ask_always = True
        everybody = gather(self._control, KEY, absent, set[int], self._timeout_s, self._size)
        return set.intersection(*everybody)

    def _submit(self, tensors: Sequence[int], reducer: GradientReducer) -> Work:
        votes = torch.tensor([0 if i in reducer.absent else 1 for i in tensors], dtype=torch.int32)
        if self._device is not None:
            votes = votes.to(self._device)
        number = reducer.number
        return reducer.submit(Request(Op.ALL_REDUCE, votes, key=KEY, step=number, priority=-1))

    def _counted(self, tensors: Collection[int], votes: Work) -> set[int]:
        counts = self._step.wait(votes, KEY).tensor
        assert counts is not None
        return {i for i, count in zip(tensors, counts.tolist(), strict=True) if count == 0}
