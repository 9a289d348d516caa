"""Which cells of a family differ by more than their runs do, and what a table cannot tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from testbed.base.axes import BACKENDS
from testbed.records.report import Family, ReportCell
from testbed.reporting.dilation import describe_dilation, dilation_verdicts
from testbed.reporting.work import is_upper_bound, step_key
from testbed.statistics.runs import STABLE, Comparison, compare, estimate


def rank(cells: Sequence[ReportCell]) -> tuple[list[ReportCell], list[Family]]:
    """The cells with `family`, `rank` and `rank_note`, and the families.

    A family is the methods of one backend, whatever its options, on the same work, measured in one
    sweep, whose runs are interleaved. Where every backend, with its options, has one method, these
    are the family. Whoever did other
    work, exchanged nothing, failed or took what its dilation makes of it (`dilation`) is not
    compared; one cell alone is no family.
    """
    verdicts = dilation_verdicts(cells)
    ranked, families = [], list[Family]()
    for cell, verdict in zip(cells, verdicts, strict=True):
        told: str = verdict if is_compared(cell) else ""
        runs = estimate(cell.run_medians_s)
        if told == "cores busy" and runs is not None and (runs.spread or 0.0) >= STABLE:
            told = "unstable"  # of both the one to be mended first
        ranked.append(msgspec.structs.replace(cell, rank_note=told) if told else cell)
    for places in _families(ranked):
        members = {str(place): cells[place] for place in places}
        found = compare({name: cell.run_medians_s for name, cell in members.items()})
        if not (found.ranks or found.unstable):
            continue
        number = len(families) + 1
        families.append(_family(number, members, found))
        for name, place in zip(members, places, strict=True):
            note = "unstable" if name in found.unstable else "tied" if found.tied.get(name) else ""
            ranked[place] = msgspec.structs.replace(
                cells[place], family=number, rank=found.ranks.get(name), rank_note=note
            )
    return ranked, families


def describe_family(family: Family) -> str:
    """What a comparison can tell, in a line.

    Example:
        >>> describe_family(Family(number=1, name="mpi-ring", num_ranked=12, num_unstable=0,
        ...     num_runs=5, spread=0.01, degrees_of_freedom=48, resolves=0.0218))
        'mpi-ring: resolves 2.2 % (12 compared, at least 5 runs each, spread between runs 1.0 %)'
    """
    left_out = f"; {family.num_unstable} unstable, not ranked" if family.num_unstable else ""
    if family.resolves is None or family.spread is None:
        return f"{family.name}: resolves nothing{left_out}"
    return (
        f"{family.name}: resolves {100 * family.resolves:.1f} % ({family.num_ranked} compared, "
        f"at least {family.num_runs} runs each, spread between runs {100 * family.spread:.1f} %"
        f"{left_out})"
    )


def describe_runs(cells: Sequence[ReportCell]) -> list[str]:
    """Notes of a report: what the words of the ranking mean, and which cells have no interval."""
    notes = []
    if any(cell.rank is not None for cell in cells):
        notes.append(
            "rank: 1 + how many of the family are significantly faster (all pairs at 95 %, Tukey); "
            "tied: does not differ significantly from another one; what a family resolves is the "
            "smallest difference that is significant"
        )
    if any(cell.rank_note == "unstable" for cell in cells):
        notes.append(
            f"unstable: runs spread by {100 * STABLE:.0f} % or more (standard deviation), so that "
            "the cell is not ranked; measure it again, or with longer runs"
        )
    once = [cell for cell in cells if cell.status == "ok" and len(cell.run_medians_s) == 1]
    if once:
        notes.append(
            f"{len(once)} cells ran once: (a-b) are the 5th and 95th percentile of that run's "
            "steps, no interval, and such cells are not ranked; use --repeats 5"
        )
    twice = [cell for cell in cells if len(cell.run_medians_s) == 2]
    if twice:
        notes.append(
            f"{len(twice)} cells ran twice: (a-b) are the faster and the slower run; an interval "
            "from two runs would be too wide to be of use; use --repeats 5"
        )
    return notes + describe_dilation(cells)


def _families(cells: Sequence[ReportCell]) -> list[list[int]]:
    """Places of the cells of each family of two or more."""
    alike: dict[object, dict[str, list[int]]] = {}
    for place, cell in enumerate(cells):
        if is_compared(cell) and not cell.rank_note:
            backends = alike.setdefault((cell.source, step_key(cell)), {})
            backends.setdefault(cell.backend, []).append(place)
    families: list[list[int]] = []
    for backends in alike.values():
        if all(len(places) == 1 for places in backends.values()):
            families.append(list(itertools.chain.from_iterable(backends.values())))
            continue
        by_name: dict[str, list[int]] = {}
        for backend, places in backends.items():
            by_name.setdefault(BACKENDS.links(backend)[0].name, []).extend(places)
        families += by_name.values()
    return [places for places in families if len(places) > 1]


def is_compared(cell: ReportCell) -> bool:
    """Whether a cell finished, did the same work as others, and exchanged something."""
    did_the_work = cell.comparable is not False and cell.identical_work is not False
    return cell.status == "ok" and did_the_work and not is_upper_bound(cell)


def _family(number: int, members: Mapping[str, ReportCell], found: Comparison) -> Family:
    first = next(iter(members.values()))
    texts = {cell.backend for cell in members.values()}
    names = {BACKENDS.links(text)[0].name for text in texts}
    backend = texts.pop() if len(texts) == 1 else names.pop() if len(names) == 1 else "backends"
    name = f"{first.workload}, {backend}, {first.num_workers} workers"
    if first.config.cluster is not None:
        name += f" on {first.config.cluster}"
    return Family(
        number=number,
        name=name,
        num_ranked=len(found.ranks),
        num_unstable=len(found.unstable),
        num_runs=min((len(members[n].run_medians_s) for n in found.ranks), default=0),
        spread=found.spread,
        degrees_of_freedom=found.degrees_of_freedom,
        resolves=found.resolves,
    )
