"""`testbed.diff/1`: how one set of cells differs from another."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

DIFF_SCHEMA: Final = "testbed.diff/1"


class MetricDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell on both sides; times are those of the cluster that was emulated.

    Attributes:
        metric: its name.
        a: over the runs of A: the geometric mean, or the mean of what may be 0 or negative.
        b: the same of B.
        difference: b - a, in the metric's unit.
        share: of a; null where a is 0.
        low: lower end of the interval of `share`; null: a side has a single run, or, of loss and
            accuracy, runs of one seed.
        high: upper end; null likewise.
        resolves: smallest difference that would be significant; null likewise.
        resolves_share: the same as a share of a.
        p_value: of no difference; null likewise.
        num_pairs: runs that were paired by their round; 0: they were not.
        verdict: what it comes to: a word of the metric (`slower`, `faster`), `tied`, `one run`,
            `one seed` or `other work`.
    """

    metric: str
    a: float
    b: float
    difference: float
    share: float | None
    low: float | None
    high: float | None
    resolves: float | None
    resolves_share: float | None
    p_value: float | None
    num_pairs: int
    verdict: str

    @property
    def is_significant(self) -> bool:
        """Whether the runs tell the sides apart."""
        return self.verdict not in ("tied", "one run", "one seed", "other work")


class CellDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that both sides have.

    Attributes:
        label: the settings in which it differs from the other cells, or what it is.
        settings: setting -> its value in A and in B, where they differ: of two cells that were
            compared because they were the only ones.
        runs_a: finished runs of A.
        runs_b: of B.
        failed_a: runs of A that failed.
        failed_b: of B.
        error: of the first that failed.
        same_work: whether both started from the same parameters and saw the same samples; null:
            not recorded.
        work: in words, whether they did, and whether the parameters at the end agree.
        unstable: sides whose runs' step times spread by 3 % or more.
        metrics: those that both sides have recorded.
    """

    label: str
    settings: dict[str, tuple[Any, Any]]
    runs_a: int
    runs_b: int
    failed_a: int
    failed_b: int
    error: str
    same_work: bool | None
    work: str
    unstable: tuple[str, ...]
    metrics: tuple[MetricDiff, ...]

    def of(self, metric: str) -> MetricDiff | None:
        """What is known of a metric."""
        return next((each for each in self.metrics if each.metric == metric), None)


class Gated(msgspec.Struct, frozen=True, kw_only=True):
    """What a limit (`--fail-if`) says of one cell.

    Attributes:
        limit: as it was given.
        cell: its label.
        verdict: `breached`, `held`, or `undecided`: the runs cannot tell.
        why: in words.
    """

    limit: str
    cell: str
    verdict: Literal["breached", "held", "undecided"]
    why: str


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides, A and B, cell by cell.

    Attributes:
        a: what was given as A.
        b: as B.
        common: what the cells have in common, in words.
        cells: that both have.
        only_a: cells without a counterpart, each with what the nearest of B differs in.
        only_b: the same of B.
        runs_only_a: finished runs of each cell in `only_a`.
        environment: what differs between the sides' environments -> values of A, values of B.
        gated: one entry for each limit and cell.
        notes: what else has to be known.
    """

    schema: Literal["testbed.diff/1"] = DIFF_SCHEMA
    a: str
    b: str
    common: str
    cells: tuple[CellDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    runs_only_a: tuple[int, ...] = ()
    environment: dict[str, tuple[str, str]]
    gated: tuple[Gated, ...] = ()
    notes: tuple[str, ...] = ()
