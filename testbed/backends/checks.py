"""What every backend checks when a request is submitted, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from testbed.base.errors import Disagreement, UsageError
from testbed.base.types import Capabilities, Op, Request

SUMMABLE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


def check_request(
    backend: str,
    request: Request,
    capabilities: Capabilities,
    size: int,
    dtypes: Iterable[torch.dtype] = SUMMABLE,
) -> None:
    """Refuse what the backend did not declare.

    Raises:
        UsageError: op, channel, dtype, device, layout or root; says what is allowed.
    """
    if request.op not in capabilities.ops:
        known = ", ".join(sorted(capabilities.ops))
        raise UsageError(f"backend {backend!r} cannot {request.op}; it can {known}")
    if not 0 <= request.channel < capabilities.num_channels:
        raise UsageError(
            f"channel is {request.channel}; backend {backend!r} was opened with "
            f"{capabilities.num_channels}, numbered from 0"
        )
    if not 0 <= request.root < size:
        raise UsageError(f"root is {request.root}; expected a rank below {size}")
    check_parts(request, size)
    if request.op is Op.BARRIER:
        return
    allowed = tuple(dtypes)
    for tensor in tensors_of(request):
        if tensor.dtype not in allowed:
            words = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise UsageError(
                f"{request}: dtype is {tensor.dtype}; backend {backend!r} takes {words}"
            )
        if tensor.device.type not in capabilities.device_types:
            words = ", ".join(sorted(capabilities.device_types))
            raise UsageError(f"{request}: tensor is on {tensor.device}; {backend!r} takes {words}")
        if not tensor.is_contiguous():
            raise UsageError(f"{request}: tensor is not contiguous; submit tensor.contiguous()")
    if request.op is Op.ALL_GATHER and tensor.dim() != 1:
        raise UsageError(f"{request}: gather takes one dimension, not {tensor.dim()}; flatten it")


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
            f"{request} has no tensor; only a barrier, deliver and a merge of parts go without"
        )
    return (request.tensor,)


def check_parts(request: Request, size: int) -> None:
    """Refuse parts where none belong, and a DELIVER whose parts are not one for each rank.

    Raises:
        UsageError: their number, dimensions or dtypes, or a tensor beside them.
    """
    parts = request.parts
    if request.op is Op.MERGE and parts:
        if request.tensor is not None:
            raise UsageError(f"{request} was given a tensor and parts; merge takes one of them")
        return
    if request.op is not Op.ALL_TO_ALL:
        if parts:
            raise UsageError(
                f"{request} was given {len(parts)} parts; only deliver and merge take parts"
            )
        return
    if request.tensor is not None:
        raise UsageError(f"{request} was given a tensor; deliver takes parts, one for each rank")
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
