"""What one rank brings home."""

from __future__ import annotations

import msgspec

from testbed.records.cell import Accuracy, CompressionResult


class Outcome(msgspec.Struct, kw_only=True):
    """What one rank brings home; rank 0 makes the cell from all of them (see `Cell`)."""

    rank: int
    step_time_s: list[float] = []
    exposed_s: list[float] = []
    stolen: list[float] = []
    unsteady: list[bool] = []
    loss: list[float] = []
    staleness: list[int] = []
    sent_bytes: int = 0
    received_bytes: int = 0
    num_exchanges: int = 0
    num_helper_processes: int = 0
    peak_memory_bytes: int = 0
    cores_busy: float | None = None
    cores_stolen: float | None = None
    training_time_s: float = 0.0
    steps: int = 0
    batch_size: int = 0
    sample_digest: str = ""
    initial_digest: str = ""
    final_digest: str = ""
    test_accuracy: float | None = None
    accuracy_curve: list[Accuracy] = []
    reference_error: float | None = None
    reference_steps: int = 0
    bit_equal: bool | None = None
    compression: CompressionResult | None = None
