"""The study `paper-shapes`: published inequalities, each with both numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from testbed.base.files import to_json
from testbed.base.spec import parse_options
from testbed.studies.published.asc_wfbp import asc_wfbp_lines, contention_lines
from testbed.studies.published.emulate import emulate
from testbed.studies.published.gains import ddl_benchmarks_lines, dear_lines, osf_lines, pace_lines
from testbed.studies.published.lines import SIZES_MIB, Comparison, Line, beside_o, count, score
from testbed.studies.published.links import OVERHEAD_S, beating
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
    """Simulate every published setting, with and without o; takes minutes of one core."""
    return Comparison(
        lines=tuple(
            line for section in SECTIONS for line in beside_o(section(), section(OVERHEAD_S))
        )
    )


def groups(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """The lines by what their errors say; those that o was chosen from stand alone."""
    every = list(lines)
    told = [line for line in every if line.left_out != "constant" and not line.knew_o]
    gains = [line for line in told if line.verdict]
    counted = [line for line in gains if not line.left_out]
    times = [line for line in told if not line.verdict and not line.left_out]
    return {
        "gains of either direction": [line for line in counted if line.is_exact],
        "one-sided gains: their size": [x for x in gains if x.left_out == "one-sided"],
        "bounds and ranges: what lies outside": [line for line in counted if not line.is_exact],
        "times and throughputs": times,
        "of all these: on constants that beat the wire": [
            line for line in told if line.beats_wire and line.left_out != "variant"
        ],
        "from which o was chosen": [x for x in every if x.knew_o and x.left_out != "variant"],
    }


def to_markdown(comparison: Comparison) -> str:
    """The score, then one section per paper: a table, and below it why inequalities do not hold."""
    lines = comparison.lines
    found = groups(lines)
    failing = score(found["gains of either direction"])
    one_sided = _one_sided(line for line in lines if line.left_out == "one-sided")
    left_out = Counter(line.left_out for line in lines if line.verdict)
    parts = [
        "# Published shapes in simulation",
        f"Of {failing.num_lines} published gains that could come out in either direction "
        f"{failing.holding} are on the published side. {one_sided} A further "
        f"{left_out['constant']} print a published constant and {left_out['variant']} vary an "
        "assumption about a gain that is listed already: they are listed and in no count. A gain "
        "is a ratio of times: above 1 the first method is faster. Made by `testbed sweep "
        "paper-shapes`; nothing here was measured on this project's machines.",
        f'*error* is |ln(simulated / published)|, of "up to x" and of a range only what lies '
        f"outside; *within 20 %* is off by a factor of at most 1.2. *a + b M* has the links as "
        f"their authors fitted them; *a, b, o* also charges each message {1e6 * OVERHEAD_S:.0f} us "
        "of the computing thread. That o is an assumption: it was chosen in sight of WFBP on "
        "InfiniBand in MG-WFBP's table, and those lines are in no other row; it is fitted to no "
        "line. Bucket, cycle, dear and bytescheduler each take the best of the same "
        f"{len(SIZES_MIB)} sizes ({', '.join(map(str, SIZES_MIB))} MiB).",
        _scores(found),
        "Median of simulated over published times, and of throughputs:",
        _times(lines),
        "Time per byte below what the line rate allows (`beats_wire`; marked b): "
        f"{', '.join(sorted(beating()))}. They are the authors' own; a node would have to send "
        "fewer bytes than any sum needs.",
    ]
    for paper in dict.fromkeys(line.paper for line in lines):
        of_paper = [line for line in lines if line.paper == paper]
        parts += [f"## {paper}", _table(of_paper)]
        parts += [f"({number}) {reason}" for reason, number in _reasons(of_paper).items()]
    return "\n\n".join(parts) + "\n"


def _one_sided(lines: Iterable[Line]) -> str:
    """What became of the gains that the model cannot make losses."""
    every = list(lines)
    gains = [line for line in every if line.published > 1]
    holding = count(gains)[0]
    return (
        f"{len(every)} are one-sided: under the model the first method takes no longer than the "
        f"second whatever the constants. {len(gains)} of these were published as gains, of which "
        f"{holding} are gains here, too (they could not be losses), and "
        f"{len(gains) - holding} ties; {len(every) - len(gains)} were published as losses, which "
        "the model cannot show."
    )


def _scores(found: Mapping[str, list[Line]]) -> str:
    rows = [
        "| lines | number | on the published side | a + b M: median error | within 20 % "
        "| a, b, o: median error | within 20 % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, lines in found.items():
        one = score(lines)
        holding = "" if one.holding is None else f"{one.holding}"
        rows.append(
            f"| {name} | {one.num_lines} | {holding} | {_number(one.median)} | "
            f"{_share(one.within)} | {_number(one.with_o_median)} | {_share(one.with_o_within)} |"
        )
    return "\n".join(rows)


def _times(lines: Iterable[Line]) -> str:
    """Of each method, apart from those that o was chosen from."""
    rows = ["| | lines | a + b M | a, b, o |", "|---|---:|---:|---:|"]
    of_method: dict[str, list[Line]] = {}
    for line in lines:
        if not line.verdict and line.left_out == "":
            mark = ", of which o was chosen" if line.knew_o else ""
            of_method.setdefault(f"{line.quantity}{mark}", []).append(line)
    for name, chosen in of_method.items():
        others = [line.with_o / line.published for line in chosen if line.with_o is not None]
        rows.append(
            f"| {name} | {len(chosen)} | {median(line.ratio for line in chosen):.2f} "
            f"| {_number(median(others)) if others else ''} |"
        )
    return "\n".join(rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _table(lines: list[Line]) -> str:
    numbers = _reasons(lines)
    rows = [
        "| setting | quantity | published | a + b M | error | a, b, o | error | | in no count |",
        "|---|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for line in lines:
        mark = f" ({numbers[line.reason]})" if line.reason else ""
        beats = " b" if line.beats_wire else ""
        with_o = "" if line.with_o is None else f"{line.with_o:.4g}"
        rows.append(
            f"| {line.setting}{beats} | {line.quantity} | {_published(line)} "
            f"| {line.simulated:.4g} | {line.error:.2f} | {with_o} | {_number(line.with_o_error)} "
            f"| {line.verdict}{mark} | {line.left_out or ('o' if line.knew_o else '')} |"
        )
    return "\n".join(rows)


def _published(line: Line) -> str:
    if line.is_exact:
        return f"{line.published:.4g}"
    return f"{line.least:.4g} to {line.most:.4g}" if line.least else f"up to {line.most:.4g}"


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
