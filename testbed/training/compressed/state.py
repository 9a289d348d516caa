"""What compressors keep, carried over to a new plan, and to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from testbed.base.plan import Message, Plan
from testbed.compression.protocol import State

States = dict[str, State]

# State of these names has one number for each element of the message, wherever the message goes.
PER_ELEMENT = ("residual", "u", "v")


def carried(
    states: Mapping[str, State],
    old: Plan,
    old_keys: Sequence[str],
    new: Plan,
    new_keys: Sequence[str],
) -> States:
    """The states of a plan's messages, as far as they make sense for another plan's.

    A message of the same parts keeps its whole state. Of the others, what was held back (residuals,
    velocities) follows its elements, so that nothing is lost; numbers without dimensions (a
    learning rate) go along; the rest (bases, thresholds) starts anew.

    Args:
        states: by key, of the old plan.
        old: the plan that they were made under.
        old_keys: names of its messages.
        new: for the same tensors.
        new_keys: names of its messages.
    """
    by_parts = {_parts(old, m): k for m, k in zip(old.messages, old_keys, strict=True)}
    elements, scalars = _spread(states, old, old_keys)
    found: States = {}
    for message, key in zip(new.messages, new_keys, strict=True):
        same = by_parts.get(_parts(new, message))
        if same is not None:
            state = dict(states.get(same, {}))
        else:
            state = _gathered(elements, new, message)
            state = {**scalars, **state} if state else {}
        if state:
            found[key] = state
    return found


def packed(states: States) -> dict[str, Any]:
    """States for a checkpoint, which brings all tensors back to the CPU; see `unpacked`."""
    where = {k: {n: t.device.type for n, t in state.items()} for k, state in states.items()}
    return {"states": states, "devices": where}


def unpacked(saved: Mapping[str, Any], device: torch.device) -> States:
    """What `packed` packed: tensors that lay on a GPU lie on `device`, the others on the CPU.

    What has a number for each element lies on `device` wherever it lay.

    Example:
        >>> unpacked(packed({"a": {"u": torch.zeros(1)}}), torch.device("cpu"))
        {'a': {'u': tensor([0.])}}
    """
    where = saved["devices"]
    return {
        key: {
            n: t.to(device) if where[key][n] != "cpu" or _is_per_element(n) else t
            for n, t in state.items()
        }
        for key, state in saved["states"].items()
    }


def _parts(plan: Plan, message: Message) -> tuple[tuple[str, int, int], ...]:
    return tuple((plan.names[p.tensor], p.start, p.stop) for p in message.parts)


def _spread(
    states: Mapping[str, State], plan: Plan, keys: Sequence[str]
) -> tuple[dict[tuple[str, str], torch.Tensor], State]:
    """State by (its name, tensor's name) as whole tensors [elements], and what has no dimension."""
    sizes = dict(zip(plan.names, plan.num_elements, strict=True))
    elements: dict[tuple[str, str], torch.Tensor] = {}
    scalars: State = {}
    for message, key in zip(plan.messages, keys, strict=True):
        for name, kept in states.get(key, {}).items():
            if kept.dim() == 0:
                scalars[name] = kept
            if not _is_per_element(name):
                continue
            offset = 0
            for tensor, start, stop in _parts(plan, message):
                whole = elements.get((name, tensor))
                if whole is None:
                    whole = elements[name, tensor] = kept.new_zeros(sizes[tensor])
                whole[start:stop] = kept[offset : offset + stop - start]
                offset += stop - start
    return elements, scalars


def _gathered(
    elements: Mapping[tuple[str, str], torch.Tensor], plan: Plan, message: Message
) -> State:
    parts = _parts(plan, message)
    names = {name for name, tensor in elements if tensor in {t for t, _, _ in parts}}
    state: State = {}
    for name in sorted(names):
        like = next(elements[name, t] for t, _, _ in parts if (name, t) in elements)
        pieces = [
            elements[name, t][start:stop] if (name, t) in elements else like.new_zeros(stop - start)
            for t, start, stop in parts
        ]
        state[name] = torch.cat(pieces)
    return state


def _is_per_element(name: str) -> bool:
    return name.rpartition(".")[2] in PER_ELEMENT
