"""Runs the cells of emulated shapes, in a folder from which it goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final, Literal, TextIO

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.cluster.system import lacking
from testbed.records.cell import Cell
from testbed.records.store import cell_key
from testbed.studies.published.lines import Line, Verdict, gain
from testbed.studies.published.shapes import Setting, Shape, sweep_of
from testbed.sweeping.executor import Runner
from testbed.sweeping.run import INTERRUPTED, carry_out, process_runner
from testbed.sweeping.study import Measured, read_cells, study_store

# Published inequalities beside cells that were measured on an emulated cluster; pure.

EMULATED_SCHEMA: Final = "testbed.published-emulated/1"
WITHIN_NOISE: Final = (
    "the 95 % intervals of both step times overlap: this run does not tell which is faster"
)
NO_INTERVAL: Final = "too few steps were measured for an interval"
NOT_RUN: Final = "its cell was not run"


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of one scheduler in seconds of the emulated cluster: real ones / dilation.

    Attributes:
        scheduler: as given.
        predicted_s: what trace and link, both measured in that run, say for these workers.
        emulated_s: measured; median over its steps.
        low_s: 5th percentile of the run's steps (older records: of an interval over them).
        high_s: 95th percentile, likewise.
    """

    scheduler: str
    predicted_s: float
    emulated_s: float
    low_s: float | None = None
    high_s: float | None = None


class EmulatedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A published inequality, simulated for the paper's workers and for ours, and measured.

    Attributes:
        paper: that it comes from.
        setting: model and network.
        quantity: in words; a gain is a ratio of times.
        published: the number.
        published_workers: that it was measured with.
        simulated: for those, with the constants that the authors fitted.
        simulated_verdict: of the simulated number.
        workers: of the emulated cluster.
        cluster: that stands for the setting, as `--cluster` takes it.
        slow: times of the method that should lose; None: not measured.
        fast: times of the method that should win; None: not measured.
        predicted: ratio of their predicted times.
        predicted_verdict: of it; empty: not measured.
        emulated: ratio of their measured times.
        verdict: of it; empty: not measured.
        reason: why it was not measured, or what to know of the verdict.
    """

    paper: str
    setting: str
    quantity: str
    published: float
    published_workers: int
    simulated: float
    simulated_verdict: Verdict
    workers: int
    cluster: str
    slow: Timed | None = None
    fast: Timed | None = None
    predicted: float | None = None
    predicted_verdict: Verdict = ""
    emulated: float | None = None
    verdict: Verdict = ""
    reason: str = ""


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """All emulated lines, in the order of the shapes."""

    schema: Literal["testbed.published-emulated/1"] = EMULATED_SCHEMA
    lines: tuple[EmulatedLine, ...]


def judge(
    shapes: Iterable[Shape],
    simulated: Iterable[Line],
    cells: Mapping[str, Cell],
    lacking: str | None = None,
) -> Emulation:
    """What the cells say of each inequality.

    Args:
        shapes: to be judged.
        simulated: lines of the simulation, among which is each shape's own.
        cells: key -> cell, finished or failed.
        lacking: why cells could not be run here.

    Raises:
        UsageError: a shape repeats a line that is not there.
    """
    known = tuple(simulated)
    return Emulation(lines=tuple(_judge(shape, known, cells, lacking) for shape in shapes))


def count_emulated(lines: Iterable[EmulatedLine]) -> tuple[int, int, int]:
    """How many inequalities hold in emulation, how many are undecided, and how many were emulated.

    Undecided are those whose two times are no further apart than the steps of one run vary.
    """
    emulated = [line for line in lines if line.verdict]
    undecided = sum(line.reason in (WITHIN_NOISE, NO_INTERVAL) for line in emulated)
    holding = sum(line.verdict == "holds" and not line.reason for line in emulated)
    return holding, undecided, len(emulated)


def _judge(
    shape: Shape, simulated: tuple[Line, ...], cells: Mapping[str, Cell], lacking: str | None
) -> EmulatedLine:
    line = _line_of(shape, simulated)
    plain = EmulatedLine(
        paper=line.paper,
        setting=line.setting,
        quantity=line.quantity,
        published=line.published,
        published_workers=shape.here.published_workers,
        simulated=line.simulated,
        simulated_verdict=line.verdict,
        workers=shape.here.workers,
        cluster=shape.here.cluster,
    )
    slow, fast = (_timed(shape.here, s, cells, lacking) for s in (shape.slow, shape.fast))
    if isinstance(slow, str) or isinstance(fast, str):
        missing = dict.fromkeys(found for found in (slow, fast) if isinstance(found, str))
        return msgspec.structs.replace(plain, reason="; ".join(missing))
    predicted = slow.predicted_s / fast.predicted_s
    emulated = slow.emulated_s / fast.emulated_s
    return msgspec.structs.replace(
        plain,
        slow=slow,
        fast=fast,
        predicted=predicted,
        predicted_verdict=_verdict(line, predicted, shape.at_least),
        emulated=emulated,
        verdict=_verdict(line, emulated, shape.at_least),
        reason=_doubt(slow, fast),
    )


def _doubt(slow: Timed, fast: Timed) -> str:
    """Why the verdict may be another the next time; empty if not."""
    if slow.low_s is None or slow.high_s is None or fast.low_s is None or fast.high_s is None:
        return NO_INTERVAL
    return "" if slow.low_s > fast.high_s or fast.low_s > slow.high_s else WITHIN_NOISE


def _line_of(shape: Shape, simulated: tuple[Line, ...]) -> Line:
    wanted = (shape.paper, shape.setting, shape.quantity)
    for line in simulated:
        if (line.paper, line.setting, line.quantity) == wanted and (
            shape.at_least == 1 or line.published == shape.at_least
        ):
            return line
    raise UsageError(
        f"no simulated line {' / '.join(wanted)}; expected every emulated shape to repeat one: "
        "change the shape as its line was changed"
    )


def _verdict(line: Line, ratio: float, at_least: float) -> Verdict:
    return gain("", "", "", line.published, ratio, "", at_least).verdict


def _timed(
    here: Setting, scheduler: str, cells: Mapping[str, Cell], lacking: str | None
) -> Timed | str:
    """The times of a cell, or why there are none."""
    cell = cells.get(cell_key(here.cell(scheduler)))
    if cell is None:
        return f"not emulated: {lacking or NOT_RUN}"
    if cell.status == "failed" or cell.step_time_s is None or cell.predicted_step_time_s is None:
        said = cell.error.strip().splitlines()
        return f"{scheduler} failed: {said[-1].strip() if said else 'it left no times'}"
    # Each method runs once: no interval, but what its steps vary (older records hold their own).
    low_s = cell.step_time_p5_s if cell.step_time_low_s is None else cell.step_time_low_s
    high_s = cell.step_time_p95_s if cell.step_time_high_s is None else cell.step_time_high_s
    return Timed(
        scheduler=scheduler,
        predicted_s=cell.predicted_step_time_s / cell.dilation,
        emulated_s=cell.step_time_s / cell.dilation,
        low_s=None if low_s is None else low_s / cell.dilation,
        high_s=None if high_s is None else high_s / cell.dilation,
    )


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
        store = study_store(path, sweep_of(shapes))
        given = process_runner(store, CELL_TIMEOUT_S) if runner is None else nullcontext(runner)
        with given as chosen:
            status = carry_out(store, chosen, out)
        if status == INTERRUPTED:
            return Measured({}, status)
    return Measured(files_of(judge(shapes, simulated, read_cells(path), reason)), status)


def files_of(emulation: Emulation) -> dict[str, str]:
    """The files for reading and for programs."""
    return {
        f"{FILE}.md": emulation_to_markdown(emulation),
        f"{FILE}.json": to_json(emulation).decode(),
    }
