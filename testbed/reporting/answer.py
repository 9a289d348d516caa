"""What a report answers first: which method is fastest in each setting, by how much, how sure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from testbed.base.axes import MEMORY
from testbed.records.answer import Answer, Beside, LeastMemory
from testbed.records.report import ReportCell
from testbed.reporting.columns import rounded
from testbed.reporting.ranking import is_compared
from testbed.reporting.ratios import is_framework, runs_ratio
from testbed.reporting.setting import Setting, settings_of
from testbed.reporting.work import (
    apart_from_dilation,
    apart_from_memory,
    compresses,
    is_exact,
)
from testbed.statistics.runs import Comparison, compare

WIDTH: Final = 100  # characters of a line
MAX_LINES: Final = 3
SURE_RUNS: Final = 3  # from here on an interval is shown
_MOST_NAMES = 3  # of methods that are tied

Cells = Mapping[int, ReportCell]  # by place


def answers(cells: Sequence[ReportCell]) -> list[Answer]:
    """One answer for each setting (`reporting.setting`), in the order of the report's cells.

    Compared, all at once (`testbed.statistics.runs.compare`), are the methods that exchange whole
    gradients, did the work of the others and save no memory. Lossy compressors and memory
    strategies stand beside the best of them. What depends on its dilation, or was run once, is not
    ranked.

    Args:
        cells: `Report.cells`, as `make_report` made them: with the real times.
    """
    return [_with_lines(_answer(cells, setting)) for setting in settings_of(cells)]


def step_s(cell: ReportCell) -> float:
    """Its step, in the emulated cluster's seconds."""
    return (cell.step_time_s or float("inf")) / cell.dilation


def methods_of(cells: Cells) -> Cells:
    """The cells of a setting that compete: the fastest first."""
    compared = {p: c for p, c in cells.items() if is_compared(c) and is_exact_or_lossy(c)}
    plain = {p: c for p, c in compared.items() if c.config.memory == MEMORY.default} or compared
    dense = {p: c for p, c in plain.items() if not compresses(c)} or plain
    return dict(sorted(dense.items(), key=lambda pair: step_s(pair[1])))


def is_exact_or_lossy(cell: ReportCell) -> bool:
    """Whether it does the work of one process, but for what its compressor loses."""
    return compresses(cell) or is_exact(cell)


def comparison(methods: Cells) -> Comparison:
    """All methods of a setting, at once; but for those whose time is not the cluster's."""
    return compare({str(place): c.run_medians_s for place, c in methods.items() if not _depends(c)})


def _depends(cell: ReportCell) -> bool:
    return "dilation" in cell.rank_note


def _answer(every: Sequence[ReportCell], setting: Setting) -> Answer:
    cells = {place: every[place] for place in setting.places if every[place].step_time_s}
    methods = methods_of(cells)
    memory = _least_memory(cells, setting)
    if not methods:
        return Answer(setting=setting.heading, verdict="none", memory=memory)
    found = comparison(methods)
    places = list(methods)
    first, best = places[0], methods[places[0]]
    ranked = str(first) in found.ranks
    tied = [p for p in places if str(p) in found.tied.get(str(first), ())]
    others = [p for p in places[1:] if p not in tied]
    if ranked:
        others = [p for p in others if str(p) in found.ranks]
    usual = _usual(methods)

    def beside(place: int | None) -> Beside | None:
        if place is None or place == first:
            return None
        return _beside(cells[place], best, place, setting.names[place], found, first)

    low_s, high_s = range_of(best)
    share = best.efficiency
    predicted = min(
        (p for p in places if methods[p].predicted_step_time_s),
        key=lambda p: methods[p].predicted_step_time_s or 0.0,
        default=None,
    )
    return Answer(
        setting=setting.heading,
        verdict=("tied" if tied else "fastest")
        if ranked
        else ("only one" if len(methods) == 1 else "not proven"),
        best=[setting.names[place] for place in (first, *tied)],
        places=[first, *tied],
        step_time_s=step_s(best),
        low_s=low_s,
        high_s=high_s,
        num_runs=len(best.run_medians_s),
        why="" if ranked else why_not_ranked(best, found, first),
        resolves=found.resolves if ranked else None,
        next=beside(others[0] if others else None),
        usual=beside(usual),
        bound_s=None if share is None else share * step_s(best),
        exposed_s=None if best.exposed_comm_s is None else best.exposed_comm_s / best.dilation,
        test_accuracy=best.test_accuracy,
        predicted=None if predicted is None else setting.names[predicted],
        predicted_s=None
        if predicted is None
        else (methods[predicted].predicted_step_time_s or 0.0) / best.dilation,
        unranked=_may_be_faster(every, methods, found, first, setting),
        compressed=beside(_fastest_lossy(cells, methods)),
        memory=memory,
    )


def range_of(cell: ReportCell) -> tuple[float | None, float | None]:
    """Of three runs or more the 95 % interval of its step, of two the faster and the slower."""
    low, high = (
        (cell.step_time_low_s, cell.step_time_high_s)
        if len(cell.run_medians_s) >= SURE_RUNS
        else (cell.step_time_smallest_s, cell.step_time_largest_s)
    )
    if len(cell.run_medians_s) < 2 or low is None or high is None:
        return None, None
    return low / cell.dilation, high / cell.dilation


