"""What a cell is called in a note."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from testbed.base.axes import AXES, BACKENDS, SCHEDULERS, WORKLOADS
from testbed.base.parts import OURS, RECONSTRUCTION, Axis
from testbed.records.cell import Cell


def short_name(cell: Cell) -> str:
    """Workload, backend, workers, and parts that are not the default; not the scheduler.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> short_name(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig()))
        'w/gloo/2'
    """
    shown = [part_of(cell, axis) for axis in AXES if axis.shown]
    others = [axis for axis in AXES if axis.noted and not axis.shown]
    chosen = [axis.of(cell.config) for axis in others if not axis.is_default(cell.config)]
    return "/".join([*shown, str(cell.num_workers), *chosen])


def part_of(cell: Cell, axis: Axis[Any]) -> str:
    """The part of an axis that a cell had: what it turned out to be, else what was asked for.

    Example:
        >>> from testbed.base.axes import COMPRESSORS, SCHEDULERS
        >>> from testbed.base.config import RunConfig
        >>> cell = Cell(backend="ddp", workload="w", num_workers=2, scheduler="torch's buckets",
        ...             config=RunConfig(backend="ddp", compressor="fp16"))
        >>> part_of(cell, SCHEDULERS), part_of(cell, COMPRESSORS)
        ("torch's buckets", 'fp16')
    """
    asked = axis.of(cell.config)
    found = getattr(cell, axis.what, asked)
    return found if isinstance(found, str) and found else asked


def short_text(specification: str) -> str:
    """A specification without the folders of files that its options name.

    Example:
        >>> short_text("ddp:plan=runs/plans/resnet50.json")
        'ddp:plan=resnet50.json'
    """
    return re.sub(r"(?<==)[^,=]*/", "", specification)


def marks_of(cell: Cell) -> str:
    """Where the methods of a cell come from, and whether their knobs were set.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> config = RunConfig(backend="gloo", scheduler="pace", compressor="ef+topk:ratio=0.1")
        >>> marks_of(Cell(backend="gloo", workload="w", num_workers=2, config=config))
        'pace: reconstruction, untuned; ef+topk:ratio=0.1: published rule, set by hand'
    """
    method = _method_axis(cell)
    told = []
    for axis in AXES:
        part = axis.find(axis.of(cell.config))
        if part is None or axis is WORKLOADS or (axis is BACKENDS) != (method is BACKENDS):
            continue
        tuning = tuning_of(cell).strip("-") if axis is method else part.tuning
        marks = ", ".join(filter(None, (part.origins, tuning)))
        if marks:
            told.append(f"{part.text}: {marks}")
    return "; ".join(told)


def marks_text(cells: Iterable[Cell]) -> str:
    """The methods of a table that are no published rules, were tuned or could have been.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> configs = [RunConfig(scheduler=name) for name in ("wfbp", "pace", "optimal:channels=2")]
        >>> marks_text(Cell(backend="gloo", workload="w", num_workers=2, config=c) for c in configs)
        'reconstruction: pace; ours: optimal; set by hand: optimal:channels=2; untuned: pace'
    """
    named: dict[str, dict[str, None]] = {mark: {} for mark in (RECONSTRUCTION, OURS)}
    tuned: dict[str, dict[str, None]] = {}
    for cell in cells:
        axis = _method_axis(cell)
        part = axis.find(axis.of(cell.config))
        if part is None:
            continue
        for link in part.links:
            named.get(link.part.origin, {})[link.name] = None
        if (tuning := tuning_of(cell)) != "-":
            tuned.setdefault(tuning, {})[short_text(part.text)] = None
    each = {**named, **dict(sorted(tuned.items()))}
    return "; ".join(f"{mark}: {', '.join(names)}" for mark, names in each.items() if names)


def tuning_of(cell: Cell) -> str:
    """`tuned (N trials)`, `set by hand`, `untuned`, or `-` for a method without knobs.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> found = RunConfig(scheduler="dear:mib=9", tuned="trials=30,confirm=3,steps=15,seed=1")
        >>> tuning_of(Cell(backend="gloo", workload="w", num_workers=2, config=found))
        'tuned (30 trials)'
    """
    if cell.config.tuned:
        trials = cell.config.tuned.partition(",")[0].removeprefix("trials=")
        return f"tuned ({trials} trials)"
    axis = _method_axis(cell)
    part = axis.find(axis.of(cell.config))
    return (part.tuning if part is not None else "") or "-"


def _method_axis(cell: Cell) -> Axis[Any]:
    """That whose part decides when gradients leave: a framework's, else the scheduler's."""
    backend = BACKENDS.find(cell.config.backend)
    framework = backend is not None and backend.facts.schedule is not None
    return BACKENDS if framework else SCHEDULERS
