"""A comparison for reading, on a terminal or in a document."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from testbed.base.units import format_bytes, format_seconds, rounded
from testbed.records.diff import CellDiff, Diff, MetricDiff
from testbed.records.text import aligned
from testbed.reporting.diff import METRICS
from testbed.statistics.runs import STABLE

COLUMNS = 100
_HEAD = ("cell", "A", "B", "B - A", "interval %", "resolves %", "runs", "B is")
_UNKNOWN = "-"
_SHOWN = 4  # cells without a counterpart that are named


def to_text(diff: Diff) -> str:
    """At most 100 columns."""

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        rest = aligned([head[1:], *(row[1:] for row in rows)]).split("\n")
        wide = max(16, COLUMNS - 2 - max(map(len, rest)))
        cells = [textwrap.wrap(row[0], wide) or [""] for row in (head, *rows)]
        width = max(len(line) for lines in cells for line in lines)
        return "\n".join(
            "\n".join([f"{first[0].ljust(width)}  {line}".rstrip(), *first[1:]])
            for first, line in zip(cells, rest, strict=True)
        )

    def wrapped(text: str) -> str:
        return textwrap.fill(
            text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )

    return _render(diff, table, wrapped)


def to_markdown(diff: Diff) -> str:
    """Tables and lists."""

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        marks = ["---", *["---:"] * (len(head) - 2), "---"]
        escaped = ([text.replace("|", r"\|") for text in row] for row in (head, marks, *rows))
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped)

    return _render(diff, table, lambda text: f"- {text}")


def _render(
    diff: Diff,
    table: Callable[[Sequence[str], Sequence[Sequence[str]]], str],
    line: Callable[[str], str],
) -> str:
    """The parts that there are, an empty line between them."""
    parts = [[*_answer(diff), f"A: {diff.a}", f"B: {diff.b}"]]
    if diff.common:
        parts[0].append(f"all cells: {diff.common}")
    blocks = ["\n".join(map(line, parts[0]))]
    if rows := [_time_row(cell) for cell in diff.cells]:
        blocks.append(table(_HEAD, rows))
    if rows := [_other_row(cell, m) for cell in diff.cells for m in _others(cell)]:
        blocks.append(table(("other metrics that differ", *_HEAD[1:5], "B has"), rows))
    for lines in (_gates(diff), _notes(diff)):
        if lines:
            blocks.append("\n".join(map(line, lines)))
    return "\n\n".join(blocks) + "\n"


def _answer(diff: Diff) -> list[str]:
    """What came out, in at most two sentences."""
    found = [(cell, m) for cell in diff.cells if (m := cell.of("step_time_s"))]
    told = [(cell, m) for cell, m in found if m.is_significant]
    slower = [(cell, m) for cell, m in told if m.verdict == METRICS[m.metric].more]
    counts = {"slower": len(slower), "faster": len(told) - len(slower)}
    for word in ("tied", "one run", "other work"):
        counts[word] = sum(m.verdict == word for _, m in found)
    failed = sum(not cell.runs_a or not cell.runs_b for cell in diff.cells)
    counts["failed"] = failed
    words = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    lines = [f"step time of B beside A, {len(diff.cells)} cell(s): {words or 'nothing to compare'}"]
    if told:
        cell, most = max(told, key=lambda each: abs(each[1].share or 0))
        lines.append(f"largest: {cell.label}: B {_share(most)} {_ends(most)} % ({most.verdict})")
    return lines


def _time_row(cell: CellDiff) -> list[str]:
    one = cell.of("step_time_s")
    runs = f"{cell.runs_a} + {cell.runs_b}"
    if one is None:
        failed = " and ".join(n for n, k in (("A", cell.runs_a), ("B", cell.runs_b)) if not k)
        told = f"failed in {failed}" if failed else "not recorded"
        return [cell.label, *[_UNKNOWN] * 5, runs, told]
    runs = f"{one.num_pairs} pairs" if one.num_pairs else runs
    unstable = f", {' and '.join(cell.unstable)} unstable" if cell.unstable else ""
    resolves = _UNKNOWN
    if one.resolves_share is not None:
        resolves = rounded(100 * one.resolves_share)
    values = [value_text(one.metric, v) for v in (one.a, one.b)]
    return [cell.label, *values, _share(one), _ends(one), resolves, runs, one.verdict + unstable]


def _other_row(cell: CellDiff, one: MetricDiff) -> list[str]:
    values = [value_text(one.metric, v) for v in (one.a, one.b)]
    return [f"{one.metric}: {cell.label}", *values, _share(one), _ends(one), one.verdict]


def _others(cell: CellDiff) -> list[MetricDiff]:
    return [m for m in cell.metrics if m.metric != "step_time_s" and m.is_significant]


def value_text(metric: str, value: float) -> str:
    """A value of a metric with its unit.

    Example:
        >>> value_text("step_time_s", 0.0213), value_text("wire_bytes_per_step", 2048)
        ('21.3 ms', '2 KiB')
    """
    unit = METRICS[metric].unit
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "B" else f"{value:.4g}"


def _share(one: MetricDiff) -> str:
    if one.share is None:
        return f"{one.difference:+.3g}"
    return f"{100 * one.share:+.2f} %"


def _ends(one: MetricDiff) -> str:
    if one.low is None or one.high is None:
        return _UNKNOWN
    if one.low == one.high and METRICS[one.metric].counted:
        return "counted"
    return f"[{100 * one.low:+.2f}, {100 * one.high:+.2f}]"


def _gates(diff: Diff) -> list[str]:
    """Each limit in a line, and each cell that does not hold it."""
    lines = []
    for limit in dict.fromkeys(each.limit for each in diff.gated):
        each = [gated for gated in diff.gated if gated.limit == limit]
        words = {"breached": "FAILED", "undecided": "UNDECIDED", "held": "held"}
        verdict = next(v for v in words if any(gated.verdict == v for gated in each))
        held = sum(gated.verdict == "held" for gated in each)
        lines.append(f"fail if {limit}: {words[verdict]} ({held} of {len(each)} cells hold it)")
        lines += [
            f"  {gated.verdict}: {gated.cell}: {gated.why}"
            for gated in sorted(each, key=lambda gated: gated.verdict)
            if gated.verdict != "held"
        ]
    return lines


def _notes(diff: Diff) -> list[str]:
    notes = []
    for name, (a, b) in diff.environment.items():
        notes.append(f"environments differ: {name}: {a} in A, {b} in B")
    for cell in diff.cells:
        if cell.settings:
            apart = ", ".join(f"{n} is {a} in A, {b} in B" for n, (a, b) in cell.settings.items())
            notes.append(f"compared as the only cells, though {apart}")
        if cell.same_work is False:
            notes.append(f"not comparable: {cell.label}: {cell.work}")
        if cell.failed_a or cell.failed_b:
            runs = f"{cell.failed_a} run(s) of A and {cell.failed_b} of B failed"
            last = (cell.error.strip().splitlines() or ["no reason recorded"])[-1]
            notes.append(f"{cell.label}: {runs}: {last}")
    notes += _about_work(diff)
    for name, alone in (("A", diff.only_a), ("B", diff.only_b)):
        notes += [f"only in {name}: {each}" for each in alone[:_SHOWN]]
        if len(alone) > _SHOWN:
            notes.append(f"only in {name}: {len(alone) - _SHOWN} more; --format json has all")
    notes += diff.notes
    verdicts = {m.verdict for cell in diff.cells for m in cell.metrics}
    if verdicts - {"one run", "one seed", "other work"}:
        notes.append(
            "a difference is significant at 95 % for all cells of a metric together (Holm); the "
            "interval leaves out 0 where it is; tied: not significant; resolves: the smallest "
            "difference that would be; runs: of A + of B (Welch, the error drawn towards those of "
            "the other cells: Smyth), or pairs of one round (Student)"
        )
    if "one run" in verdicts:
        notes.append("one run: a side ran once, which tells nothing of other runs; use --repeats 5")
    seeded = [m for cell in diff.cells for m in cell.metrics if m.verdict == "one seed"]
    if names := dict.fromkeys(m.metric for m in seeded if m.difference):
        notes.append(
            f"one seed: not judged: {' and '.join(names)}, for repeats have the same seed, which "
            "tells nothing of other seeds; --format json has the values"
        )
    if any(cell.unstable for cell in diff.cells):
        notes.append(f"unstable: runs of that side spread by {100 * STABLE:.0f} % or more")
    return notes


def _about_work(diff: Diff) -> list[str]:
    """How many cells did the same work, and which ended elsewhere."""
    same = [cell for cell in diff.cells if cell.same_work]
    unknown = sum(cell.same_work is None and cell.runs_a and cell.runs_b for cell in diff.cells)
    other = [cell.label for cell in same if cell.work.startswith("other")]
    lines = []
    if same:
        lines.append(f"same initial parameters and samples in {len(same)} cell(s)")
        lines[0] += f"; {other[0] if len(other) == 1 else len(other)}" * bool(other)
        lines[0] += " ended with other parameters" * bool(other)
    if unknown:
        lines.append(f"whether the work is the same is not recorded in {unknown} cell(s)")
    return lines