def why_not_ranked(cell: ReportCell, found: Comparison, place: int) -> str:
    """In a few words; empty: it is ranked."""
    if str(place) in found.ranks:
        return ""
    if _depends(cell):
        return cell.rank_note
    if len(cell.run_medians_s) < 2:
        return "one run"
    if str(place) in found.unstable:
        return f"unstable, runs spread by {rounded(100 * (cell.step_time_spread or 0))} %"
    return "no other stable method to compare it with"


def _usual(methods: Cells) -> int | None:
    """The framework as it comes, else the fastest framework."""
    frameworks = [place for place, cell in methods.items() if is_framework(cell)]
    stock = [place for place in frameworks if ":" not in methods[place].config.backend]
    return next(iter(stock or frameworks), None)


def _beside(
    cell: ReportCell, best: ReportCell, place: int, name: str, found: Comparison, first: int
) -> Beside:
    ratio = runs_ratio(cell, best)
    assert ratio is not None  # both have a step time, so both have runs
    sure = min(len(cell.run_medians_s), len(best.run_medians_s)) >= SURE_RUNS
    low, high = (
        (ratio.low - 1, ratio.high - 1)
        if sure and ratio.low is not None and ratio.high is not None
        else (None, None)
    )
    if str(place) in found.ranks and str(first) in found.ranks:
        differs: bool | None = str(place) not in found.tied[str(first)]
    else:
        differs = None if low is None or high is None else not low <= 0 <= high
    return Beside(
        name=name,
        place=place,
        step_time_s=step_s(cell),
        gain=ratio.ratio - 1,
        low=low,
        high=high,
        differs=differs,
        test_accuracy=cell.test_accuracy,
    )


def _may_be_faster(
    every: Sequence[ReportCell], methods: Cells, found: Comparison, first: int, setting: Setting
) -> list[str]:
    """Methods that cannot be ranked and depend on a dilation at which they were faster."""
    best_s = step_s(methods[first])
    seen: dict[object, list[ReportCell]] = {}
    for cell in every:
        if cell.cluster is not None and cell.step_time_s:
            seen.setdefault(apart_from_dilation(cell), []).append(cell)
    told: list[tuple[float, str]] = []
    for place, cell in methods.items():
        if str(place) in found.ranks or place == first or not _depends(cell):
            continue
        fastest = min(seen.get(apart_from_dilation(cell), [cell]), key=step_s)
        if step_s(fastest) < best_s:
            words = f"{setting.names[place]} ({rounded(1e3 * step_s(fastest))} ms at dilation "
            told.append((step_s(fastest), f"{words}{fastest.dilation:g})"))
    return [words for _, words in sorted(told)]


def _fastest_lossy(cells: Cells, methods: Cells) -> int | None:
    lossy = [
        place
        for place, cell in cells.items()
        if place not in methods and compresses(cell) and is_compared(cell)
    ]
    lossy = [p for p in lossy if cells[p].config.memory == MEMORY.default] or lossy
    return min(lossy, key=lambda place: step_s(cells[place]), default=None)


def peak_bytes(cell: ReportCell) -> int | None:
    """The peak of live storages, measured, else predicted."""
    found = cell.memory
    return None if found is None else found.measured_bytes or found.predicted_bytes


def _least_memory(cells: Cells, setting: Setting) -> LeastMemory | None:
    """None where no memory strategies were compared."""
    known = {place: peak for place, cell in cells.items() if (peak := peak_bytes(cell))}
    if len({cells[place].config.memory for place in known}) < 2:
        return None
    least = min(known, key=lambda place: (known[place], step_s(cells[place])))
    cell = cells[least]
    plain = next(
        (
            place
            for place in known
            if cells[place].config.memory == MEMORY.default
            and apart_from_memory(cells[place]) == apart_from_memory(cell)
        ),
        None,
    )
    return LeastMemory(
        name=setting.names[least],
        place=least,
        peak_bytes=known[least],
        step_time_s=step_s(cell),
        saves=None if plain is None else 1 - known[least] / known[plain],
        slower=None if plain is None else step_s(cell) / step_s(cells[plain]) - 1,
    )


# For people.


def _with_lines(answer: Answer) -> Answer:
    return msgspec.structs.replace(answer, lines=flow(_clauses(answer)))


def flow(clauses: Iterable[str], width: int = WIDTH, max_lines: int = MAX_LINES) -> list[str]:
    """Clauses, each in the first line that has room; what has none in the last line is left out.

    Example:
        >>> flow(["one two", "three four", "five", "six"], width=16, max_lines=2)
        ['One two; five.', 'Three four; six.']
    """
    lines: list[str] = []
    for clause in clauses:
        room = [n for n, line in enumerate(lines) if len(line) + len(clause) + 3 <= width]
        if room:
            lines[room[0]] += f"; {clause}"
        elif len(lines) < max_lines:
            lines.append(clipped(clause[:1].upper() + clause[1:], width - 1))
    return [line if line.endswith("…") else f"{line}." for line in lines]


