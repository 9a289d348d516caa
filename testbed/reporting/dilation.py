"""Tables show the times of the emulated cluster: real ones divided by the dilation; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from testbed.records.cell import Cell, CompressionResult

C = TypeVar("C", bound=Cell)

_TIMES = (
    "step_time_s",
    "step_time_p5_s",
    "step_time_p95_s",
    "step_time_low_s",
    "step_time_high_s",
    "compute_s",
    "exposed_comm_s",
    "predicted_step_time_s",
    "predicted_unrehearsed_s",
    "training_time_s",
)


def undilated(cell: C) -> C:
    """The cell with the times and the speed of the cluster that it emulated.

    Samples and the curve of accuracies keep the real ones. A cell that is undilated already, as one
    without a cluster is, stays as it is.

    Example:
        >>> from testbed.config import RunConfig
        >>> cell = Cell(backend="mpi", workload="x", num_workers=2, config=RunConfig(),
        ...             dilation=10.0, step_time_s=1.0, samples_per_s=64.0)
        >>> shown = undilated(cell)
        >>> shown.step_time_s, shown.samples_per_s
        (0.1, 640.0)
    """
    factor = cell.dilation
    if factor == 1:
        return cell
    times = {name: value / factor for name in _TIMES if (value := getattr(cell, name)) is not None}
    reached = {
        target: None if time_s is None else time_s / factor
        for target, time_s in cell.time_to_accuracy_s.items()
    }
    speed = None if cell.samples_per_s is None else cell.samples_per_s * factor
    return msgspec.structs.replace(
        cell,
        **times,
        time_to_accuracy_s=reached,
        samples_per_s=speed,
        compression=_compression(cell.compression, factor),
    )


def _compression(found: CompressionResult | None, factor: float) -> CompressionResult | None:
    if found is None:
        return None
    return msgspec.structs.replace(
        found,
        encode_s=found.encode_s / factor,
        communication_s=found.communication_s / factor,
        decode_s=found.decode_s / factor,
    )


def sharing_of(cluster: Mapping[str, Any] | None) -> str:
    """How an emulated cluster's nodes share this machine's cores; empty without one.

    Example:
        >>> sharing_of({"cpu_policy": "batch", "cores": "pinned", "cores_awake": "yes"})
        'CPU policy: batch, cores: pinned, kept awake'
        >>> sharing_of({}), sharing_of(None)
        ('CPU policy: other, cores: shared', '')
    """
    if cluster is None:
        return ""
    # Older records tell nothing of what could not be chosen then.
    policy, cores = cluster.get("cpu_policy", "other"), cluster.get("cores", "shared")
    told = cluster.get("cores_awake")
    awake = "" if told is None else ", kept awake" if told == "yes" else ", not kept awake"
    return f"CPU policy: {policy}, cores: {cores}{awake}"


def cluster_words(cell: Cell) -> str:
    """The emulated cluster in words; empty without one."""
    if cell.cluster is None:
        return ""
    spec, latency = cell.cluster.get("spec", ""), cell.cluster.get("latency", "none")
    words = f"emulated cluster {spec} (latency: {latency}, {sharing_of(cell.cluster)})"
    if cell.dilation == 1:
        return words
    return f"{words}: times are the cluster's, real ones {cell.dilation:g} times as long"
