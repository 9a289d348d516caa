"""In which order the next forward pass reads the parameters, from the model's DAG or as a chain."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from testbed.errors import UsageError
from testbed.prediction.trace import Trace


def forward_order(trace: Trace) -> list[int]:
    """Indices of the tensors in the order in which one forward pass on one stream reads them.

    The topological order of `Trace.consumers` that departs least from the order of the file; the
    file's own order where that is topological, and on a chain.

    Raises:
        UsageError: a consumer that does not exist, or layers that wait for each other.

    Example:
        >>> from testbed.prediction.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=1, forward_s=1.0, backward_s=1.0)
        >>> trace = Trace(name="t", device="cpu", batch_size=1, tensors=(tensor,) * 3,
        ...               consumers=((2,), (), (1,)))
        >>> forward_order(trace)
        [0, 2, 1]
    """
    count = len(trace.tensors)
    if trace.consumers is None:
        return list(range(count))
    _check(trace, trace.consumers)
    producers = [0] * count
    for readers in trace.consumers:
        for reader in readers:
            producers[reader] += 1
    ready = [i for i in range(count) if producers[i] == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for reader in trace.consumers[index]:
            producers[reader] -= 1
            if producers[reader] == 0:
                heappush(ready, reader)
    if len(order) < count:
        stuck = next(i for i in range(count) if producers[i] > 0)
        raise UsageError(
            f"consumers of trace {trace.name!r} form a cycle through tensor {stuck} "
            f"({trace.tensors[stuck].name!r}); expected a DAG; leave the key out for a chain"
        )
    return order


def tails_s(trace: Trace) -> list[float]:
    """For each tensor the forward time from the layer that reads it first to the end.

        q_i = sum of forward_s over the layers from tensor i's own to the last

    One stream computes one layer at a time, so everything behind a layer waits for it, in its
    branch or not: the DAG decides the order alone. On a chain q_l = sum of forward_s over k >= l.
    Tensors are treated as layers: a layer's bias counts as read after its weight, though the layer
    waits for both, so predictions of crossing plans are slightly optimistic.

    Returns:
        Seconds, in the order of the trace.

    Raises:
        UsageError: see `forward_order`.
    """
    tails = [0.0] * len(trace.tensors)
    left_s = 0.0
    for index in reversed(forward_order(trace)):
        left_s += trace.tensors[index].forward_s
        tails[index] = left_s
    return tails


def describe_order(trace: Trace) -> str:
    """Where the forward order comes from, in words."""
    if trace.consumers is None:
        return "forward order: a chain (the trace has no consumers)"
    branches = sum(len(set(readers)) > 1 for readers in trace.consumers)
    return f"forward order: the trace's DAG ({branches} tensors with several consumers)"


def _check(trace: Trace, consumers: tuple[tuple[int, ...], ...]) -> None:
    count = len(trace.tensors)
    if len(consumers) != count:
        raise UsageError(
            f"trace {trace.name!r} has {count} tensors and consumers of {len(consumers)}; "
            f"expected one list for each tensor"
        )
    for index, readers in enumerate(consumers):
        for reader in readers:
            if not 0 <= reader < count:
                raise UsageError(
                    f"consumers of tensor {index} ({trace.tensors[index].name!r}) name tensor "
                    f"{reader}; expected indices 0 to {count - 1}"
                )
