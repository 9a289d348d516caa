"""The rows of the study `laysa`, and its table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from testbed.base.units import format_bytes
from testbed.records.cell import Cell

SPARSE: Final = "ef:units=update+topk:ratio=0.01"
SENT: Final = 0.02  # of dense bytes: one element in a hundred, and its index
BACKWARD: Final = 2 / 3  # of a step
START: Final = (
    0.005  # of a backward pass: what a message takes before its first byte, planning jointly
)
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
LEAST_STEPS: Final = 3  # counted ones; a run of fewer is of the peak alone
DENSE: Final = "dense"
SPARSE_ONLY: Final = "sparse-only"
LEAST: Final = "laysa, least peak"
LEAST_HOST: Final = "laysa, least peak, mirror on the host"
NAIVE: Final = "naive: checkpoint and sparse"
RECOMPUTED: Final = "recompute everywhere, dense"
OFFLOADED: Final = "offload everywhere, dense"
HALF: Final = "laysa, half of sparse-only's peak"
# What a row is called, its memory strategy (empty: from a budget) and its compressor.
ROWS: Final = (
    (DENSE, "none", "none"),
    (SPARSE_ONLY, "none", SPARSE),
    (NAIVE, "checkpoint", SPARSE),
    (RECOMPUTED, "checkpoint", "none"),
    (OFFLOADED, "offload", "none"),
    (LEAST, "laysa:workspace=0", SPARSE),
    (LEAST_HOST, "laysa:mirror=host,workspace=0", SPARSE),
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
        host_bytes: that stay on the host between steps: a mirror, the optimizer's state.
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
    host_bytes: int = 0
    why: str = ""
    largest_batch: int | None = None
    largest_step_s: float = 0.0


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Memory plan and schedule of dense gradients, planned alone and for each other.

    Attributes:
        batch_size: samples.
        network: backward passes that all messages take.
        budget_bytes: of the step.
        alone_s: iteration with both planned alone.
        after_s: with the schedule planned again for the memory plan.
        jointly_s: with both planned in turn, each for the other.
        why: there is no plan.
    """

    batch_size: int
    network: float
    budget_bytes: int
    alone_s: float = 0.0
    after_s: float = 0.0
    jointly_s: float = 0.0
    why: str = ""


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.laysa/2`: all forecasts of a model.

    Attributes:
        workload: the model.
        rows: of the table.
        fixed_share: of a dense step at the smaller batch that does not grow with it, estimated.
        together: see there.
    """

    workload: str
    rows: tuple[Row, ...]
    fixed_share: float = 0.0
    together: tuple[Together, ...] = ()
    schema: Literal["testbed.laysa/2"] = "testbed.laysa/2"


Key = tuple[str, int, float, str, str]  # workload, batch size, momentum, memory, compressor


class Line:
    """A row with the cells that were measured of it.

    Attributes:
        row: the forecast.
        cells: its repeats.
    """

    def __init__(self, row: Row, cells: Sequence[Cell]) -> None:
        self.row, self.cells = row, cells

    @property
    def step_s(self) -> float | None:
        """The median of the repeats; None: it was not run, or for its peak alone."""
        return statistics.median(self.times_s) if self.times_s else None

    @property
    def times_s(self) -> list[float]:
        """Steps of the repeats that have enough counted ones."""
        return [
            cell.step_time_s
            for cell in self.cells
            if cell.step_time_s is not None
            and (cell.config.steps or 0) - (cell.config.warmup or 0) >= LEAST_STEPS
        ]

    @property
    def measured_bytes(self) -> int | None:
        """The largest measured peak of the repeats."""
        peaks = [c.memory.measured_bytes for c in self.cells if c.memory is not None]
        return max((peak for peak in peaks if peak), default=None)

    @property
    def peak_bytes(self) -> int:
        """Measured if it was, else predicted; 0: no plan fits."""
        return self.measured_bytes or (self.row.peak_bytes if self.row.memory else 0)

    def below(self, other: Line) -> float:
        """By which share the peak is lower than another one; measured ones if both are there."""
        if self.is_measured_beside(other):
            return 1 - (self.measured_bytes or 0) / (other.measured_bytes or 1)
        return 1 - self.row.peak_bytes / other.row.peak_bytes

    def is_measured_beside(self, other: Line) -> bool:
        """Whether `below` compares measured peaks."""
        return bool(self.measured_bytes and other.measured_bytes)

    @property
    def host_bytes(self) -> int:
        """On the host at once: what the step moves there, and what is kept there between steps."""
        return self.moved_bytes + self.row.host_bytes

    @property
    def moved_bytes(self) -> int:
        """Written to the host in a step; of the run, if it was run: it plans anew."""
        memory = self.cells[0].memory if self.cells else None
        return self.row.moved_bytes if memory is None else memory.moved_bytes

    @property
    def why(self) -> str:
        """The plan in words; of the run, if it was run."""
        memory = self.cells[0].memory if self.cells else None
        return self.row.why if memory is None else memory.why


class Group:
    """The lines of a model with one momentum and batch size.

    Args:
        model: all forecasts of the model.
        momentum: that is wanted.
        batch_size: that is wanted.
        cells: of all models.
    """

    def __init__(
        self, model: Foreseen, momentum: float, batch_size: int, cells: Mapping[Key, list[Cell]]
    ) -> None:
        self.momentum, self.batch_size = momentum, batch_size
        self.lines = {
            row.label: Line(row, cells.get(_key(model.workload, row), ()))
            for row in model.rows
            if (row.momentum, row.batch_size) == (momentum, batch_size)
        }

    def __getitem__(self, label: str) -> Line:
        return self.lines[label]


def _key(workload: str, row: Row) -> Key:
    return workload, row.batch_size, row.momentum, row.memory, row.compressor


def groups_of(model: Foreseen, cells: Sequence[Cell]) -> list[Group]:
    """The lines of a model, by momentum and batch size.

    Args:
        model: its forecasts.
        cells: measured, of any model.
    """
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        c = cell.config
        key = (c.workload, c.batch_size or 0, c.momentum or 0.0, c.memory, c.compressor)
        found.setdefault(key, []).append(cell)
    kinds = dict.fromkeys((row.momentum, row.batch_size) for row in model.rows)
    return [Group(model, momentum, size, found) for momentum, size in kinds]


HEAD: Final = (
    "| row | memory | peak predicted | measured | error | below sparse-only | moved | peak + host "
    "| resident / predicted | step, s | to sparse-only | largest batch | samples/s there |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def to_markdown(models: Sequence[Foreseen], cells: Sequence[Cell], claims: str = "") -> str:
    """One section for each model; a table for each momentum and batch size.

    Args:
        models: forecasts.
        cells: measured.
        claims: what of the published claims is reached, in words.
    """
    parts = [
        "# Memory and sparse messages: the claims of LaySA",
        "One worker (no exchange), SGD. Peaks are of live storages in one step; *below "
        "sparse-only* compares measured peaks where both are there, else predicted ones. *moved* "
        "goes to the host and back in a step, and lies there in between; *peak + host* adds a "
        "mirror on the host and the optimizer's state beside it. *Recompute everywhere* is "
        "`checkpoint`, which keeps what passes between its segments. Steps are "
        "measured (median of the repeats, and their range), in brackets "
        "estimated from operators' sizes; runs of fewer than three counted steps are of the peak "
        "alone. *largest batch* is predicted, under the peak of "
        "sparse-only at the smaller batch; *samples/s there* for two workers on a network on which "
        f"dense messages take {SLOW:g} times the backward pass of dense at the smaller batch: "
        "estimated step, scaled by measured over estimated time of dense, and what messages take "
        f"beyond the backward pass (two thirds of the step; sparse ones are {SENT:.0%} of the "
        "bytes; encoding takes no time). Plans are made for storages alone (`workspace=0`), as the "
        "peaks are compared; what operators hold beside them is in the resident set. Where a row "
        "was run, its predicted peak, moved bytes and resident set are those that the run foresaw. "
        "Made by `testbed sweep laysa`.",
        *([claims] if claims else []),
    ]
    for model in models:
        parts.append(f"## {model.workload}")
        groups = groups_of(model, cells)
        for group in groups:
            speed = speeds_of(model, cells, group.momentum)
            size = group.batch_size
            parts.append(f"Momentum {group.momentum:g}, {size} samples:")
            sparse, is_large = group[SPARSE_ONLY], size == groups[-1].batch_size
            lines = [
                _line(line, sparse, speed.get(label) if is_large else None)
                for label, line in group.lines.items()
            ]
            parts.append("\n".join([HEAD, *lines]))
            parts += [
                f"- {label}: {line.why}"
                for label, line in group.lines.items()
                if label.startswith("laysa")
            ]
        if model.together:
            parts += [TOGETHER, *(_together(each) for each in model.together)]
    return "\n\n".join(parts) + "\n"


def speeds_of(model: Foreseen, cells: Sequence[Cell], momentum: float) -> dict[str, float]:
    """Samples a second of each row at its largest batch on the slow network.

    Args:
        model: its forecasts.
        cells: measured.
        momentum: of the rows.
    """
    groups = [group for group in groups_of(model, cells) if group.momentum == momentum]
    dense = groups[0][DENSE]
    scale = (dense.step_s or dense.row.step_s) / dense.row.step_s
    backward_s = dense.row.step_s * scale * BACKWARD
    found: dict[str, float] = {}
    for label, line in groups[-1].lines.items():
        row = line.row
        if row.largest_batch:
            step_s = row.largest_step_s * scale
            share = SENT if row.compressor != "none" else 1.0
            exposed_s = max(0.0, SLOW * share * backward_s - step_s * BACKWARD)
            found[label] = row.largest_batch / (step_s + exposed_s)
    return found


TOGETHER: Final = (
    "Memory plan (`laysa`, dense gradients, half of sparse-only's peak) and schedule (`mg-wfbp`) "
    "planned alone, the schedule again for the memory plan, and both for each other; predicted "
    "iterations of two workers. The network takes as many backward passes for all messages as is "
    f"said, and {START:.1%} of one to begin each."
)


def _together(each: Together) -> str:
    head = f"- {each.batch_size} samples, network {each.network:g}: "
    if each.why:
        return head + each.why
    return head + (
        f"alone {each.alone_s:.3f} s, schedule again {each.after_s:.3f} s "
        f"({each.after_s / each.alone_s - 1:+.2%}), jointly {each.jointly_s:.3f} s "
        f"({each.jointly_s / each.alone_s - 1:+.2%})"
    )


def _line(line: Line, sparse: Line, speed: float | None) -> str:
    row, peak = line.row, line.measured_bytes
    step_s, ratio = f"({row.step_s + row.extra_s:.2f})", ""
    if line.step_s is not None:
        times = line.times_s
        step_s = f"{line.step_s:.2f}"
        if len(times) > 1:
            step_s += f" [{min(times):.2f} .. {max(times):.2f}]"
        if sparse.step_s:
            ratio = f"{line.step_s / sparse.step_s:.2f}"
    predicted, resident = row.peak_bytes, ""
    memory = line.cells[0].memory if line.cells else None
    if memory is not None:  # a run plans anew, on operators that it has measured
        predicted = memory.predicted_bytes
        sizes = (memory.resident_bytes, memory.predicted_resident_bytes)
        resident = " / ".join("?" if size is None else format_bytes(size) for size in sizes)
    texts = [
        *(row.label, f"`{row.memory}`" if row.memory else "no plan fits"),
        format_bytes(predicted) if row.memory else "",
        format_bytes(peak) if peak else "",
        f"{predicted / peak - 1:+.2%}" if peak else "",
        f"{line.below(sparse):.1%}" if row.memory else "",
        format_bytes(line.moved_bytes),
        format_bytes((peak or predicted) + line.host_bytes),
        resident,
        *(step_s if row.memory else "", ratio),
        "" if row.largest_batch is None else str(row.largest_batch),
        "" if speed is None else f"{speed:.3g}",
    ]
    return f"| {' | '.join(texts)} |"
