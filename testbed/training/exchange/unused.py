"""Which parameters were used by any rank: those that were not keep no gradient and are skipped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.types import Op, Request
from testbed.control.protocol import Control
from testbed.training.exchange.reducer import Wait

KEY = "(parameters in use)"


class UnusedParameters:
    """Asks all ranks which parameters nobody used.

    A mean that is zero everywhere may come from such a parameter. All ranks hold the same means bit
    for bit, so that all of them ask about the same step, if one does.

    Args:
        backend: carries the votes where they can take their place among the messages.
        control: carries them where they may not.
        wait: waits for an exchange.
        device: where votes lie if the backend takes no CPU tensors.
        timeout_s: how long to wait for the other ranks on the control plane.
        submit: instead of the backend's, where votes must take their turn among conversations.
            Then means come from a compressor, which makes many of them zero: a parameter counts as
            unused only where the first step has shown that some are.
    """

    def __init__(
        self,
        backend: Backend,
        control: Control,
        wait: Wait,
        device: torch.device,
        timeout_s: float,
        submit: Callable[[Request], Work] | None = None,
    ) -> None:
        self.ask_always = submit is not None  # until the first step tells
        self._zeros_tell = submit is None
        self._backend = backend
        self._submit_request = submit or backend.submit
        self._control = control
        self._wait = wait
        self._device = device if "cpu" not in backend.capabilities.device_types else None
        self._timeout_s = timeout_s
        self._under_way: Work | None = None

    def unused(self, tensors: Sequence[int], absent: Collection[int], step: int) -> set[int]:
        """Those of these tensors that no rank used; all ranks must ask about the same ones.

        Args:
            tensors: about which to ask.
            absent: tensors that this rank did not use.
            step: the step.
        """
        if not (self._zeros_tell or self.ask_always):
            return set()
        return self._counted(tensors, self._submit(tensors, absent, step))

    def prepare(self, num_tensors: int, absent: set[int], step: int) -> Callable[[], set[int]]:
        """How to learn later which tensors no rank used in this step.

        Where unused parameters were seen before, the votes leave at once; else they are asked for
        beside the messages, by whoever meets a mean that is zero everywhere.
        """
        if self._backend.capabilities.consistency == "none":
            return lambda: absent  # the means differ from rank to rank, and so would the questions
        if self.ask_always:
            tensors = range(num_tensors)
            votes = self._under_way = self._submit(tensors, absent, step)
            return lambda: self._counted(tensors, votes)
        if not self._zeros_tell:
            return set

        def ask() -> set[int]:
            self.ask_always = True
            mine = msgspec.msgpack.encode(sorted(absent))
            size = self._backend.size
            everybody = self._control.all_gather(KEY, mine, self._timeout_s, members=size)
            sets = [set(msgspec.msgpack.decode(answer, type=list[int])) for answer in everybody]
            return set.intersection(*sets)

        return ask

    def end(self) -> None:
        """Leave no votes under way."""
        votes, self._under_way = self._under_way, None
        if votes is not None and not votes.done():
            self._wait(votes, KEY)

    def _submit(self, tensors: Sequence[int], absent: Collection[int], step: int) -> Work:
        votes = torch.tensor([0 if i in absent else 1 for i in tensors], dtype=torch.int32)
        if self._device is not None:
            votes = votes.to(self._device)
        return self._submit_request(Request(Op.ALL_REDUCE, votes, key=KEY, step=step, priority=-1))

    def _counted(self, tensors: Sequence[int], votes: Work) -> set[int]:
        counts = self._wait(votes, KEY).tensor
        assert counts is not None
        return {i for i, count in zip(tensors, counts.tolist(), strict=True) if count == 0}
