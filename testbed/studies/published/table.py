"""All published lines, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.studies.published.asc_wfbp import asc_wfbp_lines, contention_lines
from testbed.studies.published.ddl_benchmarks import ddl_benchmarks_lines
from testbed.studies.published.gains import dear_lines, osf_lines, pace_lines
from testbed.studies.published.lines import Comparison, Line, count
from testbed.studies.published.mg_wfbp import mg_wfbp_k80_lines, mg_wfbp_lines

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
