"""`testbed.memory/1`: what steps would take, predicted before anything runs."""

from __future__ import annotations

from typing import Final

import msgspec

from testbed.base.errors import UsageError

MEMORY_SCHEMA: Final = "testbed.memory/1"
SUFFIX: Final = ".memory.json"  # of such a file in the folder of a sweep


class MemoryCurve(msgspec.Struct, kw_only=True):
    """Live storages over the time of one step, as predicted.

    Attributes:
        time_s: of each event, from the beginning of the step.
        levels: bytes alive at each event, by category.
    """

    time_s: list[float]
    levels: dict[str, list[int]]


class MemoryForecast(msgspec.Struct, kw_only=True):
    """One strategy at one batch size.

    Attributes:
        memory: the strategy's specification.
        compressor: of the gradients.
        batch_size: samples of a micro-batch; null: none fits.
        peak: bytes at the peak of a step, by category.
        layer: at work then.
        floor_bytes: weights, optimizer state and the largest layer's working set.
        step_s: estimated time of a step that keeps all activations.
        extra_s: predicted time that a step takes more.
        moved_bytes: written to the host in a step, and read back.
        fits: within the budget; null: none was given.
        why: the plan in words.
        error: why there is no prediction.
        curve: bytes at every event; null unless it was to be drawn.
        plan: what becomes of each activation (`testbed.memory-plan/1`); null unless it was to be
            saved.
    """

    memory: str
    compressor: str = "none"
    batch_size: int | None = None
    peak: dict[str, int] = {}
    layer: str = ""
    floor_bytes: int = 0
    step_s: float = 0.0
    extra_s: float = 0.0
    moved_bytes: int = 0
    fits: bool | None = None
    why: str = ""
    error: str = ""
    curve: MemoryCurve | None = None
    plan: msgspec.Raw | None = None

    @property
    def peak_bytes(self) -> int:
        """All together."""
        return sum(self.peak.values())


class MemorySimulation(msgspec.Struct, kw_only=True):
    """What `testbed simulate --memory` found.

    Attributes:
        workload: that was asked for.
        compressors: of its gradients.
        num_workers: that exchange them.
        budget_bytes: that a step was to fit; null: none.
        forecasts: of the strategies.
    """

    workload: str
    compressors: list[str]
    num_workers: int
    budget_bytes: int | None = None
    forecasts: list[MemoryForecast] = []
    schema: str = MEMORY_SCHEMA


def decode_memory(data: bytes, where: str) -> MemorySimulation:
    """A simulation of memory from its file.

    Raises:
        UsageError: it is none; names the source.
    """
    try:
        found = msgspec.json.decode(data, type=MemorySimulation)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{where} is no {MEMORY_SCHEMA} ({error}); expected what `testbed simulate --memory "
            "... --json FILE` wrote"
        ) from error
    if found.schema != MEMORY_SCHEMA:
        raise UsageError(f"{where}: schema is {found.schema!r}; expected {MEMORY_SCHEMA!r}")
    return found
