"""The study `paper-shapes`: published inequalities, each with both numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from testbed.base.files import to_json
from testbed.base.spec import parse_options
from testbed.studies.published.asc_wfbp import asc_wfbp_lines, contention_lines
from testbed.studies.published.emulate import emulate
from testbed.studies.published.gains import ddl_benchmarks_lines, dear_lines, osf_lines, pace_lines
from testbed.studies.published.lines import (
    Comparison,
    Line,
    count,
)
from testbed.studies.published.mg_wfbp import mg_wfbp_k80_lines, mg_wfbp_lines
from testbed.studies.published.shapes import published_shapes
from testbed.sweeping.study import Measured, Study

SECTIONS = (
    asc_wfbp_lines,
    mg_wfbp_lines,
    mg_wfbp_k80_lines,
    pace_lines,
    osf_lines,
    dear_lines,
    ddl_benchmarks_lines,
    contention_lines,
)


def compare() -> Comparison:
    """Simulate every published setting; takes about a minute of one core."""
    return Comparison(lines=tuple(line for section in SECTIONS for line in section()))


def to_markdown(comparison: Comparison) -> str:
    """One section per paper: a table, and below it why inequalities do not hold."""
    holding, total = count(comparison.lines)
    parts = [
        "# Published shapes in simulation",
        f"{holding} of {total} published inequalities hold. A gain is a ratio of times: above 1 "
        "the first method is faster. Made by `testbed sweep paper-shapes`; nothing here was "
        "measured on this project's machines.",
    ]
    for paper in dict.fromkeys(line.paper for line in comparison.lines):
        lines = [line for line in comparison.lines if line.paper == paper]
        held, of = count(lines)
        parts += [f"## {paper}", f"{held} of {of} inequalities hold.", _table(lines)]
        parts += [f"({number}) {reason}" for reason, number in _reasons(lines).items()]
    return "\n\n".join(parts) + "\n"


def _table(lines: list[Line]) -> str:
    numbers = _reasons(lines)
    rows = [
        "| setting | quantity | published | simulated | ratio | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for line in lines:
        mark = f" ({numbers[line.reason]})" if line.reason else ""
        rows.append(
            f"| {line.setting} | {line.quantity} | {line.published:.4g} | {line.simulated:.4g} "
            f"| {line.ratio:.3f} | {line.verdict}{mark} |"
        )
    return "\n".join(rows)


def _reasons(lines: Iterable[Line]) -> dict[str, int]:
    reasons = dict.fromkeys(line.reason for line in lines if line.reason)
    return {reason: number for number, reason in enumerate(reasons, start=1)}


SIMULATED = "paper-shapes.json"


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        emulate: also run the settings that fit this machine, on an emulated cluster.
    """

    emulate: bool = True


def _files() -> dict[str, str]:
    comparison = compare()
    return {
        "paper-shapes.md": to_markdown(comparison),
        SIMULATED: to_json(comparison).decode(),
    }


def _measure(folder: Path, files: Mapping[str, str]) -> Measured:
    simulated = msgspec.json.decode(files[SIMULATED].encode(), type=Comparison)
    return emulate(folder, published_shapes(), simulated.lines)


def _with_options(given: Mapping[str, str]) -> Study:
    options = parse_options(PAPER_SHAPES.name, given, Options)
    return PAPER_SHAPES if options.emulate else dataclasses.replace(PAPER_SHAPES, measure=None)


PAPER_SHAPES = Study(
    name="paper-shapes",
    summary="published inequalities, simulated and (emulate=0: not) on an emulated cluster",
    compute=_files,
    measure=_measure,
    with_options=_with_options,
)
