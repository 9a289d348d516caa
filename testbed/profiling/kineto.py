"""Traces that torch's profiler exported, read as traces of a training step.

The file (Chrome trace JSON, `torch.profiler.profile(record_shapes=True)`, `export_chrome_trace`)
holds operators with the autograd sequence number that the graph's node got, the engine's
evaluations of these nodes in the backward pass with the same number, and, with a GPU, kernels with
the correlation id of the runtime call that launched them.
"""

from __future__ import annotations

import gzip
import io
import math
import statistics
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import PurePath
from typing import Any, Final

import msgspec

from testbed.base.errors import UsageError
from testbed.base.trace import Trace, TraceTensor

_EVALUATION: Final = "autograd::engine::evaluate_function: "
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH: Final = ("cuda_runtime", "cuda_driver", "hip_runtime")
_DTYPES: Final = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
}
_COLLECTIVE: Final = ("ncclDevKernel", "ncclKernel")  # NCCL's, new and old
_MAX_BYTES: Final = 1 << 31  # of a file, unpacked
_RECORD: Final = "record it as in docs/importing-traces.md"


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ph: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def number(self) -> int | None:
        """The autograd sequence number."""
        found = self.args.get("Sequence number")
        return found if isinstance(found, int) and found >= 0 else None


class _File(msgspec.Struct):
    traceEvents: list[_Event]


@dataclass(frozen=True)
class _Gradient:
    """One gradient of one pass: when it was accumulated, by which layer, of which shape."""

    at: float
    layer: _Event
    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True)
class _Pass:
    """A forward and a backward pass; moments in microseconds, gradients as they became ready."""

    begin: float
    middle: float
    end: float
    gradients: tuple[_Gradient, ...]


def read_kineto(
    data: bytes,
    where: str,
    named: Sequence[tuple[str, int]] | None = None,
    batch_size: int | None = None,
) -> Trace:
    """The trace of a step in a file of torch's profiler; medians over the passes in it.

        backward_s(k) = ready(k) - ready(k - 1)
        forward_s of a layer = begin of the next layer - its own begin, shared by its tensors

    A gradient is ready when the engine has accumulated it. Its layer is the outermost operator that
    made the node which the engine evaluated just before. With kernels in the file a moment is that
    of the GPU's queue, as of an event in it: when all kernels that were launched before it have
    ended, at the earliest now. A kernel's launch is the runtime call of its correlation id, else
    the operator of its external id. Kernels of NCCL are left out. Passes whose gradients are not
    the usual ones are, too. The trace is a chain: no branches are known.

    Args:
        data: Chrome trace JSON, gzipped or not.
        where: the file's name, for errors and the trace.
        named: names and numbers of elements of the model's parameters, in its own order; None:
            tensors are named after operators, and the file must hold shapes.
        batch_size: samples; None: from the shape of the first layer's input.

    Raises:
        UsageError: no such trace, no backward pass in it, no shapes, or other
            parameters than the model's.
    """
    events = _events(data, where)
    operators = [e for e in events if e.cat == "cpu_op"]
    passes = _passes(operators)
    if not passes:
        raise UsageError(
            f"{where} holds no backward pass with forward operators ({len(operators)} "
            f"operators); {_RECORD}: forward and backward of whole steps, on the CPU too"
        )
    every = len(passes)
    kinds = Counter(tuple(g.shape for g in each.gradients) for each in passes)
    usual = kinds.most_common(1)[0][0]  # a recording may begin within a step
    passes = [each for each in passes if tuple(g.shape for g in each.gradients) == usual]
    sizes = _sizes(where, passes[0].gradients, named)
    moment = _moments(events, where)
    halves = [_times(each, moment) for each in passes]
    forward = [statistics.median(column) for column in zip(*(f for f, _ in halves), strict=True)]
    backward = [statistics.median(column) for column in zip(*(b for _, b in halves), strict=True)]
    rows = zip(sizes, passes[0].gradients, forward, backward, strict=True)
    tensors = [
        TraceTensor(name=name, num_elements=size, dtype=g.dtype, forward_s=fwd_s, backward_s=bwd_s)
        for (name, size), g, fwd_s, bwd_s in rows
    ]
    gpu = any(e.cat in _ON_GPU for e in events)
    return Trace(
        name=PurePath(where).name.partition(".")[0],
        device="cuda" if gpu else "cpu",
        batch_size=batch_size or _samples(passes[0]),
        tensors=tuple(reversed(tensors)),
        extra={
            "imported": {
                "from": "torch.profiler",
                "file": PurePath(where).name,
                "repeats": len(passes),
                "left_out": every - len(passes),
            }
        },
    )


