"""What compressors keep follows its elements from one plan to the next."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.plan import Message, Plan, TensorSlice
from testbed.training.compressed.state import carried, packed, unpacked
from testbed.training.exchange.buckets import describe_messages

SIZES = {"a": 5, "b": 3, "c": 4}


def plan_of(names: tuple[str, ...], messages: list[list[tuple[str, int, int]]]) -> Plan:
    return Plan(
        scheduler="x",
        names=names,
        num_elements=tuple(SIZES[name] for name in names),
        dtypes=("float32",) * len(names),
        messages=tuple(
            Message(
                parts=tuple(TensorSlice(names.index(n), start, stop) for n, start, stop in parts)
            )
            for parts in messages
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Tensors in any order, cut anywhere, in any messages."""
    names = tuple(draw(st.permutations(tuple(SIZES))))
    parts = []
    for name in names:
        cuts = sorted(draw(st.sets(st.integers(1, SIZES[name] - 1))))
        edges = [0, *cuts, SIZES[name]]
        parts += [(name, a, b) for a, b in itertools.pairwise(edges)]
    parts = draw(st.permutations(parts))
    messages: list[list[tuple[str, int, int]]] = [[]]
    for part in parts:
        if messages[-1] and draw(st.booleans()):
            messages.append([])
        messages[-1].append(part)
    return plan_of(names, messages)


def values_of(plan: Plan, state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Residuals by tensor."""
    found = {name: torch.full((size,), torch.nan) for name, size in SIZES.items()}
    for message, key in zip(plan.messages, describe_messages(plan), strict=True):
        offset = 0
        for part in message.parts:
            length = part.stop - part.start
            piece = state[key]["inner.residual"][offset : offset + length]
            found[plan.names[part.tensor]][part.start : part.stop] = piece
            offset += length
    return found


@given(plans(), plans())
def test_residuals_follow_their_elements(old: Plan, new: Plan) -> None:
    numbers = iter(range(1, 100))
    before = {
        key: {
            "inner.residual": torch.tensor(
                [float(next(numbers)) for p in message.parts for _ in range(p.start, p.stop)]
            ),
            "learning_rate": torch.tensor(0.5, dtype=torch.float64),
        }
        for message, key in zip(old.messages, describe_messages(old), strict=True)
    }
    after = carried(before, old, describe_messages(old), new, describe_messages(new))
    wanted, found = values_of(old, before), values_of(new, after)
    for name in SIZES:
        assert torch.equal(wanted[name], found[name])
    assert all(float(state["learning_rate"]) == 0.5 for state in after.values())


def test_only_a_message_of_the_same_parts_keeps_its_bases() -> None:
    old = plan_of(("a", "b", "c"), [[("a", 0, 5)], [("b", 0, 3), ("c", 0, 4)]])
    new = plan_of(("c", "b", "a"), [[("a", 0, 5)], [("b", 0, 3)], [("c", 0, 4)]])
    state = {"right": torch.ones(2)}
    before = {"a": state, "b..c (2 parts)": {"right": torch.ones(3), "v": torch.arange(7.0)}}
    after = carried(before, old, describe_messages(old), new, describe_messages(new))
    assert list(after) == ["a", "b", "c"]
    assert torch.equal(after["a"]["right"], state["right"])
    assert {name: list(kept) for name, kept in after.items()}["b"] == ["v"]
    assert after["c"]["v"].tolist() == [3.0, 4.0, 5.0, 6.0]


def test_what_was_never_kept_starts_at_zero() -> None:
    old = plan_of(("a", "b"), [[("a", 0, 5)], [("b", 0, 3)]])
    new = plan_of(("a", "b"), [[("a", 0, 5), ("b", 0, 3)]])
    after = carried({"b": {"u": torch.ones(3)}}, old, ["a", "b"], new, ["ab"])
    assert after["ab"]["u"].tolist() == [0.0] * 5 + [1.0] * 3
    assert carried({}, old, ["a", "b"], new, ["ab"]) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_a_checkpoint_brings_state_back_where_it_lay() -> None:
    device = torch.device("cuda")
    saved = packed({"a": {"u": torch.ones(1, device=device), "bounds": torch.ones(1)}})
    on_cpu = {"a": {name: tensor.cpu() for name, tensor in saved["states"]["a"].items()}}
    back = unpacked({**saved, "states": on_cpu}, device)
    assert [t.device.type for t in back["a"].values()] == ["cuda", "cpu"]
