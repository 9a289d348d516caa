"""Runs the cells of emulated shapes, in a folder from which it goes on where it was stopped."""

from __future__ import annotations

import datetime
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.cluster.access import lacking
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import PLAN, Store, create_store
from testbed.studies.published.emulated import (
    EmulatedLine,
    Emulation,
    Timed,
    count_emulated,
    judge,
)
from testbed.studies.published.lines import Line, Verdict
from testbed.studies.published.shapes import Shape, sweep_of
from testbed.sweeping.executor import Runner
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import INTERRUPTED, carry_out, make_plan, process_runner
from testbed.sweeping.study import Measured

# Emulated lines as Markdown.


def emulation_to_markdown(emulation: Emulation) -> str:
    """One table: each inequality published, simulated for both numbers of workers, and measured."""
    lines = emulation.lines
    holding, undecided, total = count_emulated(lines)
    left_out = f" {len(lines) - total} could not be emulated here." if total < len(lines) else ""
    parts = [
        "# Published shapes in emulation",
        f"{holding} of {total} emulated inequalities hold, {undecided} are undecided (within what "
        f"the steps of one run vary).{left_out} A gain is a ratio of times: above 1 the first "
        "method is faster. Each method ran once. Made by `testbed sweep paper-shapes`.",
        "*paper* is the simulation of the paper's setting with the constants that its authors "
        "fitted; *here* the simulation of the emulated workers, from trace and link measured in "
        "the same run; *emulated* what real processes took. Times are milliseconds of the emulated "
        "cluster (real ones / dilation), slow / fast.",
        "\n".join([*_HEAD, *(_row(line, _numbers(lines)) for line in lines)]),
        *(f"({number}) {reason}" for reason, number in _numbers(lines).items()),
        "What stands for each setting: links with the start-up and time per byte of the authors' "
        "fit, for one ring all-reduce between the emulated workers.",
        "\n".join(dict.fromkeys(_place(line) for line in lines)),
    ]
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "| setting | quantity | published | paper | | here, ms | gain | | emulated, ms | gain | |",
    "|---|---|---:|---:|---|---:|---:|---|---:|---:|---|",
)


def _row(line: EmulatedLine, numbers: dict[str, int]) -> str:
    mark = f" ({numbers[line.reason]})" if line.reason else ""
    cells = (
        line.setting,
        line.quantity,
        f"{line.published:.4g}",
        f"{line.simulated:.4g}",
        line.simulated_verdict,
        _times(line, "predicted_s"),
        _ratio(line.predicted),
        line.predicted_verdict,
        _times(line, "emulated_s"),
        _ratio(line.emulated),
        f"{_word(line.verdict)}{mark}",
    )
    return f"| {' | '.join(cells)} |"


def _times(line: EmulatedLine, name: str) -> str:
    def text(timed: Timed) -> str:
        return f"{1e3 * getattr(timed, name):.1f}"

    return f"{text(line.slow)} / {text(line.fast)}" if line.slow and line.fast else ""


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _word(verdict: Verdict) -> str:
    return verdict or "not emulated"


def _numbers(lines: tuple[EmulatedLine, ...]) -> dict[str, int]:
    reasons = dict.fromkeys(line.reason for line in lines if line.reason)
    return {reason: number for number, reason in enumerate(reasons, start=1)}


def _place(line: EmulatedLine) -> str:
    theirs = f"the paper's {line.published_workers} workers"
    if line.workers == line.published_workers:
        return f"- {line.setting}: {theirs} on `{line.cluster}`"
    return f"- {line.setting}: {line.workers} workers for {theirs} on `{line.cluster}`"


FOLDER = "emulated"
FILE = "paper-shapes-emulated"
CELL_TIMEOUT_S = 600.0


def emulate(
    folder: Path,
    shapes: tuple[Shape, ...],
    simulated: tuple[Line, ...],
    *,
    runner: Runner | None = None,
    out: TextIO | None = None,
) -> Measured:
    """Run what is missing of the shapes' cells, and judge what is there.

    Args:
        folder: keeps the cells, in a folder of their own.
        shapes: to be judged.
        simulated: lines of the simulation.
        runner: runs one cell; None: in processes of its own.
        out: where progress is told; None: standard error.

    Raises:
        UsageError: the folder holds cells of other settings.
    """
    reason = lacking() if runner is None else None
    path, status = folder / FOLDER, 0
    if reason is None:
        store = _store(path, sweep_of(shapes))
        given = process_runner(store, CELL_TIMEOUT_S) if runner is None else nullcontext(runner)
        with given as chosen:
            status = carry_out(store, chosen, out)
        if status == INTERRUPTED:
            return Measured({}, status)
    return Measured(files_of(judge(shapes, simulated, read_cells(path), reason)), status)


def read_cells(path: Path) -> dict[str, Cell]:
    """Key -> cell of a sweep's folder, which need not be there."""
    files = sorted((path / "cells").glob("*.json"))
    return {file.stem: decode_cell(file.read_bytes()) for file in files}


def files_of(emulation: Emulation) -> dict[str, str]:
    """The files for reading and for programs."""
    return {
        f"{FILE}.md": emulation_to_markdown(emulation),
        f"{FILE}.json": to_json(emulation).decode(),
    }


def _store(path: Path, sweep: Sweep) -> Store:
    plan = make_plan(sweep)
    if not (path / PLAN).is_file():
        store = create_store(plan.name, datetime.datetime.now(), path)
        store.write_plan(plan)
        return store
    store = Store(path)
    if store.read_plan().order != plan.order:
        raise UsageError(
            f"{path} holds cells of other settings than those that are to be run now; remove it, "
            "or give another folder with --output"
        )
    return store
