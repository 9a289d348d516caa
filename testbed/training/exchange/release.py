"""Gradients that are freed as they are exchanged: each parameter is updated as its mean arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

import torch

from testbed.memory.planning.gradients import HELD_BYTES, largest_row, row_of
from testbed.memory.running.arena import is_bounded
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.refusals import second_gradient
from testbed.training.exchange.unused import UnusedParameters
from testbed.training.exchange.update import DeferredUpdate, Delivery


class ReleasedUpdate(DeferredUpdate):
    """A step that parameters take during the backward pass, each when its mean has arrived.

    Whenever a gradient is final, the means that have arrived are used, all together, if they have
    the reducer's `held_bytes` or there is no room for another message. Before one begins, while
    those that exist leave no room for it, the first one (in the plan's order) that has not ended is
    waited for, but only if this rank has submitted it. There is room for the `in_flight` largest
    messages, and for as many fused ones, so that small ones do not wait for each other. That cannot
    lock ranks out: of all ranks that wait, look at one whose message comes first in the plan. Every
    other rank has waited for all messages before its own, this one among them, or goes on computing
    and will submit it.

    Where the reducer looks ahead, room is also made when a gradient has been received, for those
    that come next: all together take no more than the largest messages in a row
    (`memory.planning.gradients.row_of`).

    Plans that send after the backward pass or in halves bring no mean before it has ended: all are
    used by `finish`, in the order in which they arrive there.

    A mean that is zero everywhere may be that of a parameter that no rank has used, which cannot be
    known before the backward pass has ended everywhere; it is kept until then.

    Args:
        reducer: of the step.
        delivery: makes gradients of what arrives.
        buckets: of the step's plan, with `release`.
        optimizer: takes the step, with the settings that it has now.
        unused: finds out which parameters no rank has used.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        delivery: Delivery,
        buckets: GradientBuckets,
        optimizer: torch.optim.Optimizer,
        unused: UnusedParameters,
    ) -> None:
        super().__init__(reducer, delivery, buckets, optimizer, self._doubt)
        assert buckets.release is not None
        self._sizes = [
            sum(
                (high - low) * buckets.parameters[tensor].element_size()
                for tensor, places in message.items()
                for low, high, _, _ in places
            )
            for message in buckets.places
        ]
        self._in_flight = buckets.release.in_flight
        self._room = sum(sorted(self._sizes, reverse=True)[: buckets.release.in_flight])
        self._row = row_of(buckets.release.in_flight)
        self._row_room = largest_row(self._sizes, self._row)
        self._is_early = is_bounded(buckets.plan) and reducer.may_defer
        self._buckets = buckets
        self._found = unused
        self._own: dict[int, torch.Tensor] = {}
        self._doubted: dict[int, torch.Tensor] = {}
        self._missing = [len(numbers) for numbers in buckets.messages_of]
        self._begun: set[int] = set()
        self._landed: set[int] = set()
        self._first = 0  # all messages before this one have landed

    def receive(self, tensor: int) -> None:
        """The gradient of a tensor is final.

        Raises:
            UsageError: it was final already in this step. Settings of the optimizer that changed
                are refused later, in `finish`.
            RankLost, DeadlineExceeded, NonFiniteGradient: of a message that was waited for.
        """
        if not self._delivery.exchanges:
            self._take_own(tensor)
            if sum(gradient.nbytes for gradient in self._own.values()) >= HELD_BYTES:
                self._use_own()
            return
        if self._is_early:
            new = [n for n in self._buckets.messages_of[tensor] if n not in self._begun]
            self._make_room(new, self._has_room)
            self._begun.update(new)
        self._reducer.mark_ready(tensor)
        if self._is_early:
            arrived = self._arrived()
            if sum(self._sizes[number] for number in arrived) >= self._reducer.held_bytes:
                self._land(arrived)
            if self._reducer.looks_ahead:
                numbers = (n for n in range(len(self._sizes)) if n not in self._begun)
                self._make_room(list(islice(numbers, self._row)), self._has_room_in_a_row)

    def finish(self) -> None:
        """Update what is left; the backward pass has ended and all messages are under way.

        Raises:
            UsageError: a setting of the optimizer was changed since the first gradient.
        """
        self._step.refuse_changed()
        if not self._delivery.exchanges:
            for tensor in list(self.left):
                if self._parameters[tensor].grad is not None:
                    self._take_own(tensor)
            self._use_own()
            return
        if self._reducer.may_defer:
            together: list[int] = []
            for number in self._reducer.under_way:
                self._reducer.land_message(number)
                together.append(number)
                if sum(self._sizes[each] for each in together) >= self._reducer.held_bytes:
                    self._land(together)
                    together = []
            self._land(together)
        else:
            self._reducer.land_all()
            self.take(list(self.left))
        doubtful = sorted(self._doubted)  # all ranks ask for the same ones in the same order
        if doubtful:
            spared = self._found.now(self._reducer)(doubtful)
            self._apply({t: self._doubted.pop(t) for t in doubtful if t not in spared})

    def _take_own(self, tensor: int) -> None:
        """The gradient of a worker that is alone is the mean."""
        if tensor not in self.left:
            raise second_gradient(self._buckets.plan.names[tensor])
        del self.left[tensor]
        parameter = self._parameters[tensor]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._own[tensor] = gradient if gradient.is_sparse else gradient.contiguous()

    def _use_own(self) -> None:
        own, self._own = self._own, {}
        self._use(own)

    def _make_room(
        self, new: Sequence[int], has_room: Callable[[Sequence[int], Collection[int]], bool]
    ) -> None:
        while not has_room(new, self._reducer.live):
            chosen = dict.fromkeys(self._arrived())
            while self._first in self._landed:
                self._first += 1
            for number in range(self._first, len(self._sizes)):
                left = set(self._reducer.live) - chosen.keys()
                if has_room(new, left) or number not in self._reducer.under_way:
                    break
                chosen[number] = None
            if not chosen:
                return
            self._land(list(chosen))

    def _arrived(self) -> list[int]:
        return [n for n in self._reducer.under_way if self._reducer.has_arrived(n)]

    def _has_room(self, new: Sequence[int], live: Collection[int]) -> bool:
        """Whether these messages may begin beside those that exist."""
        fused = [number for number in live if self._buckets.forms[number] is not None]
        starts_fused = any(self._buckets.forms[number] is not None for number in new)
        if starts_fused and len(fused) >= self._in_flight:
            return False
        return sum(self._sizes[number] for number in (*new, *live)) <= self._room

    def _has_room_in_a_row(self, new: Sequence[int], live: Collection[int]) -> bool:
        """Whether these may be made beside those that exist."""
        return sum(self._sizes[number] for number in (*new, *live)) <= self._row_room

    def _land(self, numbers: Sequence[int]) -> None:
        """Wait for messages, and update the parameters whose last message is among them."""
        complete = []
        for number in numbers:
            self._reducer.land_message(number)
            self._landed.add(number)
            for tensor in self._buckets.places[number]:
                self._missing[tensor] -= 1
                if self._missing[tensor] == 0:
                    complete.append(tensor)
        self.take(complete)

    def _doubt(self, tensors: Sequence[int]) -> Sequence[int]:
        """Keep means that are zero everywhere, if anybody will ask whether they were used."""
        if not self._found.asks:
            return ()
        for tensor in tensors:
            self._doubted[tensor] = self._reducer.collect(tensor).clone()
        return tensors
