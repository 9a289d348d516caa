"""State as a flat dictionary of tensors: it can be saved, compared, weighed and nested."""

from __future__ import annotations

from testbed.compression.protocol import State


def num_bytes(state: State) -> int:
    """Bytes of all tensors of a state.

    Example:
        >>> import torch
        >>> num_bytes({"residual": torch.zeros(3)})
        12
    """
    return sum(t.numel() * t.element_size() for t in state.values())


def nested(name: str, state: State) -> State:
    """A wrapped compressor's state under a name of its own.

    Example:
        >>> import torch
        >>> list(nested("inner", {"u": torch.zeros(1)}))
        ['inner.u']
    """
    return {f"{name}.{key}": tensor for key, tensor in state.items()}


def taken_from(name: str, state: State) -> State:
    """What `nested` put under the name.

    Example:
        >>> import torch
        >>> list(taken_from("inner", {"inner.u": torch.zeros(1), "residual": torch.zeros(1)}))
        ['u']
    """
    prefix = f"{name}."
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