def _plain(data: bytes, where: str) -> bytes:
    with gzip.open(io.BytesIO(data)) as file:
        plain = file.read(_MAX_BYTES + 1)
    if len(plain) > _MAX_BYTES:
        raise UsageError(f"{where} unpacks to more than {_MAX_BYTES} bytes; record fewer steps")
    return plain


def _events(data: bytes, where: str) -> list[_Event]:
    try:
        plain = _plain(data, where) if data[:2] == b"\x1f\x8b" else data
        found = msgspec.json.decode(plain, type=_File, strict=False).traceEvents
    except (msgspec.DecodeError, OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{where} is no trace of torch's profiler ({error}); {_RECORD}") from error
    return sorted((e for e in found if e.ph == "X"), key=lambda e: (e.ts, -e.dur))


def _passes(operators: Sequence[_Event]) -> list[_Pass]:
    """The passes in a file, from operators in order of their begin."""
    outermost = _outermost(operators)
    nodes = [o for o in outermost if o.name.startswith(_EVALUATION)]
    numbers = {n.number for n in nodes if n.number is not None}
    forward = [
        (o, outer)
        for o, outer in zip(operators, _owners(operators, outermost), strict=True)
        if o.number in numbers and not outer.name.startswith(_EVALUATION)
    ]
    # Every thread counts for itself; the model's is the one with most of the numbers.
    threads = Counter((o.pid, o.tid) for o, _ in forward).most_common(1)
    # The counter moves on when a node is made: of the operators that saw a number, the last.
    makers = {o.number: outer for o, outer in forward if (o.pid, o.tid) == threads[0][0]}
    begins = sorted(outer.ts for number, outer in makers.items() if number in numbers)
    ready = [o for o in operators if o.name == _ACCUMULATE]
    found, group = [], list[_Event]()
    for node in [*nodes, None]:
        between = node is not None and group and _any_in(begins, group[-1].ts, node.ts)
        if group and (node is None or between):
            found += _pass(group, makers, ready)
            group = []
        if node is not None:
            group.append(node)
    return found


def _pass(
    nodes: Sequence[_Event], makers: dict[int | None, _Event], ready: Sequence[_Event]
) -> list[_Pass]:
    """One pass, of the engine's evaluations; none where its forward pass is not in the file."""
    gradients: list[_Gradient] = []
    layers: list[_Event] = []
    layer: _Event | None = None
    for node in nodes:
        if node.number is not None and (maker := makers.get(node.number)) is not None:
            layer = maker
            layers.append(maker)
        if node.name.removeprefix(_EVALUATION) == _ACCUMULATE and layer is not None:
            first = bisect_left(ready, node.ts, key=lambda o: o.ts)
            inside = [o for o in ready[first : first + 1] if o.ts <= node.end]
            shape, dtype = _shape(inside[0] if inside else node)
            gradients.append(_Gradient(node.end, layer, shape, dtype))
    if not gradients:
        return []
    begin = min(one.ts for one in layers)
    return [_Pass(begin, nodes[0].ts, nodes[-1].end, tuple(gradients))]


def _outermost(operators: Sequence[_Event]) -> list[_Event]:
    """Operators within no other one of their thread."""
    ends: dict[tuple[Any, Any], float] = {}
    found = []
    for one in operators:
        thread = (one.pid, one.tid)
        if one.ts >= ends.get(thread, -math.inf):
            ends[thread] = one.end
            found.append(one)
    return found


def _owners(operators: Sequence[_Event], outermost: Sequence[_Event]) -> list[_Event]:
    """The outermost operator around each one."""
    current: dict[tuple[Any, Any], _Event] = {}
    heads = {id(one) for one in outermost}
    found = []
    for one in operators:
        if id(one) in heads:
            current[one.pid, one.tid] = one
        found.append(current[one.pid, one.tid])
    return found


def _any_in(moments: Sequence[float], start: float, end: float) -> bool:
    return bisect_right(moments, end) > bisect_left(moments, start)


def _shape(accumulated: _Event) -> tuple[tuple[int, ...] | None, str]:
    dims = accumulated.args.get("Input Dims") or [None]
    types = accumulated.args.get("Input type") or ["float"]
    if dims[0] is None:
        return None, "float32"
    kind = str(types[0])
    if kind not in _DTYPES:
        raise UsageError(f"a gradient is of {kind!r}; a trace holds {', '.join(_DTYPES)}")
    return tuple(dims[0]), _DTYPES[kind]


def _sizes(
    where: str, gradients: Sequence[_Gradient], named: Sequence[tuple[str, int]] | None
) -> list[tuple[str, int]]:
    """Name and size of each gradient, in the order in which they became ready."""
    sizes = [None if g.shape is None else math.prod(g.shape) for g in gradients]
    if named is None:
        if None in sizes:
            raise UsageError(
                f"{where} holds no shapes of gradients; record with record_shapes=True, or give "
                "the model with --workload"
            )
        count = len(sizes)
        told = enumerate(zip(gradients, sizes, strict=True), 1)
        return [(f"{count - k}.{g.layer.name}", size or 0) for k, (g, size) in told]
    if len(named) != len(gradients):
        raise UsageError(
            f"{where} holds {len(gradients)} gradients and the model of --workload has "
            f"{len(named)} parameters; give the model that was recorded"
        )
    left, found = list(reversed(named)), []
    for size in sizes:
        match = next((one for one in left if size in (None, one[1])), None)
        if match is None:
            raise UsageError(
                f"{where} holds a gradient of {size} elements, which no parameter of the model of "
                "--workload has; give the model that was recorded"
            )
        left.remove(match)
        found.append(match)
    return found


def _samples(one: _Pass) -> int:
    """First dimension of the input of the layer that began first."""
    first = min((g.layer for g in one.gradients), key=lambda layer: layer.ts)
    shapes = [d for d in first.args.get("Input Dims", []) if isinstance(d, list) and d]
    place = 1 if first.name == "aten::embedding" else 0
    return int(shapes[place][0]) if len(shapes) > place else 1


def _moments(events: Sequence[_Event], where: str) -> Callable[[float], float]:
    """Seconds of a moment of the host: its own, or of the GPU's queue where there are kernels."""
    kernels = [e for e in events if e.cat in _ON_GPU and not e.name.startswith(_COLLECTIVE)]
    if not kernels:
        return lambda at: at * 1e-6
    calls = {e.args.get("correlation"): e.ts for e in events if e.cat in _LAUNCH}
    owners = {e.args.get("External id"): e.ts for e in events if e.cat == "cpu_op"}
    launched = []
    for kernel in kernels:
        at = calls.get(kernel.args.get("correlation"), owners.get(kernel.args.get("External id")))
        if at is not None:
            launched.append((at, kernel))
    if not launched:
        raise UsageError(f"{where} holds {len(kernels)} kernels and no call that launched them")
    launched.sort(key=lambda pair: pair[0])
    times = [at for at, _ in launched]
    ends = list(accumulate((kernel.end for _, kernel in launched), max))

    def moment(at: float) -> float:
        place = bisect_right(times, at)
        return max(at, ends[place - 1] if place else at) * 1e-6

    return moment


def _times(one: _Pass, moment: Callable[[float], float]) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each gradient, in the order in which they became ready."""
    begins = sorted({g.layer.ts for g in one.gradients})
    edges = [moment(at) for at in (one.begin, *begins[1:], one.middle)]
    share = {at: edges[k + 1] - edges[k] for k, at in enumerate(begins)}
    tensors = [g.layer.ts for g in one.gradients]
    forward = [share[at] / tensors.count(at) for at in tensors]
    ready = [moment(one.middle), *(moment(g.at) for g in one.gradients)]
    backward = [max(0.0, b - a) for a, b in pairwise(ready)]
    backward[-1] += max(0.0, moment(one.end) - ready[-1])
    return forward, backward
