"""The mirror weight update: what a compressor did not send is kept, and nothing beside it."""

from __future__ import annotations

from testbed.base.axes import COMPRESSORS, MemoryFacts
from testbed.base.config import RunConfig
from testbed.base.parts import RECONSTRUCTION, Part
from testbed.memory.release import refuses_release
from testbed.memory.strategy import Mirror, Release, Strategy, why_no_mirror


def mirror_update(options: Mirror) -> Strategy:
    """A gradient joins what was not sent as soon as backward has made it, and is freed.

        w~ <- w~ - rate g;  D = w - w~;  send C(D);  D' <- D - sent
        w <- w - mean over ranks of what was sent;  w~ <- w - D'

    For a worker with weights w, the mirror w~ is what the weights would be had it sent everything;
    C is the compressor inside `ef:units=update+C`, whose residual is D' / rate, so that both train
    to the same parameters, bit for bit where a message is one tensor. What is kept is the
    difference: a w~ of its own has no bits below those of w, so that in float32 an update of 1e-5
    |w| loses 0.2 % of itself, one of 1e-7 |w| 20 %, and other elements are sent (`form=weights`).

    Bytes of a message of n elements of e bytes, k of them sent by each of P ranks: n e at all
    times on the device, and a gradient until it is added; or, with `where=host`, none but the
    gradient, to which what is kept is added a slice at a time, and whose memory holds the sum until
    the message has ended and what was not sent is back on the host. Before the next gradients are
    made, messages are waited for, so that no more than the largest `in_flight` (at least 2)
    gradients in a row are alive. Beside them k e + indices to be sent, P times that arrived, and of
    the mean its elements and their indices: the optimizer's step takes a large layer in slices of
    2^18 elements, and the dense mean of one slice at a time, if its update goes by elements (SGD,
    Adam, AdamW) and the compressor can list a mean (`topk`, `topk-sampled`, `threshold`); else n e
    of the mean. There are no buckets and no copies of gradients; a fused message's share on the
    host comes to the device as a whole.

    Args:
        options: where the difference lies (`device`; `host`: pinned memory beside a GPU, a mapped
            file beside a CPU, the optimizer's state too), and its form (`difference`; `weights`:
            each update goes through w~, rounded as weights are, and the share that this loses is
            told with the result).

    Raises:
        UsageError: the compressor keeps no residual in units of updates, the backend exchanges
            gradients by itself, or `weights` below float32; a learning rate of 0, or several.

    Example:
        >>> mirror_update(Mirror(where="device")).mirror
        Mirror(where='device', form='difference')

    Reference:
        Zhao, Liu, Wang and Feng, 2021, IEEE Access (LaySA). Departs: a reconstruction from the
        abstract, which names the update and does not define it; the difference is stored, divided
        by the learning rate, and not the mirror; with `form=weights` the mirror exists only while
        the difference is computed, which gives the same numbers, as weights rest in between.
    """
    return Strategy(
        mirror=options,
        release=Release(),
        prepare=state_on_host if options.where == "host" else None,
        state_on_host=options.where == "host",
        weak=("release",),
    )


def state_on_host(model: object, optimizer: object) -> None:
    """See `memory.host.keep_state_on_host`, which loads torch."""
    from testbed.memory.host import keep_state_on_host

    keep_state_on_host(model, optimizer)  # type: ignore[arg-type]


def _refuses(options: Mirror, config: RunConfig) -> str | None:
    why = refuses_release(options, config)
    if why is not None:
        return f"memory strategy 'mirror' releases gradients as 'release' does: {why}"
    if COMPRESSORS.is_default(config):
        return why_no_mirror(config.compressor, "none")
    feedback = COMPRESSORS.resolve(config.compressor).build().claims.feedback
    return why_no_mirror(config.compressor, feedback)


MIRROR = Part(
    name="mirror",
    summary="what is not sent stays as a difference of weights (where, form)",
    origin=RECONSTRUCTION,
    build=mirror_update,
    options=Mirror,
    facts=lambda options: MemoryFacts(exact=options.form == "difference"),
    refuses=_refuses,
)
