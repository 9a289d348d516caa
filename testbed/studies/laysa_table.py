"""The rows of the study `laysa`, and its table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from testbed.base.units import format_bytes
from testbed.records.cell import Cell

SPARSE: Final = "ef:units=update+topk:ratio=0.01"
SENT: Final = 0.02  # of dense bytes: one element in a hundred, and its index
BACKWARD: Final = 2 / 3  # of a step
SLOW: Final = 4.0  # backward passes that dense messages take on the network of the last column
MODELS: Final = {
    "resnet50": (8, 32),
    "densenet201": (8, 32),
    "inception-v4": (8, 32),
    "vgg16": (4, 16),
    "bert-base": (4, 16),
}
MOMENTA: Final = (0.0, 0.9)
MIB: Final = 2**20
HALF: Final = "laysa, half of sparse-only's peak"
# What a row is called, its memory strategy (empty: from a budget) and its compressor.
ROWS: Final = (
    ("dense", "none", "none"),
    ("sparse-only", "none", SPARSE),
    ("naive: checkpoint and sparse", "checkpoint", SPARSE),
    ("recompute everywhere, dense", "checkpoint", "none"),
    ("offload everywhere, dense", "offload", "none"),
    ("laysa, least peak", "laysa", SPARSE),
    ("laysa, least peak, mirror on the host", "laysa:mirror=host", SPARSE),
    (HALF, "", SPARSE),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast.

    Attributes:
        label: what it stands for.
        memory: strategy; empty: none fits.
        compressor: of its gradients.
        momentum: of SGD.
        batch_size: samples.
        peak_bytes: predicted.
        step_s: estimated, of a step that keeps all.
        extra_s: predicted to come on top.
        moved_bytes: to the host in a step.
        why: the plan in words, or why there is none.
        largest_batch: that fits sparse-only's peak at the smaller batch; null: not looked for.
        largest_step_s: estimated time of a step of that batch.
    """

    label: str
    memory: str
    compressor: str
    momentum: float
    batch_size: int
    peak_bytes: int = 0
    step_s: float = 0.0
    extra_s: float = 0.0
    moved_bytes: int = 0
    why: str = ""
    largest_batch: int | None = None
    largest_step_s: float = 0.0


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.laysa/1`: all forecasts of a model."""

    workload: str
    rows: tuple[Row, ...]
    schema: Literal["testbed.laysa/1"] = "testbed.laysa/1"


Key = tuple[str, int, float, str, str]  # workload, batch size, momentum, memory, compressor


def _key(workload: str, row: Row) -> Key:
    return workload, row.batch_size, row.momentum, row.memory, row.compressor


def _measured(cells: Sequence[Cell]) -> dict[Key, Cell]:
    """The quickest of the repeats of each row."""
    found: dict[Key, Cell] = {}
    for cell in cells:
        c = cell.config
        key = (c.workload, c.batch_size or 0, c.momentum or 0.0, c.memory, c.compressor)
        other = found.get(key)
        if cell.step_time_s is not None and (
            other is None or cell.step_time_s < (other.step_time_s or 0.0)
        ):
            found[key] = cell
    return found


HEAD: Final = (
    "| row | memory | peak predicted | measured | error | below sparse-only | moved | peak + moved "
    "| resident / predicted | step, s | to sparse-only | largest batch | samples/s there |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def to_markdown(models: Sequence[Foreseen], cells: Sequence[Cell]) -> str:
    """One section for each model; a table for each momentum and batch size."""
    measured = _measured(cells)
    parts = [
        "# Memory and sparse messages: the claims of LaySA",
        "One worker (no exchange), SGD. Peaks are of live storages in one step; *below "
        "sparse-only* compares measured peaks where both are there, else predicted ones. *moved* "
        "goes to the host and back in a step, and lies there in between; a mirror on the host and "
        "the optimizer's state beside it lie there as well and are not counted in it. Steps are "
        "measured, in brackets "
        "estimated from operators' sizes. *largest batch* is predicted, under the peak of "
        "sparse-only at the smaller batch; *samples/s there* for two workers on a network on which "
        f"dense messages take {SLOW:g} times the backward pass of dense at the smaller batch: "
        "estimated step, scaled by measured over estimated time of dense, and what messages take "
        f"beyond the backward pass (two thirds of the step; sparse ones are {SENT:.0%} of the "
        "bytes; encoding takes no time). Where a row was run, its predicted peak, moved "
        "bytes and predicted resident set are those that the run foresaw. "
        "Made by `testbed sweep laysa`.",
    ]
    for model in models:
        parts.append(f"## {model.workload}")
        for momentum in MOMENTA:
            of_momentum = [row for row in model.rows if row.momentum == momentum]
            for size in dict.fromkeys(row.batch_size for row in of_momentum):
                rows = [row for row in of_momentum if row.batch_size == size]
                scale = _scale(model.workload, of_momentum[0], measured)
                backward_s = of_momentum[0].step_s * scale * BACKWARD
                parts.append(f"Momentum {momentum:g}, {size} samples:")
                lines = [
                    _line(model.workload, r, rows[1], measured, backward_s, scale) for r in rows
                ]
                parts.append("\n".join([HEAD, *lines]))
                parts += [f"- {r.label}: {r.why}" for r in rows if r.label.startswith("laysa")]
    return "\n\n".join(parts) + "\n"


def _scale(workload: str, dense: Row, measured: Mapping[Key, Cell]) -> float:
    cell = measured.get(_key(workload, dense))
    return 1.0 if cell is None else (cell.step_time_s or 0.0) / dense.step_s


def _line(
    workload: str,
    row: Row,
    sparse: Row,
    measured: Mapping[Key, Cell],
    backward_s: float,
    scale: float,
) -> str:
    cell, other = measured.get(_key(workload, row)), measured.get(_key(workload, sparse))
    peak, beside = _peak_bytes(cell), _peak_bytes(other)
    below = 1 - (peak / beside if peak and beside else row.peak_bytes / sparse.peak_bytes)
    step_s, ratio = f"({row.step_s + row.extra_s:.2f})", ""
    if cell is not None and cell.step_time_s is not None:
        step_s = f"{cell.step_time_s:.2f}"
        if other is not None and other.step_time_s:
            ratio = f"{cell.step_time_s / other.step_time_s:.2f}"
    memory = None if cell is None else cell.memory
    predicted, moved = row.peak_bytes, row.moved_bytes
    resident = ""
    if memory is not None:  # a run plans anew, on operators that it has measured
        predicted, moved = memory.predicted_bytes, memory.moved_bytes
        sizes = (memory.resident_bytes, memory.predicted_resident_bytes)
        resident = " / ".join("?" if size is None else format_bytes(size) for size in sizes)
    speed = ""
    if row.largest_batch is not None:
        step = row.largest_step_s * scale
        share = SENT if row.compressor != "none" else 1.0
        exposed = max(0.0, SLOW * share * backward_s - step * BACKWARD)
        speed = f"{row.largest_batch / (step + exposed):.3g}"
    texts = [
        *(row.label, f"`{row.memory}`" if row.memory else "no plan fits"),
        format_bytes(predicted) if row.memory else "",
        format_bytes(peak) if peak else "",
        f"{predicted / peak - 1:+.2%}" if peak else "",
        f"{below:.1%}" if row.memory else "",
        format_bytes(moved),
        format_bytes((peak or predicted) + moved),
        resident,
        *(step_s if row.memory else "", ratio),
        *("" if row.largest_batch is None else str(row.largest_batch), speed),
    ]
    return f"| {' | '.join(texts)} |"


def _peak_bytes(cell: Cell | None) -> int | None:
    return None if cell is None or cell.memory is None else cell.memory.measured_bytes