def _clauses(answer: Answer) -> list[str]:
    """The most important first."""
    told = [_verdict(answer)]
    if answer.next is not None:
        told.append(f"{_gain(answer.next)} the next, {clipped(answer.next.name)}")
    if answer.usual is not None and answer.usual != answer.next:
        told.append(f"{_gain(answer.usual)} {clipped(answer.usual.name)}")
    if answer.bound_s and answer.step_time_s:
        above = f"{rounded(100 * (answer.step_time_s / answer.bound_s - 1))} %"
        told.append(f"{above} above the bound of {_ms(answer.bound_s)} (no communication)")
    elif answer.exposed_s is not None:
        told.append(f"{_ms(answer.exposed_s)} of it exposed communication (no bound measured)")
    if answer.unranked:
        more = f" and {len(answer.unranked) - 1} more" if len(answer.unranked) > 1 else ""
        told.append(f"may be faster, not ranked: {answer.unranked[0]}{more}")
    if answer.compressed is not None:
        told.append(_compressed(answer.compressed, answer.test_accuracy))
    if answer.memory is not None:
        told.append(_memory(answer.memory))
    if answer.predicted is not None and answer.predicted_s is not None:
        other = "" if answer.predicted == answer.best[0] else f" {clipped(answer.predicted)},"
        told.append(f"predicted fastest:{other or ' the same,'} {_ms(answer.predicted_s)}")
    return told


def _verdict(answer: Answer) -> str:
    if answer.step_time_s is None:
        return "nothing was exchanged, or all cells did other work: no method is the fastest"
    step = f"{_ms(answer.step_time_s)}{range_text(answer)}"
    best = [clipped(name) for name in answer.best]
    if answer.verdict == "tied":
        names = ", ".join(best[:_MOST_NAMES])
        more = f" and {len(best) - _MOST_NAMES} more" if len(best) > _MOST_NAMES else ""
        resolves = rounded(100 * (answer.resolves or 0))
        return f"tied: {names}{more}, {step}; runs resolve {resolves} %"
    words = {
        "fastest": f"fastest: {best[0]}, {step}",
        "only one": f"only {best[0]} was run: {step}",
        "not proven": f"fastest seen, not proven: {best[0]}, {step}: {answer.why}",
    }
    return words[answer.verdict].removesuffix(": one run")


def range_text(answer: Answer) -> str:
    """The interval, or the faster and the slower of two runs, and how many runs.

    Example:
        >>> two = Answer(setting="", verdict="tied", low_s=0.163, high_s=0.166, num_runs=2)
        >>> range_text(two)
        ' (163-166, 2 runs)'
    """
    runs = "one run" if answer.num_runs == 1 else f"{answer.num_runs} runs"
    if answer.low_s is None or answer.high_s is None:
        return f" ({runs})"
    low, high = rounded(1e3 * answer.low_s), rounded(1e3 * answer.high_s)
    return f" [{low}, {high}]" if answer.num_runs >= SURE_RUNS else f" ({low}-{high}, {runs})"


def _gain(beside: Beside) -> str:
    text = f"{rounded(100 * beside.gain)} % faster than"
    if beside.differs is False:
        text = f"{rounded(100 * beside.gain)} %, so not significantly, faster than"
    if beside.low is not None and beside.high is not None:
        interval = f"[{rounded(100 * beside.low)}, {rounded(100 * beside.high)}]"
        text = text.replace(" %", f" % {interval}", 1)
    return text


def _compressed(beside: Beside, accuracy: float | None) -> str:
    faster = beside.gain < 0
    factor = 100 * (1 / (1 + beside.gain) - 1) if faster else 100 * beside.gain
    words = f"{rounded(factor)} % {'faster' if faster else 'slower'}"
    sure = {True: "", False: ", not significant", None: ", not proven"}[beside.differs]
    text = f"lossy: {clipped(beside.name)}, {_ms(beside.step_time_s)}, {words}{sure}"
    if beside.test_accuracy is None or accuracy is None:
        return text
    return (
        f"{text}, accuracy {rounded(100 * beside.test_accuracy)}, not {rounded(100 * accuracy)} %"
    )


def _memory(least: LeastMemory) -> str:
    name = clipped(least.name.removeprefix("memory "), 40)
    text = f"least memory: {name}, {rounded(1e-6 * least.peak_bytes)} MB"
    if least.saves is None or least.slower is None:
        return text
    step = f"step {rounded(100 * least.slower)} % longer"
    return f"{text}, {rounded(100 * least.saves)} % less; {step}"


def clipped(name: str, most: int = 44) -> str:
    """A method's name in a line that has to be short.

    Example:
        >>> clipped("gloo/bytescheduler:partition_kib=64,credit_kib=256", 40)
        'gloo/bytescheduler:partition_kib=64,cre…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def _ms(seconds: float) -> str:
    return f"{rounded(1e3 * seconds)} ms"
