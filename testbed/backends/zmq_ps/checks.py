"""What a group or a request must be before anything travels."""

from __future__ import annotations

import torch

from testbed.backends.checks import check_parts, tensors_of
from testbed.backends.protocol import Group
from testbed.backends.zmq_ps.frames import DTYPE_NAMES
from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.server_update import parse_optimizer
from testbed.backends.zmq_ps.wire import MAX_KEY_BYTES, MAX_NOTE_BYTES
from testbed.base.errors import UsageError
from testbed.base.types import Capabilities, Op, Request
from testbed.compression.server_merge import build


def check_group(group: Group, options: ZmqPsOptions) -> int:
    """The number of servers, if options and group fit.

    Raises:
        UsageError: they do not; says which and what to change.
    """
    num_servers = options.num_servers(group.size)
    if group.num_servers != options.num_dedicated:
        raise UsageError(
            f"zmq-ps: servers={options.servers} needs {options.num_dedicated} dedicated server "
            f"processes and the job has {group.num_servers}; start the job with as many"
        )
    if group.order == "priority" and options.staleness != 0:
        raise UsageError(
            f"zmq-ps: order=priority cannot be combined with consistency={options.consistency}: "
            "rank 0 would decide the order of workers that run ahead of it; use order=fifo"
        )
    if not group.device.startswith("cpu"):
        raise UsageError(
            f"zmq-ps: device is {group.device!r}; servers exchange tensors in CPU memory; "
            "use device=cpu, or copy to the CPU before submitting"
        )
    return num_servers


def check_request(request: Request, capabilities: Capabilities, size: int) -> None:
    """Refuse what no server could carry out.

    Raises:
        UsageError: op, tensor, root, key or optimizer; says what was given and expected.
    """
    if request.op not in capabilities.ops:
        raise UsageError(
            f"zmq-ps cannot {request.op} as it was opened; it can "
            f"{', '.join(sorted(capabilities.ops))}; install and apply need update=server"
        )
    if len(request.key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise UsageError(f"key has more than {MAX_KEY_BYTES} bytes; give the tensor a shorter one")
    check_parts(request, size)
    if request.op is Op.BARRIER:
        return
    for tensor in tensors_of(request):
        _check_tensor(request, tensor)
    if request.op is Op.BROADCAST and not 0 <= request.root < size:
        raise UsageError(f"root is {request.root}; expected a rank from 0 to {size - 1}")
    if request.op is Op.INSTALL:
        parse_optimizer(request.note)
    if request.op is Op.MERGE:
        _check_mergers(request, capabilities.num_mergers)


def _check_mergers(request: Request, num_servers: int) -> None:
    notes = request.note.split("\n") if request.parts else [request.note]
    if request.parts and not len(request.parts) == len(notes) == num_servers:
        raise UsageError(
            f"{request} has {len(request.parts)} parts and {len(notes)} descriptions of mergers; "
            f"expected {num_servers} each, one for each server"
        )
    for note in notes:
        if len(note.encode()) > MAX_NOTE_BYTES:
            raise UsageError(f"{request}: the merger's description is longer than {MAX_NOTE_BYTES}")
        build(note)


def _check_tensor(request: Request, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"{request}: tensor is on {tensor.device}, strides {tensor.stride()}; expected a "
            "contiguous tensor in CPU memory; use .cpu().contiguous()"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise UsageError(
            f"{request}: dtype is {tensor.dtype}; expected one of {', '.join(DTYPE_NAMES.values())}"
        )
    if request.op in (Op.ALL_GATHER, Op.MERGE) and tensor.dim() != 1:
        raise UsageError(f"{request}: tensor has {tensor.dim()} dimensions; expected 1")
    if request.op is Op.MERGE and tensor.dtype != torch.uint8:
        raise UsageError(f"{request}: dtype is {tensor.dtype}; expected a payload of uint8")
    if request.op in (Op.INSTALL, Op.APPLY) and not tensor.dtype.is_floating_point:
        raise UsageError(
            f"{request}: dtype is {tensor.dtype}; expected floating-point parameters, which alone "
            "an optimizer can update"
        )
