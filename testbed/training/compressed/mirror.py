"""Gradients that join what a compressor did not send as soon as they are ready, and are freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.errors import UsageError
from testbed.base.listed import elements, joined, part_of
from testbed.base.plan import Message
from testbed.compression.protocol import feeds_back
from testbed.memory.host import on_host, zeros_on_host
from testbed.memory.planning.gradients import SLICE_ELEMENTS
from testbed.memory.strategy import Mirror, why_no_mirror
from testbed.training.compressed.driver import Conversations
from testbed.training.compressed.reducer import CompressedReducer
from testbed.training.compressed.spec import Compression
from testbed.training.exchange.buckets import GradientBuckets, ReleasedBuffers

_CHUNK = 1 << 16  # elements that go through the mirror's weights at once: some ten temporaries


class Lost:
    """What rounding to the precision of weights took from the updates, of all messages and steps.

    Attributes:
        added: sum of |rate g| over all elements.
        lost: sum of the differences between what joined and what should have.
    """

    def __init__(self) -> None:
        self.added: torch.Tensor | float = 0.0
        self.lost: torch.Tensor | float = 0.0

    @property
    def note(self) -> str:
        """The share in words; empty where nothing went through weights.

        Example:
            >>> Lost().note
            ''
        """
        if not self.added:
            return ""
        percent = 100 * float(self.lost) / float(self.added)
        return f"rounded as weights, the mirror lost {percent:.2g} % of its updates"


class MirrorBuckets(GradientBuckets):
    """See `GradientBuckets`; of a message there is what the compressor did not send of it.

        kept <- g + aging kept;  send kept;  kept <- kept - sent

    That is `residual` of the message's state, in which it stays between steps. Where it lies on the
    host, it joins the gradient in the gradient's own memory, a slice at a time, and goes back from
    there when the message has ended; of a fused message it comes to the device as a whole before
    the first gradient joins.

    Args:
        buckets: the plan and the parameters.
        mirror: where and in which form it is kept.
        driver: runs the compressor and holds the states.
        rate: the step's learning rate, None = there is no single one.
        lost: told what the form costs.

    Attributes:
        in_gradient: by message, whether what is kept joins in the gradient's memory.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        mirror: Mirror,
        driver: Conversations,
        rate: Callable[[], float | None],
        lost: Lost,
    ) -> None:
        super().__init__(buckets.plan, buckets.parameters, buckets.release, travels=False)
        feedback = driver.compression.compressor
        assert feeds_back(feedback)
        self._feedback = feedback
        self._driver = driver
        self._mirror = mirror
        self._rate = rate
        self._lost = lost
        self._device = self.parameters[0].device
        self._host: dict[str, torch.Tensor] = {}  # by key: where what is on the device came from
        self.in_gradient = [
            mirror.where == "host" and len(m.parts) == 1 for m in buckets.plan.messages
        ]
        self.settle_all()

    def open(self) -> MirrorBuffers:
        """See `GradientBuckets.open`."""
        return MirrorBuffers(self)

    def add(self, number: int, tensor: int, gradient: torch.Tensor) -> torch.Tensor:
        """Let the tensor's share of a message join what is kept of it.

        Returns:
            What is to be sent of the message, as far as it has joined.
        """
        rate, flat = self._rate(), gradient.view(-1)
        kept = self._residual(number)
        aging = self._feedback.aging(self._driver.states[self.keys[number]], rate)
        weights = self.parameters[tensor].detach().reshape(-1)
        if self.in_gradient[number]:
            ((_, _, start, stop),) = self.places[number][tensor]
            wanted = flat[start:stop]
            for low in range(0, stop - start, SLICE_ELEMENTS):
                given = wanted[low : low + SLICE_ELEMENTS]
                piece = kept[low : low + SLICE_ELEMENTS].to(self._device)
                w = weights[start + low : start + low + SLICE_ELEMENTS]
                self._join(piece, given, w, aging, rate, out=given)
            return wanted
        for low, high, start, stop in self.places[number][tensor]:
            piece = kept[low:high]
            self._join(piece, flat[start:stop], weights[start:stop], aging, rate, out=piece)
        return kept

    def _join(
        self,
        kept: torch.Tensor,
        given: torch.Tensor,
        weights: torch.Tensor,
        aging: float,
        rate: float | None,
        out: torch.Tensor,
    ) -> None:
        """`out <- given + aging kept`, by way of the weights where the form says so."""
        if self._mirror.form == "difference":
            torch.add(given, kept, alpha=aging, out=out)
            return
        assert rate is not None
        added, lost = through_weights(kept, given, weights, aging, rate, out)
        self._lost.added, self._lost.lost = self._lost.added + added, self._lost.lost + lost

    def _residual(self, number: int) -> torch.Tensor:
        """What is kept of a message: on the device, but for a message that joins in a gradient."""
        key = self.keys[number]
        state = self._driver.states.setdefault(key, {})
        kept = state.get("residual")
        if kept is None:
            (first, *_) = self.plan.messages[number].parts
            dtype = self.parameters[first.tensor].dtype
            if self._mirror.where == "host":
                kept = zeros_on_host(self.size(number), dtype, self._device)
            else:
                kept = torch.zeros(self.size(number), dtype=dtype, device=self._device)
            state["residual"] = kept
        if self._mirror.where == "host" and key not in self._host:
            self._host[key] = kept
            if not self.in_gradient[number]:
                state["residual"] = torch.empty_like(kept, device=self._device).copy_(kept)
        return state["residual"]

    def size(self, number: int) -> int:
        """Elements of a message."""
        return sum(part.stop - part.start for part in self.plan.messages[number].parts)

    def settle(self, number: int) -> None:
        """The message has ended: what is kept goes back to where it is kept."""
        state = self._driver.states[self.keys[number]]
        there = self._host.pop(self.keys[number], None)
        if there is not None:
            state["residual"] = there.copy_(state["residual"])

    def settle_all(self) -> None:
        """What a plan before this one or a checkpoint has left goes to where it is kept."""
        for state in self._driver.states.values():
            if self._mirror.where == "host" and "residual" in state:
                state["residual"] = on_host(state["residual"], self._device)

    def _form(self, message: Message) -> tuple[int, torch.dtype] | None:
        return None


