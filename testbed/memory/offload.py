"""Offloading: activations wait on the host between forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.parts import PUBLISHED, Part
from testbed.memory.planning.lifetimes import KEEP, OFFLOAD, Lifetimes
from testbed.memory.planning.plan import MemoryPlan, plan_of
from testbed.memory.planning.simulator import simulate
from testbed.memory.strategy import Limits, Strategy, To


@dataclass(frozen=True)
class OffloadOptions:
    """Options of `offload`.

    Attributes:
        min_kib: activations of fewer KiB stay.
        to: where a CPU's activations go: shared memory (`shm`), or a `file` in TMPDIR.
    """

    min_kib: int = 64
    to: To = "shm"

    def __post_init__(self) -> None:
        if self.min_kib < 0:
            raise UsageError(f"offload: min_kib is {self.min_kib}; expected 0 or more")


def offload(options: OffloadOptions) -> Strategy:
    """Move what autograd saves to the host, and fetch it ahead of its use.

        stall of an activation = max(0, bytes / bandwidth - what is computed meanwhile)

    One copy to the host is under way at a time, and one back ahead of its use, so that two
    activations are held for moving at most. Beside a GPU they go to pinned memory on a stream of
    their own, beside a CPU to memory-mapped files without names, on a thread. The host's memory is
    memory, too: what was moved is told beside the peak.

    Args:
        options: what is too small to be moved, in KiB, and where it goes.

    Raises:
        UsageError: `min_kib` is below 0; there is no room for the files.

    Example:
        >>> offload(OffloadOptions(min_kib=1)).mirror is None
        True

    Reference:
        Rhu et al., 2016, MICRO (vDNN). Departs: all saved tensors, not those of convolutions
        alone; the next one wanted is fetched, not the layer's that comes next.
    """

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        actions = of_size(lifetimes, options.min_kib * 1024)
        footprint = simulate(lifetimes, actions, limits.costs)
        count = actions.count(OFFLOAD)
        why = f"{count} of {len(actions)} activations wait on the host"
        return plan_of("offload", lifetimes, actions, footprint, why=why)

    return Strategy(choose=choose, to=options.to)


def of_size(lifetimes: Lifetimes, min_bytes: int) -> str:
    """An action for each value: moved are those that are saved and have so many bytes."""
    return "".join(
        OFFLOAD if value.uses and value.num_bytes >= min_bytes else KEEP
        for value in lifetimes.values
    )


OFFLOAD_PART = Part(
    name="offload",
    summary="activations wait on the host (min_kib, to)",
    origin=PUBLISHED,
    build=offload,
    options=OffloadOptions,
)
