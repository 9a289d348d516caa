"""Gradients are freed as they are exchanged, and the optimizer steps as their means arrive."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.parts import OURS, Part
from testbed.memory.strategy import Release, Strategy


@dataclass(frozen=True)
class ReleaseOptions:
    """`release`: a gradient lives until its message has left; each mean is used as it arrives.

        gradients and buckets alive, in bytes <= largest sum of `in_flight` messages in a row
                              instead of       sum of all gradients + sum of all buckets

    A gradient that is final is handed to its message: copied into the bucket and freed, or it is
    the message itself. When means have arrived, the optimizer takes its step for those parameters,
    during the backward pass, and the buckets go back to an arena of the size above: as soon as
    they have 4 MiB, or no room is left. Before messages begin that have more bytes together than
    the `in_flight` largest ones, the backward pass waits for the oldest one. A worker that is alone
    exchanges nothing and updates parameters as soon as it has gradients of 4 MiB. SGD, Adam and
    AdamW take their step for a large layer in slices of 2^18 elements, so that what they make
    beside their state (a gradient with weight decay, a denominator) has the size of a slice.

    The bound holds where means can arrive during the backward pass: not with plans that send after
    it, in halves, or across the iteration (there gradients are freed as well, and a bucket lives
    until the update just before the layer's next forward pass), and not while a rank leaves
    parameters unused whose messages others wait behind. A message that is larger than all others is
    larger than the bound of smaller ones: cut it (`p3`, `bytescheduler`, `pace`).

    The model trains to the same parameters as without, bit for bit. What is different: a mean with
    NaN or infinity raises before its own update, when parameters of later layers have been updated;
    a parameter that is read between `backward()` and `optimizer.step()` may have been updated;
    gradients cannot be looked at or changed in between, which is why clipping by norm is refused;
    and settings of the optimizer (rates, ...) must be final when `backward()` is called.

    Args:
        in_flight: of the largest messages as many have room at once, 1 or more; of small ones
            more. More hide more communication behind the backward pass, fewer hold less memory.

    Raises:
        UsageError: `in_flight` is below 1; the run clips to a norm, or its precision is fp16, whose
            gradient scaler looks at all gradients before any update; the backend exchanges by
            itself, or its servers run the optimizer.

    Example:
        >>> build_release(ReleaseOptions(in_flight=3)).release
        Release(in_flight=3)

    Reference:
        Zhao et al., 2021, IEEE Access (LaySA: layer by layer; buffers of a few layers at once are
        our reading of its abstract); Lv et al., 2023, arXiv:2306.09782 (LOMO: update during the
        backward pass). Departs: with any
        optimizer, plan and compressor, with fused messages, over steps of several micro-batches.
    """

    in_flight: int = 2

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UsageError(
                f"release: in_flight is {self.in_flight}; expected 1 message or more, as "
                "release:in_flight=2"
            )


def build_release(options: ReleaseOptions) -> Strategy:
    """See `ReleaseOptions`."""
    return Strategy(release=Release(options.in_flight))


def refuses_release(options: object, config: RunConfig) -> str | None:
    """Why no gradient can be released in this configuration; None: they can."""
    if config.clip_norm is not None:
        return (
            "--clip-norm needs all mean gradients at once, and memory strategy 'release' frees "
            "each as soon as its parameter is updated; leave out one of them"
        )
    if config.precision == "fp16":
        return (
            "--precision fp16 has a gradient scaler, which looks at all gradients before any "
            "update, and memory strategy 'release' frees them one by one; use bf16 or float32"
        )
    backend = BACKENDS.find(config.backend)
    if backend is not None and backend.facts.schedule is not None:
        return (
            f"backend {config.backend!r} exchanges gradients by itself and keeps them, so that "
            "memory strategy 'release' cannot free them; use another backend"
        )
    if backend is not None and backend.facts.updates:
        return (
            f"with backend {config.backend!r} servers run the optimizer and no means come back, "
            "and memory strategy 'release' updates parameters as their means arrive; let the "
            "workers update (update=worker)"
        )
    return None


RELEASE = Part(
    name="release",
    summary="frees gradients as they are exchanged; the optimizer steps as means arrive",
    origin=OURS,
    build=build_release,
    options=ReleaseOptions,
    refuses=refuses_release,
)
