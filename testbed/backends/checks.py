"""What every backend checks when a request is submitted, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import Disagreement, NotDeclared, UsageError
from testbed.base.types import Capabilities, Op, Request

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENT_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMBERED = tuple(NAMES)


def check_request(backend: str, request: Request, capabilities: Capabilities, size: int) -> None:
    """Refuse what the backend did not declare, or what none could carry out.

    Args:
        backend: its name, for messages.
        request: submitted.
        capabilities: declared.
        size: number of ranks.

    Raises:
        NotDeclared: op or channel.
        UsageError: root, parts, dtype, device or layout; says what is allowed.
    """
    op = request.op
    if op not in capabilities.ops:
        known = ", ".join(sorted(capabilities.ops))
        told = f"backend {backend!r} cannot {op} as it was opened; it can {known}"
        on_servers = op in (Op.INSTALL, Op.APPLY)
        raise NotDeclared(told + "; parameter servers need update=server for it" * on_servers)
    if not 0 <= request.channel < capabilities.num_channels:
        raise NotDeclared(
            f"channel is {request.channel}; backend {backend!r} was opened with "
            f"{capabilities.num_channels}, numbered from 0"
        )
    if not 0 <= request.root < size:
        raise UsageError(f"root is {request.root}; expected a rank below {size}")
    _check_parts(request, size)
    if op is Op.BARRIER:
        if request.tensor is not None:
            raise UsageError("a barrier was given a tensor; expected none")
        return
    for tensor in tensors_of(request):
        if tensor.dtype not in NAMES:
            known = ", ".join(ELEMENT_BYTES)
            raise UsageError(f"{request}: dtype is {tensor.dtype}; expected one of {known}")
        if tensor.device.type not in capabilities.device_types:
            known = ", ".join(sorted(capabilities.device_types))
            raise UsageError(f"{request}: tensor is on {tensor.device}; {backend!r} takes {known}")
        if not tensor.is_contiguous():
            raise UsageError(f"{request}: tensor is not contiguous; submit tensor.contiguous()")
        if op in (Op.ALL_GATHER, Op.MERGE) and tensor.dim() != 1:
            raise UsageError(
                f"{request}: tensor has {tensor.dim()} dimensions; expected one; call .view(-1)"
            )
        if op is Op.MERGE and tensor.dtype != torch.uint8:
            raise UsageError(f"{request}: dtype is {tensor.dtype}; expected a payload of uint8")
        if op in (Op.INSTALL, Op.APPLY) and not tensor.is_floating_point():
            raise UsageError(
                f"{request}: dtype is {tensor.dtype}; expected floating-point parameters, which "
                "alone an optimizer can update"
            )


def tensors_of(request: Request) -> tuple[torch.Tensor, ...]:
    """What a request brings along: its parts, or its one tensor.

    Raises:
        UsageError: it has neither.

    Example:
        >>> len(tensors_of(Request(Op.ALL_TO_ALL, parts=(torch.ones(1), torch.ones(2)))))
        2
    """
    if request.op is Op.ALL_TO_ALL or (request.op is Op.MERGE and request.parts):
        return request.parts
    if request.tensor is None:
        raise UsageError(
            f"{request} has no tensor; only a barrier, an all-to-all and a merge of parts go "
            "without"
        )
    return (request.tensor,)


def _check_parts(request: Request, size: int) -> None:
    """Refuse parts where none belong, and an all-to-all whose parts are not one for each rank."""
    op, parts = request.op, request.parts
    if op is not Op.ALL_TO_ALL and not parts:
        return
    if op not in (Op.ALL_TO_ALL, Op.MERGE):
        raise UsageError(
            f"{request} was given {len(parts)} parts; only all-to-all and merge take parts"
        )
    if request.tensor is not None:
        raise UsageError(f"{request} was given a tensor and parts; {op} takes one of them")
    if op is Op.MERGE:
        return
    if len(parts) != size:
        raise UsageError(f"{request} has {len(parts)} parts; expected {size}, one for each rank")
    if any(part.dim() != 1 for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(f"{request}: shapes are {shapes}; expected one dimension; flatten them")
    if len({(part.dtype, part.device) for part in parts}) > 1:
        given = ", ".join(f"{part.dtype} on {part.device}" for part in parts)
        raise UsageError(f"{request}: parts are {given}; expected one dtype and device")


# What ranks must have in common before their parts can be put together.


def one_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that all ranks gave.

    Args:
        dtypes: of each rank, in rank order.

    Raises:
        Disagreement: they differ; names each rank's.

    Example:
        >>> one_dtype([torch.uint8, torch.uint8])
        torch.uint8
    """
    if len(set(dtypes)) > 1:
        given = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in enumerate(dtypes))
        raise Disagreement(f"the ranks gave different dtypes ({given}); expected one dtype")
    return dtypes[0]
