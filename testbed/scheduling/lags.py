"""LAGS: each layer sends as large a share of its gradient as the backward pass can hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import no_knobs
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import plan_of
from testbed.scheduling.omgs import PAIR_BYTES, VALUE_BYTES, SparseCost


@dataclass(frozen=True)
class LagsOptions:
    """Options of `lags`.

    Attributes:
        least: no layer sends a smaller share of its elements; what cannot be hidden sends this.
        most: nor a larger one; above 0.5 value and index are longer than the dense gradient.
        hide: behind the `rest` of the backward pass, shared out fairly among the layers to come;
            or behind the `next` layer's backward alone, as published.
        select_ns: g of t_s(p) = g p log2 p, in nanoseconds (0.219 on a P102-100, 0.5 on a V100, as
            published).
    """

    least: float = 0.001
    most: float = 0.25
    hide: Literal["rest", "next"] = "rest"
    select_ns: float = 0.219

    def __post_init__(self) -> None:
        limit = VALUE_BYTES / PAIR_BYTES
        if not 0 < self.least <= self.most <= limit:
            raise UsageError(
                f"lags: least is {self.least:g} and most {self.most:g}; expected 0 < least <= most "
                f"<= {limit:g}; for 0.1 % write 0.001"
            )


@dataclass(frozen=True)
class Layer:
    """The times of one message.

    Attributes:
        ready_s: selected, from the start of backward.
        startup_s: of its exchange.
        transfer_s: of its exchange at ratio 1, in proportion to the ratio.
    """

    ready_s: float
    startup_s: float
    transfer_s: float


def fair_ratios(
    layers: Sequence[Layer], deadline_s: float, least: float, most: float
) -> list[float]:
    """Max-min fair ratios with which all messages end by the deadline on one channel.

    Messages travel in this order. Message i and all behind it end in time iff

        r_i + sum over j >= i of (startup_j + ratio_j transfer_j) <= deadline

    The tightest of these bounds gives the smallest common ratio; the layers from there on get it
    and the search goes on among those before, with what is left: the smallest ratio is as large as
    it can be, then the next smallest, and so on (max-min fairness), each within `least` .. `most`.
    Where `least` everywhere ends too late (the last gradient is ready when backward ends), that end
    takes the deadline's place: nothing ends later than it must.

    Args:
        layers: in the order in which they travel, `ready_s` never decreasing.
        deadline_s: when all should have ended.
        least: smallest ratio.
        most: largest one.

    Example:
        >>> layers = [Layer(0.0, 0.0, 10.0), Layer(4.0, 0.0, 10.0)]
        >>> fair_ratios(layers, 6.0, 0.01, 1.0)
        [0.4, 0.2]
    """
    ratios = [least] * len(layers)
    deadline_s = max(deadline_s, end_s(layers, ratios))
    stop, used_s = len(layers), 0.0
    while stop > 0:
        startup_s, transfer_s = used_s, 0.0
        tightest, start = float("inf"), 0
        for index in range(stop - 1, -1, -1):
            startup_s += layers[index].startup_s
            transfer_s += layers[index].transfer_s
            ratio = _share(deadline_s - layers[index].ready_s - startup_s, transfer_s)
            if ratio < tightest:
                tightest, start = ratio, index
        ratio = min(max(tightest, least), most)
        for index in range(start, stop):
            ratios[index] = ratio
            used_s += layers[index].startup_s + ratio * layers[index].transfer_s
        stop = start
    return ratios


def end_s(layers: Sequence[Layer], ratios: Sequence[float]) -> float:
    """End of the last message on one channel, in this order.

    Example:
        >>> end_s([Layer(0.0, 1.0, 10.0), Layer(4.0, 1.0, 10.0)], [0.5, 0.1])
        8.0
    """
    now_s = 0.0
    for layer, ratio in zip(layers, ratios, strict=True):
        now_s = max(now_s, layer.ready_s) + layer.startup_s + ratio * layer.transfer_s
    return now_s


def _share(spare_s: float, transfer_s: float) -> float:
    if transfer_s > 0:
        return spare_s / transfer_s
    return float("inf") if spare_s >= 0 else float("-inf")


def next_layer_ratios(
    layers: Sequence[Layer], computes_s: Sequence[float], least: float, most: float
) -> list[float]:
    """The paper's: the largest ratio whose exchange the next layer's backward hides.

    Args:
        layers: in backward order.
        computes_s: what the layer behind each computes, less the selection; 0 for the last.
        least: smallest ratio.
        most: largest one.

    Example:
        >>> next_layer_ratios([Layer(0, 1.0, 10.0), Layer(3, 1.0, 10.0)], [3.0, 0.0], 0.01, 0.5)
        [0.2, 0.01]
    """
    return [
        min(max(_share(compute_s - each.startup_s, each.transfer_s), least), most)
        for each, compute_s in zip(layers, computes_s, strict=True)
    ]


def plan_lags(trace: Trace, link: Link, options: LagsOptions) -> Plan:
    """One top-k message for each gradient, at the largest ratio that the backward pass hides.

        message i is hidden  iff  r_i + sum over j >= i of (startup_j + rho_j transfer_j) <= t_b
        hide=rest:  the rho_j that are hidden, the smallest as large as can be (max-min fairness)
        hide=next:  startup_j + rho_j transfer_j <= t_b(next layer) - t_s(j)
        least <= rho_j <= most

    where r_i is when message i is selected and transfer_j its time at ratio 1. Early messages of
    the backward pass may be large, the last one is the smallest: no compute is left to hide it. It
    cannot help where start-ups alone fill the backward pass; merge there (`omgs`).

    Args:
        trace: sizes (elements) and backward times (s).
        link: gives start-up and transfer time of a gather through its backend's algorithm.
        options: bounds of the ratios, what hides them, and selection time in ns.

    Raises:
        UsageError: not 0 < least <= most <= 0.5, or a negative `select_ns`.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([1e-3, 0.1, 0.1], num_elements=[10**6, 10**6, 10**5])
        >>> link = Link(backend="gloo", num_workers=8, latency_s=1e-3, seconds_per_byte=1e-8)
        >>> plan = make_plan("lags", trace, link)
        >>> [round(message.ratio, 3) for message in plan.messages]
        [0.25, 0.25, 0.001]

    Reference:
        Shi et al., 2020, ECAI (LAGS-SGD). Departs: by default the whole rest of the backward pass
        is shared out, not the next layer's alone (`hide=next`); the gather's cost is that of
        `omgs`.
    """
    cost = SparseCost.of(link, options.select_ns)
    tensors = list(reversed(trace.tensors))
    selects_s = [cost.select_time_s(t.num_elements) for t in tensors]
    layers, ready_s, free_s = [], 0.0, 0.0
    for tensor, select_s in zip(tensors, selects_s, strict=True):
        ready_s += tensor.backward_s
        free_s = max(free_s, ready_s) + select_s
        startup_s, transfer_s = cost.phases_s(tensor.num_elements, options.most)
        layers.append(Layer(free_s, startup_s, transfer_s / options.most))
    if options.hide == "rest":
        ratios = fair_ratios(layers, trace.backward_s, options.least, options.most)
    else:
        after_s = [*(t.backward_s for t in tensors[1:]), 0.0][: len(tensors)]
        computes_s = [a - s for a, s in zip(after_s, selects_s, strict=True)]
        ratios = next_layer_ratios(layers, computes_s, options.least, options.most)
    plan = plan_of("lags", trace, range(1, len(tensors) + 1), reason=_words(ratios, options.hide))
    return msgspec.structs.replace(
        plan,
        messages=tuple(
            msgspec.structs.replace(m, ratio=r) for m, r in zip(plan.messages, ratios, strict=True)
        ),
    )


def _words(ratios: Sequence[float], hide: str) -> str:
    if not ratios:
        return "nothing to send"
    what = "the rest of backward" if hide == "rest" else "the next layer's backward"
    return f"ratios from {min(ratios):.2%} to {max(ratios):.2%}, as {what} hides"


LAGS = Part(
    name="lags",
    summary="LAGS: each layer the ratio that hides it (least, most, hide=rest|next, select_ns)",
    origin=PUBLISHED,
    build=plan_lags,
    options=LagsOptions,
    facts=lambda options: SchedulerFacts(sparse=True),
    knobs=no_knobs,  # ratios change what is trained
)
