"""Keeps idle cores from sleeping, so that a message need not wait for one to wake."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

REQUESTS: Final = Path("/dev/cpu_dma_latency")
YES: Final = "yes"
NOT_ASKED: Final = "no: awake=no"


@contextlib.contextmanager
def idle_polling(asked: bool = True, requests: Path = REQUESTS) -> Iterator[str]:
    """Inside the block idle cores poll instead of halting; `yes`, or why they do not.

    All nodes of an emulated cluster live on the cores of one machine, which work and wait by turns
    thousands of times a second. In a virtual machine a core that halts goes back to the host, and
    the time until the host lets it go on lies in every message that comes meanwhile, as time that
    was stolen from it. A core that polls still counts as idle, yields at once, and the kernel
    forgets the request when its holder ends, however it ends.

    Args:
        asked: False = idle cores halt as they always do.
        requests: the kernel's file for requests of a longest wake-up latency; only root may write.

    Example:
        >>> with idle_polling(requests=Path("/nonexistent/requests")) as awake:
        ...     awake
        'no: No such file or directory'
    """
    if not asked:
        yield NOT_ASKED
        return
    with contextlib.ExitStack() as stack:
        try:
            held = os.open(requests, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, held)
            os.write(held, struct.pack("=i", 0))  # microseconds
        except OSError as error:
            yield f"no: {error.strerror}"
        else:
            yield YES


# Which of the machine's cores each node has; pure.


def pin_cores(num_nodes: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The cores of each node, as many for each; None where they cannot be dealt out evenly.

    With N nodes and C cores node i has core i mod C where C divides N, so that neighbours in a ring
    are on different cores, and cores [i q, (i + 1) q) with q = floor(C / N) where C >= N; cores
    that are left over then are nobody's. Elsewhere some nodes would have more than others. Cores
    are taken by their numbers, whichever of them are threads of one physical core.

    Args:
        num_nodes: N > 0.
        cores: C > 0 numbers, in order.

    Example:
        >>> pin_cores(4, [0, 1]), pin_cores(2, [0, 1, 2, 3, 4]), pin_cores(3, [0, 1])
        (((0,), (1,), (0,), (1,)), ((0, 1), (2, 3)), None)
    """
    each, num_cores = len(cores) // num_nodes, len(cores)
    if each:
        return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(num_nodes))
    if num_nodes % num_cores:
        return None
    return tuple((cores[i % num_cores],) for i in range(num_nodes))
