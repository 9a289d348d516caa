"""Tensors in host memory that PyTorch does not allocate, and optimizer state that lives there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from testbed.base.errors import UsageError
from testbed.memory.strategy import To

SHARED_MEMORY = "/dev/shm"
PAGE_BYTES = 4096
"""Tensors below this size stay where they are: a mapping takes whole pages."""


def zeros_on_host(
    num_elements: int, dtype: torch.dtype, device: torch.device, to: To = "shm"
) -> torch.Tensor:
    """Zeros [num_elements] in host memory, for tensors of a device.

    For a GPU the memory is pinned. For a CPU it is a mapped file without a name: no part of the
    process' anonymous memory, and gone with the process however that ends. The file's blocks are
    reserved at once: in a folder that is full, a later write would end the process.

    Args:
        num_elements: how many.
        dtype: of each.
        device: that works with them.
        to: where a CPU's file lies: shared memory, or a `file` in the temporary folder (TMPDIR).

    Raises:
        UsageError: neither shared memory nor the folder for temporary files has room.

    Example:
        >>> zeros_on_host(3, torch.float32, torch.device("cpu"))
        tensor([0., 0., 0.])
    """
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < PAGE_BYTES:
        return torch.zeros(num_elements, dtype=dtype)
    file = _reserved(num_bytes, to)
    try:
        path = f"/proc/self/fd/{file}"
        return torch.from_file(path, shared=True, size=num_elements, dtype=dtype)
    finally:
        os.close(file)


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor in host memory, or itself where it lies there already.

    Args:
        tensor: any.
        device: that works with it.

    Example:
        >>> there = on_host(torch.ones(64, 64), torch.device("cpu"))
        >>> there is on_host(there, torch.device("cpu")), bool((there == 1).all())
        (True, True)
    """
    if tensor.nbytes < PAGE_BYTES or is_on_host(tensor, device):
        return tensor
    copy = zeros_on_host(tensor.numel(), tensor.dtype, device).view(tensor.shape)
    return copy.copy_(tensor)


def is_on_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor lies where `zeros_on_host` puts it, unless it is too small.

    Args:
        tensor: any.
        device: that works with it.
    """
    if device.type != "cpu":
        return tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.untyped_storage().filename is not None


def keep_state_on_host(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From now on an optimizer's state (momentum, Adam's moments) lies in host memory.

    The first step makes the state of a parameter, then it is moved. On a CPU the later steps work
    on it there; on a GPU the state of the parameters that a step is for comes to the GPU before and
    goes back after it, so that steps for few parameters at a time need room for theirs alone.

    Args:
        model: not looked at.
        optimizer: any whose state is tensors of the parameters' shapes.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> keep_state_on_host(layer, optimizer)
        >>> layer(torch.ones(1, 64)).sum().backward(); optimizer.step()
        >>> moments = optimizer.state[layer.weight]
        >>> is_on_host(moments["exp_avg"], torch.device("cpu"))
        True
    """
    away: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def fetch(stepping: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, name, kept in _states(stepping):
            if kept.device != parameter.device:
                away[parameter, name] = kept
                stepping.state[parameter][name] = kept.to(parameter.device)

    def bring_back(stepping: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, name, kept in _states(stepping):
            before = away.pop((parameter, name), None)
            if before is not None:
                stepping.state[parameter][name] = before.copy_(kept)
            elif not is_on_host(kept, parameter.device):
                stepping.state[parameter][name] = on_host(kept, parameter.device)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(bring_back)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """What an optimizer keeps for each element of the parameters that its groups name now."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Not `state[parameter]`, which would make an entry.
            for name, kept in list(optimizer.state.get(parameter, {}).items()):
                if isinstance(kept, torch.Tensor) and kept.shape == parameter.shape:
                    yield parameter, name, kept


def _reserved(num_bytes: int, to: To) -> int:
    """The descriptor of a file without a name that has so many bytes."""
    tried = []
    folders = (SHARED_MEMORY, tempfile.gettempdir())
    for folder in dict.fromkeys(folders if to == "shm" else reversed(folders)):
        try:
            return _file_in(folder, num_bytes)
        except OSError as error:
            tried.append(f"{folder}: {error.strerror}")
    raise UsageError(
        f"host memory for {num_bytes} bytes was asked for, and there is no room ({', '.join(tried)}"
        "); make room, or name another folder in TMPDIR"
    )


def _file_in(folder: str, num_bytes: int) -> int:
    file = os.open(Path(folder), os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file
