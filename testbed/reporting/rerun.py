"""A stored run beside the same run made again: what agrees, and what may be why if it does not."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.types import IN_STEP
from testbed.base.units import format_seconds
from testbed.records.archive import MASK
from testbed.records.cell import Cell
from testbed.records.text import aligned
from testbed.reporting.diff import value_of
from testbed.reporting.sides import environment_differences
from testbed.statistics.runs import estimate
from testbed.sweeping.progress import label, last_line

_COLUMNS: Final = 100
_NEEDED: Final = ("samples", "final parameters")
_ROWS: Final = {
    "samples": "sample_digest",
    "sample contents": "content_digest",
    "initial parameters": "initial_digest",
    "final parameters": "final_digest",
    "final buffers": "buffer_digest",
    "bytes sent a step": "wire_bytes_per_step",
    "bytes received a step": "received_bytes_per_step",
}
_OF_ORDER: Final = (  # what depends on the order of updates and messages, which ranks in step fix
    "final_digest",
    "buffer_digest",
    "wire_bytes_per_step",
    "received_bytes_per_step",
)


@dataclass(frozen=True)
class Row:
    """A digest or a count of both runs.

    Attributes:
        what: in words.
        stored: of the stored run; empty: not recorded.
        now: of the new one.
        counts: whether it is expected to agree.
    """

    what: str
    stored: str
    now: str
    counts: bool

    @property
    def verdict(self) -> str:
        """`agree`, `DIFFER`, `not recorded`, or that it need not agree."""
        if not (self.stored and self.now):
            return "not recorded"
        if self.stored == self.now:
            return "agree"
        return "DIFFER" if self.counts else "differ, as they may"


def to_run(stored: Cell) -> tuple[RunConfig, list[str]]:
    """The settings that run a stored cell again, and what was changed in them.

    Threads are those that the run had, on however many cores; the backend is opened with what it
    measured then; no checkpoints are written.

    Raises:
        UsageError: the stored run failed, so that there is nothing to agree with; or a path in its
            settings was cut when it was packed.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> made = Cell(backend="gloo", workload="w", num_workers=2, steps=10,
        ...             config=RunConfig(checkpoint="c"), environment={"torch_threads": 2})
        >>> config, changes = to_run(made)
        >>> config.threads, config.checkpoint, changes
        (2, None, ['no checkpoints are written'])
    """
    if stored.status != "ok":
        raise UsageError(
            f"the stored run failed ({last_line(stored.error) or 'no reason recorded'}): there is "
            f"nothing to compare with; to run it anew: {stored.command}"
        )
    for name, value in msgspec.to_builtins(stored.config).items():
        if isinstance(value, str) and MASK in value:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} of the stored run is {value!r}: the path was cut when it was packed; "
                f"rerun the record that was packed, or `testbed run` with --{option} of your own"
            )
    config, changes = stored.config, []
    if config.checkpoint is not None:
        config = msgspec.structs.replace(config, checkpoint=None, every=None)
        changes.append("no checkpoints are written")
    if stored.opened_as:
        config = msgspec.structs.replace(config, backend=stored.opened_as)
        changes.append(f"the backend is opened as it was then: {stored.opened_as}")
    threads = stored.environment.get("torch_threads")
    if config.threads is None and threads:
        config = msgspec.structs.replace(config, threads=threads)
    return config, changes


def rows_of(stored: Cell, now: Cell) -> list[Row]:
    """What is expected to agree between two runs of the same settings."""
    ordered = stored.consistency in IN_STEP
    return [
        Row(
            what,
            _text(getattr(stored, name)),
            _text(getattr(now, name)),
            counts=ordered or name not in _OF_ORDER,
        )
        for what, name in _ROWS.items()
    ]


def _text(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.12g}"


def agrees(rows: Sequence[Row]) -> bool:
    """Whether nothing differs that is expected to agree."""
    return not any(row.verdict == "DIFFER" for row in rows)


def status_of(rows: Sequence[Row]) -> int:
    """0: what is expected to agree does; 1: something differs; 3: too little is recorded."""
    if not agrees(rows):
        return 1
    needed = [row for row in rows if row.what in _NEEDED and row.counts]
    return 3 if any(row.verdict == "not recorded" for row in needed) else 0


def describe(stored: Cell, now: Cell, repeats: Sequence[Cell], changes: Sequence[str]) -> str:
    """The comparison for reading.

    Args:
        stored: the run that was made again.
        now: the new run.
        repeats: all finished runs of the stored cell, this one included.
        changes: in the settings.
    """
    rows = rows_of(stored, now)
    table = [["", "stored", "now", ""]]
    for row in rows:
        short = [value[:12] for value in (row.stored or "-", row.now or "-")]
        table.append([row.what, *short, row.verdict])
    table.append(["step time", *(_time(cell) for cell in (stored, now)), ""])
    parts = [label(stored.config).rpartition(", ")[0], aligned(table)]
    lines = [*_beside(now, repeats), *changes, _verdict(stored, rows)]
    if not agrees(rows):
        lines += _reasons(stored, now)
    differ = environment_differences([stored], [now])
    if differ:
        words = ", ".join(f"{name} {a} then, {b} now" for name, (a, b) in differ.items())
        lines.append(f"the environments differ: {words}")
    parts.append("\n".join(map(_wrapped, lines)))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False)


def _time(cell: Cell) -> str:
    median = value_of(cell, "step_time_s")
    return "-" if median is None else format_seconds(median)


def _beside(now: Cell, repeats: Sequence[Cell]) -> list[str]:
    """Where the new time lies beside those of the stored repeats."""
    known = [v for cell in repeats if (v := value_of(cell, "step_time_s"))]
    new, found = value_of(now, "step_time_s"), estimate(known)
    if found is None or new is None:
        return []
    if found.low is None or found.high is None:
        return [f"step time now / stored: {new / found.time:.3f}; one stored run has no interval"]
    place = "within" if found.smallest <= new <= found.largest else "outside"
    ends = f"{format_seconds(found.smallest)} .. {format_seconds(found.largest)}"
    interval = (
        f"{format_seconds(found.time)} [{format_seconds(found.low)}, {format_seconds(found.high)}]"
    )
    return [
        f"step time now / mean of {found.num_runs} stored runs: {new / found.time:.3f}; it lies "
        f"{place} their range {ends}; 95 % interval of their mean {interval}"
    ]


def _verdict(stored: Cell, rows: Sequence[Row]) -> str:
    wrong = [row.what for row in rows if row.verdict == "DIFFER"]
    told = "digests and bytes agree" if not wrong else f"{', '.join(wrong)} DIFFER"
    if all(row.verdict == "not recorded" for row in rows):
        return "nothing to compare is recorded"
    if not wrong and status_of(rows):
        told = "too little is recorded to tell whether both did the same"
    missing = [row.what for row in rows if row.verdict == "not recorded"]
    if missing:
        told += f"; not recorded: {', '.join(missing)}"
    if stored.consistency not in IN_STEP:
        told += f"; under {stored.consistency} no two runs need to end with the same parameters"
    return told


def _reasons(stored: Cell, now: Cell) -> list[str]:
    """What is known to change digests or bytes."""
    reasons = []
    if stored.plan_digest and stored.plan_digest != now.plan_digest:
        measured = (
            "" if stored.link is None else ", which was made from what the run measured first"
        )
        reasons.append(f"may be why: the plan is another one{measured}")
    if now.opened_as and not stored.opened_as:
        reasons.append(
            f"may be why: the backend measures options when opened ({now.opened_as} now), and "
            "the record does not tell what it measured then"
        )
    differ = environment_differences([stored], [now])
    rounding = ("torch", "numpy", "cpu", "torch_threads", "openmpi", "device", "commit")
    if found := [name for name in rounding if name in differ]:
        reasons.append(f"may be why: another {', '.join(found)} can round or sum differently")
    return reasons or ["nothing that is recorded of the environments explains it"]
