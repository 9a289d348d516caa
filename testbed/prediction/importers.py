"""Traces from other projects' recordings of a backward pass."""

from __future__ import annotations

import re
from collections.abc import Sequence

from testbed.base.errors import UsageError
from testbed.base.trace import Trace, TraceTensor

NUM_HEADER_LINES = 3


def import_waits(text: str, name: str, forward_s: float, device: str = "cuda") -> Trace:
    r"""A trace from `wait_us,bytes` lines in backward order, after three lines of header.

    The header is a comment, the number of batches and the number of tensors. Gradients are taken
    as float32; a negative wait counts as 0. The forward time, which such a file does not have, is
    spread in proportion to the backward times.

    Raises:
        UsageError: a line is no pair of numbers, or their number is not that of the header.

    Reference:
        The recordings of Zhang et al., 2020, NetAI.

    Example:
        >>> import_waits("comment\n1\n2\n10,8\n-1,4\n", "toy", 0.0).ready_s()
        [1e-05, 1e-05]
    """
    lines = [line for line in text.splitlines() if line.strip()]
    pairs = [_pair(line, name) for line in lines[NUM_HEADER_LINES:]]
    promised = lines[2].strip() if len(lines) >= NUM_HEADER_LINES else "no header"
    if str(len(pairs)) != promised:
        raise UsageError(
            f"{name}: {len(pairs)} tensors follow a header that says {promised}; expected three "
            "lines of header (comment, batches, tensors) and one `wait_us,bytes` per tensor"
        )
    waits_s = [max(0.0, wait_us) / 1e6 for wait_us, _ in pairs]
    return _trace(name, device, waits_s, [num_bytes // 4 for _, num_bytes in pairs], forward_s)


def _pair(line: str, name: str) -> tuple[float, int]:
    wait, _, size = line.partition(",")
    try:
        return float(wait), int(size)
    except ValueError:
        raise UsageError(f"{name}: line {line!r}; expected `wait_us,bytes`") from None


def import_layer_log(text: str, name: str, forward_s: float, device: str = "cuda") -> Trace:
    r"""A trace from lines with `[id, size, backward_us, comm_us, ...]` in forward order.

    Whatever stands before a bracket is skipped, and so is what follows the first pass over the
    ids. Sizes are float32 elements. Neighbours with equal backward time are the blobs of one
    layer: its time counts once, so that they are ready together.

    Raises:
        UsageError: the text holds no such lines.

    Reference:
        The logs of Shi, Chu and Li, 2019, INFOCOM (K80, Caffe).

    Example:
        >>> import_layer_log("log] [0, 5, 20, 9]\nlog] [1, 4, 20, 9]", "toy", 0.0).ready_s()
        [2e-05, 2e-05]
    """
    rows = re.findall(r"\[\s*(\d+)\s*,\s*(\d+)\s*,\s*([\d.eE+-]+)\s*,[^\[\]]*\]", text)
    blobs: list[tuple[int, float]] = []
    for blob, size, time_us in rows:
        if int(blob) != len(blobs):
            break
        blobs.append((int(size), float(time_us)))
    if not blobs:
        raise UsageError(
            f"{name}: no line from id 0 on; expected lines with "
            "[id, elements, backward_us, comm_us], ids 0, 1, ... in forward order"
        )
    blobs.reverse()
    waits_s = [
        0.0 if index and blobs[index - 1][1] == time_us else time_us / 1e6
        for index, (_, time_us) in enumerate(blobs)
    ]
    return _trace(name, device, waits_s, [size for size, _ in blobs], forward_s)


def _trace(
    name: str, device: str, waits_s: Sequence[float], sizes: Sequence[int], forward_s: float
) -> Trace:
    total_s = sum(waits_s)
    count = len(sizes)
    tensors = [
        TraceTensor(
            name=f"tensor{count - 1 - position}",
            num_elements=size,
            forward_s=forward_s * wait_s / total_s if total_s > 0 else forward_s / count,
            backward_s=wait_s,
        )
        for position, (wait_s, size) in enumerate(zip(waits_s, sizes, strict=True))
    ]
    return Trace(name=name, device=device, batch_size=1, tensors=tuple(reversed(tensors)))