class MirrorBuffers(ReleasedBuffers):
    """See `MessageBuffers`: of a message what is kept, and from its last answer on its mean.

    Args:
        buckets: the messages.

    Attributes:
        copies: by message, what this rank gave for it, if somebody asks for it; None: nobody.
    """

    def __init__(self, buckets: MirrorBuckets) -> None:
        super().__init__(buckets)
        self.copies: dict[int, torch.Tensor] | None = None
        self._mirrors = buckets
        self._wanted: dict[int, torch.Tensor] = {}  # by message that has not ended
        self._means: dict[int, torch.Tensor] = {}

    def put(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """See `MessageBuffers.put`."""
        super().put(number, tensor, gradient)
        if self.copies is not None:
            if number not in self.copies:
                self.copies[number] = gradient.new_zeros(self._mirrors.size(number))
            for low, high, start, stop in self._mirrors.places[number][tensor]:
                self.copies[number][low:high] = gradient.view(-1)[start:stop]
        self._wanted[number] = self._mirrors.add(number, tensor, gradient)

    def payload(self, number: int, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """See `MessageBuffers.payload`: what is to be sent, or the mean, densely."""
        if number in self._wanted:
            return self._wanted[number]
        return elements(self._means[number], 0, self._mirrors.size(number))

    def frees(self, tensor: int) -> bool:
        """See `MessageBuffers.frees`: always."""
        return True

    def arrived(self, number: int, mean: torch.Tensor) -> None:
        """A message has ended with this mean."""
        if mean.device.type == "cuda":  # made on a stream of its own, which must not reuse it yet
            for part in (mean._indices(), mean._values()) if mean.is_sparse else (mean,):
                part.record_stream(torch.cuda.current_stream(mean.device))
        self._means[number] = mean
        del self._wanted[number]
        self._mirrors.settle(number)

    def mean(self, tensor: int) -> torch.Tensor:
        """See `MessageBuffers.mean`: sparse if its messages' are, else a view where one is all."""
        parameter = self._mirrors.parameters[tensor]
        places = sorted(
            (start, low, high, number)
            for number in self._mirrors.messages_of[tensor]
            for low, high, start, _ in self._mirrors.places[number][tensor]
        )
        means = [self._means[number] for *_, number in places]
        if all(mean.is_sparse for mean in means):
            pairs = zip(means, places, strict=True)
            parts = [(part_of(mean, low, high), start) for mean, (start, low, high, _) in pairs]
            return joined(parts, parameter.numel())
        if len(places) == 1:
            ((_, low, high, _),) = places
            return means[0][low:high].view(parameter.shape)
        together = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for mean, (start, low, high, _) in zip(means, places, strict=True):
            together.view(-1)[start : start + high - low] = elements(mean, low, high)
        return together

    def drop(self, tensor: int) -> None:
        """See `MessageBuffers.drop`."""
        super().drop(tensor)
        for number in self._mirrors.messages_of[tensor]:
            if number not in self.live:
                self._means.pop(number, None)


class MirrorReducer(CompressedReducer):
    """See `CompressedReducer`; gradients join what is kept, and means have memory of their own."""

    becomes_residual = True

    def __init__(self, buckets: MirrorBuckets, *args: Any, **named: Any) -> None:
        super().__init__(buckets, *args, **named)
        assert isinstance(self._buffers, MirrorBuffers)
        self._mirrored = self._buffers
        self.looks_ahead = any(buckets.in_gradient)
        self._mirrored.copies = None if self._given is None else {}

    def land_message(self, number: int) -> None:
        """See `GradientReducer.land_message`."""
        works = self._works.get(number, ())
        super().land_message(number)
        for work in works:
            mean = work.wait(0.0).tensor
            assert mean is not None
            self._mirrored.arrived(number, mean)

    def _given_for(self, number: int) -> torch.Tensor:
        assert self._mirrored.copies is not None
        return self._mirrored.copies.pop(number)


def through_weights(
    kept: torch.Tensor,
    given: torch.Tensor,
    weights: torch.Tensor,
    aging: float,
    rate: float,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out <- given + aging kept` [n] by way of the mirror of the weights.

        w~ = (w - rate aging kept) - rate given;  out <- (w - w~) / rate

    each difference rounded to the precision of the weights. Its error is itself a number of that
    precision, which six more additions give exactly.

    Args:
        kept: what was not sent, in units of gradients.
        given: the gradient.
        weights: w.
        aging: old over new learning rate.
        rate: the new one.
        out: may be `kept` or `given`.

    Returns:
        Sums over the elements of |rate given|, and of |what the three roundings changed|; float64.

    Reference:
        Knuth, 1969 (the error of a sum of two floating-point numbers).

    Example:
        >>> kept, update = torch.zeros(1), torch.tensor([1e-9])  # 1 has bits down to 1.2e-7
        >>> added, lost = through_weights(kept, update, torch.ones(1), 1.0, 1.0, kept)
        >>> kept, bool(lost == added)
        (tensor([0.]), True)
    """
    added, lost = (torch.zeros((), dtype=torch.float64, device=kept.device) for _ in range(2))
    for start in range(0, kept.numel(), _CHUNK):
        piece, w = kept[start : start + _CHUNK], weights[start : start + _CHUNK]
        update = given[start : start + _CHUNK] * rate
        before, error_before = _difference(w, piece * (rate * aging))
        mirror, error_update = _difference(before, update)
        piece, error_after = _difference(w, mirror)
        out[start : start + _CHUNK] = piece / rate
        added += update.abs().sum(dtype=torch.float64)
        # w - w~ as it is, less what it would be without rounding.
        lost += (error_after - error_before - error_update).abs().sum(dtype=torch.float64)
    return added, lost


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded a - b, and what rounding took: a - b is exactly their sum."""
    total = a - b
    second = total - a
    return total, (a - (total - second)) - (b + second)


def refuse_unmirrored(
    mirror: Mirror, compression: Compression | None, named: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """What a mirror cannot stand beside.

    Args:
        mirror: what was asked for.
        compression: what compresses; None = nothing does.
        named: the parameters that are trained.

    Raises:
        UsageError: names the compressor or the parameter, and what to do.
    """
    why = (
        why_no_mirror(COMPRESSORS.default, "none")
        if compression is None
        else why_no_mirror(compression.text, compression.compressor.claims.feedback)
    )
    if why is not None:
        raise UsageError(why)
    for name, parameter in named:
        if mirror.form == "weights" and parameter.dtype.itemsize < torch.float32.itemsize:
            raise UsageError(
                f"memory 'mirror' with form=weights keeps what was not sent with the precision of "
                f"weights, and {name!r} is {parameter.dtype}, which loses nearly all of most "
                "updates; use form=difference, or float32"
            )
