"""Traces and links of whole numbers for the tests of plans that cross the iteration."""

from hypothesis import strategies as st
from msgspec.structs import replace

from testbed.base.link import Link
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.trace import Trace


def trace_of(backward, sizes, forward, consumers=None):
    """A trace of one-byte elements; the lists are in backward order."""
    return replace(Trace.from_backward(backward, sizes, forward), consumers=consumers)


def link_of(latency_s, seconds_per_byte):
    return Link(
        backend="gloo", num_workers=2, latency_s=latency_s, seconds_per_byte=seconds_per_byte
    )


TRACE_A = trace_of([2, 2, 3, 3, 5], [3, 4, 1, 1, 1], [1, 1, 1, 2, 2])
LINK_A = link_of(4, 1)
TRACE_B = trace_of([2, 2, 2], [8, 2, 2], [2, 2, 2])
LINK_B = link_of(1, 1)


def grouped_plan(trace, groups, **rules):
    """Whole tensors, in groups of forward indices."""
    return Plan(
        scheduler="case",
        names=tuple(t.name for t in trace.tensors),
        num_elements=tuple(t.num_elements for t in trace.tensors),
        dtypes=tuple(t.dtype for t in trace.tensors),
        messages=tuple(
            Message(
                parts=tuple(TensorSlice(i, 0, trace.tensors[i].num_elements) for i in group),
                priority=min(group),
            )
            for group in groups
        ),
        crosses_iteration=True,
        **rules,
    )


def ends(predicted, num_tensors):
    """When the last message of each tensor ends."""
    return [max(s.end_s for s in predicted.spans if i in s.tensors) for i in range(num_tensors)]


@st.composite
def traces(draw, max_tensors=6, max_bytes=8, max_time=6):
    count = draw(st.integers(1, max_tensors))

    def numbers(most, least=0):
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    return trace_of(numbers(max_time), numbers(max_bytes), numbers(max_time))


links = st.builds(link_of, st.integers(0, 5), st.integers(0, 3))
