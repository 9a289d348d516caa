"""Methods over the frameworks that schedule by themselves: on the same transport first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from testbed.base.axes import BACKENDS, COMPRESSORS, SCHEDULERS, BackendFacts
from testbed.records.cell import Cell
from testbed.records.environment import SETS
from testbed.records.report import RatioLine, ReportCell
from testbed.reporting.naming import part_of, short_text, tuning_of
from testbed.reporting.ranking import is_compared
from testbed.reporting.work import step_key
from testbed.statistics.differences import CONFIDENCE, LEVEL, shared_rounds
from testbed.statistics.runs import Comparison, Ratio, ratio_of


def transport_of(cell: Cell) -> str:
    """Whose connections carry the bytes of a cell; the backend's name where nothing is declared.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> [transport_of(Cell(backend=name, workload="w", num_workers=2, config=RunConfig()))
        ...  for name in ("ddp", "gloo", "loopback")]
        ['Gloo', 'Gloo', 'loopback']
    """
    facts = _facts(cell)
    return facts.transport or BACKENDS.links(cell.backend)[0].name


def compare_with_frameworks(
    cells: Sequence[ReportCell],
) -> tuple[list[ReportCell], list[RatioLine]]:
    """The cells with `transport` and their ratio on it, and all ratios that can be stated.

        ratio = step of a method / step of the framework, on the same work in one sweep

    A cell's own ratio is that to the fastest framework of its transport, which has none. Each
    method has a line for each framework of its transport, each other transport one for its fastest
    method. Cells under a compressor are left out; frameworks that compress, or carry out a plan
    that was given, count as methods.
    """
    placed = [msgspec.structs.replace(cell, transport=transport_of(cell)) for cell in cells]
    groups: dict[object, list[int]] = {}
    for place, cell in enumerate(placed):
        if is_compared(cell) and COMPRESSORS.is_default(cell.config):
            groups.setdefault((cell.source, step_key(cell)), []).append(place)
    lines: list[RatioLine] = []
    for places in groups.values():
        members = sorted((placed[p] for p in places), key=lambda c: c.step_time_s or 0.0)
        frameworks = [cell for cell in members if is_framework(cell)]
        for framework in frameworks:
            lines += _same(framework, members) + _across(framework, members)
        for place in places:
            own = placed[place]
            fastest = next((f for f in frameworks if f.transport == own.transport), own)
            if fastest is not own and (found := runs_ratio(own, fastest)) is not None:
                placed[place] = msgspec.structs.replace(
                    own,
                    ratio=found.ratio,
                    ratio_low=found.low,
                    ratio_high=found.high,
                    ratio_to=name_of(fastest),
                )
    return placed, lines


def alike_text(cells: Mapping[int, ReportCell], compared: Comparison) -> str:
    """Of each transport with a framework: its fastest method beside its fastest framework.

    Where both are ranked, by the interval that ranks go by. Else the reason stands beside the
    method, and the fastest of m was chosen after the fact: the interval of its runs is as much
    wider as Bonferroni asks for, of 1 - 0.05 / m.

    Args:
        cells: of one setting by place, with their ratios (`compare_with_frameworks`); the fastest
            first.
        compared: the ranks, by place.
    """
    frameworks: dict[str, int] = {}
    methods: dict[str, list[int]] = {}
    for place, cell in cells.items():
        if is_framework(cell):
            frameworks.setdefault(cell.transport, place)
        elif cell.ratio is not None:
            methods.setdefault(cell.transport, []).append(place)
    told = []
    for transport, candidates in methods.items():
        if transport not in frameworks:
            continue
        both = candidates[0], frameworks[transport]
        best, framework = (cells[place] for place in both)
        if {str(place) for place in both} <= compared.ranks.keys():
            found: Ratio | None = compared.ratio(*map(str, both))
        else:
            found = runs_ratio(best, framework, 1 - LEVEL / len(candidates))
        assert found is not None  # it has a ratio, so both have runs
        note = "" if best.rank_note in ("", "tied") else f" ({best.rank_note})"
        told.append(
            f"over {transport} alone {short_name_of(best)}{note} takes "
            f"{_ratio_text(found.ratio, found.low, found.high)} times the step of "
            f"{short_name_of(framework)}"
        )
    return "; ".join(told)


def describe_ratios(lines: Sequence[RatioLine]) -> list[str]:
    """Lines for people: what is on the same transport, then what is not."""
    notes: list[str] = []
    for same in (True, False):
        told: dict[tuple[str, ...], list[str]] = {}
        for line in lines:
            if line.same_transport is same:
                told.setdefault((line.group, line.framework, line.framework_transport), []).append(
                    _words(line)
                )
        for (group, framework, transport), texts in told.items():
            how = "the same transport" if same else "across transports, the fastest of each"
            notes.append(
                f"{how}, times the step of {framework} over {transport} ({group}): "
                f"{'; '.join(texts)}"
            )
    if lines:
        runs = "by pairs of runs of one round" if all(n.num_pairs for n in lines) else "by runs"
        notes.append(f"[a, b] of a ratio: 95 % interval, {runs}; below 1 the method is faster")
    return notes


def describe_transports(cells: Iterable[ReportCell]) -> list[str]:
    """A line for each transport: what cluster, variables and backends gave it."""
    given: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.status == "ok" and cell.transport and _facts(cell).exchanges:
            given.setdefault(cell.transport, {}).update(dict.fromkeys(_given(cell)))
    return [
        f"transport {name} was given: {'; '.join(told) or 'nothing beyond its defaults'}"
        for name, told in given.items()
        if any(given.values())
    ]


def describe_tuning(cells: Iterable[ReportCell]) -> list[str]:
    """A line on methods whose knobs nobody searched, where those of others were."""
    words = {name_of(cell): tuning_of(cell) for cell in cells if cell.status == "ok"}
    if not any(word.startswith("tuned") for word in words.values()):
        return []
    untuned = [name for name, word in words.items() if word == "untuned"]
    return [f"untuned, at their defaults: {', '.join(untuned)}"] if untuned else []


def name_of(cell: ReportCell) -> str:
    """Backend and scheduler; a framework alone."""
    backend = part_of(cell, BACKENDS)
    if _facts(cell).schedule is not None:
        return backend
    return f"{backend}/{part_of(cell, SCHEDULERS)}"


def short_name_of(cell: ReportCell) -> str:
    """The same without the folders of files that options name."""
    backend = short_text(part_of(cell, BACKENDS))
    if _facts(cell).schedule is not None:
        return backend
    return f"{backend}/{short_text(part_of(cell, SCHEDULERS))}"


def _facts(cell: Cell) -> BackendFacts:
    found = BACKENDS.find(cell.backend)
    return BackendFacts() if found is None else found.facts


def is_framework(cell: ReportCell) -> bool:
    """Whether it is another framework with its own exact schedule, as it comes or tuned."""
    facts = _facts(cell)
    return facts.schedule is not None and facts.exact and not facts.schedule.plan_file


def _same(framework: ReportCell, members: Sequence[ReportCell]) -> list[RatioLine]:
    alike = [m for m in members if m.transport == framework.transport and m is not framework]
    return [line for m in alike if (line := _line(m, framework)) is not None]


def _across(framework: ReportCell, members: Sequence[ReportCell]) -> list[RatioLine]:
    fastest: dict[str, ReportCell] = {}
    for member in members:
        if member.transport != framework.transport:
            fastest.setdefault(member.transport, member)
    return [line for m in fastest.values() if (line := _line(m, framework)) is not None]


def _line(method: ReportCell, framework: ReportCell) -> RatioLine | None:
    found = runs_ratio(method, framework)
    if found is None:
        return None
    group = f"{method.workload}, {method.num_workers} workers"
    if method.config.cluster is not None:
        group += f" on {method.config.cluster}"
    return RatioLine(
        group=group,
        method=name_of(method),
        transport=method.transport,
        framework=name_of(framework),
        framework_transport=framework.transport,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        num_pairs=found.num_pairs,
    )


def runs_ratio(
    method: ReportCell, framework: ReportCell, confidence: float = CONFIDENCE
) -> Ratio | None:
    """Of their steps, paired by the rounds of the sweep if both ran in the same ones.

    Cells whose rounds are not known, or not all the same, have none in common.
    """
    both = (method, framework)
    known = all(len(set(c.run_rounds)) == len(c.run_medians_s) for c in both)
    began = [dict(itertools.zip_longest(c.run_rounds, c.run_began_s)) for c in both]
    shared = known and shared_rounds(*began, interleaved=method.source == framework.source)
    sides: list[Mapping[int, float]] = []
    for side, cell in enumerate(both):
        numbers = cell.run_rounds if shared else range(side, 2 * len(cell.run_medians_s), 2)
        sides.append(dict(zip(numbers, cell.run_medians_s, strict=True)))
    return ratio_of(sides[0], sides[1], confidence)


def _words(line: RatioLine) -> str:
    return f"{line.method} {_ratio_text(line.ratio, line.low, line.high)}"


def _ratio_text(ratio: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} [{low:.3f}, {high:.3f}]"


def _given(cell: ReportCell) -> list[str]:
    """What shaped the exchange of a cell beside its plan."""
    facts = _facts(cell)
    told = []
    for path, value in ((cell.cluster or {}).get("tcp") or {}).items():
        told.append(f"{path.rpartition('/')[2]} {_plain(value)}")
    variables = cell.environment.get("variables", {})
    told += [f"{name}={variables[name]}" for name in facts.variables if name in variables]
    if sets := cell.environment.get(SETS):  # of this run; what it sets today may be another thing
        told.append(f"{cell.backend}: {sets}")
    return told


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
