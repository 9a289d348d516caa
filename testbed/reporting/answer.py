"""What a report answers first: which method is fastest in each setting, by how much, how sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from testbed.base.axes import MEMORY
from testbed.base.units import rounded
from testbed.records.answer import Answer, Beside, Saving
from testbed.records.report import ReportCell
from testbed.reporting.answer_text import ALONE, SURE_RUNS, lines_of
from testbed.reporting.dilation import UNRANKED
from testbed.reporting.ranking import is_compared
from testbed.reporting.ratios import is_framework, runs_ratio
from testbed.reporting.setting import Setting, settings_of
from testbed.reporting.work import (
    apart_from_dilation,
    apart_from_memory,
    compresses,
    is_exact,
    is_upper_bound,
)
from testbed.statistics.differences import LEVEL
from testbed.statistics.runs import Comparison, Ratio, compare

Cells = Mapping[int, ReportCell]  # by place


def answers(cells: Sequence[ReportCell]) -> list[Answer]:
    """One answer for each setting (`reporting.setting`), in the order of the report's cells.

    Compared, all at once (`testbed.statistics.runs.compare`), are the methods that exchange whole
    gradients, did the work of the others and save no memory; where all compress, those that do.
    Other lossy compressors and memory strategies stand beside the best of them. What depends on its
    dilation, or was run once, is not ranked.

    Args:
        cells: `Report.cells`, as `make_report` made them: with the real times.
    """
    found = [_answer(cells, setting) for setting in settings_of(cells)]
    return [msgspec.structs.replace(answer, lines=lines_of(answer)) for answer in found]


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
    return cell.rank_note in UNRANKED


def _answer(every: Sequence[ReportCell], setting: Setting) -> Answer:
    cells = {place: every[place] for place in setting.places if every[place].step_time_s}
    methods = methods_of(cells)
    memory, cheapest = [*_savings(cells, setting), None, None][:2]
    if not methods:
        why = "nothing was exchanged" if all(map(is_upper_bound, cells.values())) else "other work"
        why = why if cells else "no step time"
        return Answer(
            setting=setting.heading, verdict="none", why=why, memory=memory, cheapest=cheapest
        )
    found = comparison(methods)
    places = list(methods)
    first, best = places[0], methods[places[0]]
    ranked = str(first) in found.ranks
    tied = [p for p in places if str(p) in found.tied.get(str(first), ())]
    others = [p for p in places[1:] if p not in tied]
    if ranked:
        others = [p for p in others if not _depends(methods[p])]
    usual, lossy = _usual(methods), _lossy(cells, methods)

    def beside(place: int | None) -> Beside | None:
        if place is None or place == first:
            return None
        rivals = len(lossy) if place in lossy else len(places) - 1
        return _beside(cells[place], best, place, setting.names[place], found, first, rivals)

    why = "" if ranked else why_not_ranked(best, found, first)
    if len(methods) == 1:
        others_ran = any(_competes(cell) for place, cell in cells.items() if place != first)
        why = ALONE if others_ran or _failed_beside(every, best) else why
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
        why=why,
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
        compressed=beside(next(iter(lossy), None)),
        memory=memory,
        cheapest=cheapest,
    )


def _competes(cell: ReportCell) -> bool:
    """Whether it was run to be compared with methods that exchange whole gradients."""
    is_plain = cell.config.memory == MEMORY.default
    return is_plain and not compresses(cell) and not is_upper_bound(cell)


def _failed_beside(every: Sequence[ReportCell], best: ReportCell) -> bool:
    """Whether another method failed on its workload, workers and cluster."""

    def asked(cell: ReportCell) -> tuple[object, ...]:
        config = cell.config
        return cell.source, config.workload, config.workers, config.cluster

    alike = [cell for cell in every if asked(cell) == asked(best)]
    return any(cell.status == "failed" and _competes(cell) for cell in alike)


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
    return "no other stable method"


def _usual(methods: Cells) -> int | None:
    """The framework as it comes, else the fastest framework."""
    frameworks = [place for place, cell in methods.items() if is_framework(cell)]
    stock = [place for place in frameworks if ":" not in methods[place].config.backend]
    return next(iter(stock or frameworks), None)


def _beside(
    cell: ReportCell,
    best: ReportCell,
    place: int,
    name: str,
    found: Comparison,
    first: int,
    num_candidates: int = 1,
) -> Beside:
    """Of two that are ranked, the interval that the ranks go by; else that of their runs.

    That one holds for a pair that was chosen before: as one was chosen as the fastest of several,
    it is as much wider as Bonferroni asks for the fastest beside each of the others.
    """
    both_ranked = {str(place), str(first)} <= found.ranks.keys()
    if both_ranked:
        ratio: Ratio | None = found.ratio(str(place), str(first))
    else:
        ratio = runs_ratio(cell, best, 1 - LEVEL / num_candidates)
    assert ratio is not None  # both have a step time, so both have runs
    sure = both_ranked or min(len(c.run_medians_s) for c in (cell, best)) >= SURE_RUNS
    low, high = (
        (ratio.low - 1, ratio.high - 1)
        if sure and ratio.low is not None and ratio.high is not None
        else (None, None)
    )
    pair_differs = None
    if both_ranked:
        differs: bool | None = str(place) not in found.tied[str(first)]
        alone = runs_ratio(cell, best) if differs else None
        if alone is not None and alone.low is not None and alone.high is not None:
            pair_differs = not alone.low <= 1 <= alone.high
    elif _depends(cell) and not _depends(best):  # its time is not the cluster's
        name, differs = f"{name} ({cell.rank_note})", None
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
        pair_differs=pair_differs,
        test_accuracy=cell.test_accuracy,
    )


def _may_be_faster(
    every: Sequence[ReportCell], methods: Cells, found: Comparison, first: int, setting: Setting
) -> list[str]:
    """Methods that are not ranked and may be faster than the fastest, with what was seen.

    They were, at another dilation; or it is ranked and their runs and its own overlap.
    """
    best = methods[first]
    seen: dict[object, list[ReportCell]] = {}
    for cell in every:
        if cell.cluster is not None and cell.step_time_s:
            seen.setdefault(apart_from_dilation(cell), []).append(cell)
    told: list[tuple[float, str]] = []
    for place, cell in methods.items():
        if str(place) in found.ranks or place == first:
            continue
        fastest = min(seen.get(apart_from_dilation(cell), [cell]), key=step_s)
        why = why_not_ranked(cell, found, place).partition(",")[0]
        if _depends(cell) and step_s(fastest) < step_s(best):
            why = f"at dilation {fastest.dilation:g}"
        elif _depends(cell) or str(first) not in found.ranks or not _overlap(cell, best):
            continue
        name = f"{setting.names[place]} ({rounded(1e3 * step_s(fastest))} ms, {why})"
        told.append((step_s(fastest), name))
    return [words for _, words in sorted(told)]


def _overlap(cell: ReportCell, best: ReportCell) -> bool:
    return min(cell.run_medians_s) <= max(best.run_medians_s)


def _lossy(cells: Cells, methods: Cells) -> list[int]:
    """The places of lossy methods, the fastest first."""
    lossy = [
        place
        for place, cell in cells.items()
        if place not in methods and compresses(cell) and is_compared(cell)
    ]
    lossy = [p for p in lossy if cells[p].config.memory == MEMORY.default] or lossy
    return sorted(lossy, key=lambda place: step_s(cells[place]))


def peak_bytes(cell: ReportCell) -> int | None:
    """The peak of live storages, measured, else predicted."""
    found = cell.memory
    return None if found is None else found.measured_bytes or found.predicted_bytes


def _savings(cells: Cells, setting: Setting) -> list[Saving]:
    """The strategy with the least peak, and the one that saves memory at the least cost in time.

    Each beside none with the same compressor and the same settings. Nothing where no strategies
    were compared.
    """
    known = {place: peak for place, cell in cells.items() if (peak := peak_bytes(cell))}
    if len({cells[place].config.memory for place in known}) < 2:
        return []
    plain = {
        apart_from_memory(cells[place]): place
        for place in known
        if cells[place].config.memory == MEMORY.default
    }
    found = []
    for place, peak in known.items():
        other = plain.get(apart_from_memory(cells[place]))
        own_s, both = step_s(cells[place]), [place, *([] if other is None else [other])]
        found.append(
            Saving(
                name=setting.names[place],
                place=place,
                peak_bytes=peak,
                step_time_s=own_s,
                saves=None if other is None else 1 - peak / known[other],
                slower=None if other is None else own_s / step_s(cells[other]) - 1,
                num_runs=min(len(cells[p].run_medians_s) for p in both),
            )
        )
    least = min(found, key=lambda saving: (saving.peak_bytes, saving.step_time_s))
    paid = [s for s in found if (s.saves or 0.0) > 0 and s.slower is not None]
    return [least, *sorted(paid, key=lambda saving: saving.slower or 0.0)[:1]]
