"""What a report answers first, as values: one `Answer` for each setting."""

from __future__ import annotations

from typing import Literal

import msgspec


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """A method beside the one that an answer names.

    Attributes:
        name: of the method.
        place: of its cell in `Report.cells`.
        step_time_s: the cluster's.
        gain: its step over that of the answer's method, less 1: how much faster that one is.
        low: lower end of its 95 % interval: of two that are ranked, Tukey's, which holds for all
            pairs at once; else that of the runs, in pairs where they ran in the same rounds, and of
            the fastest of several lossy methods wider by Bonferroni's rule; null: too few runs.
        high: upper end; null: likewise.
        differs: whether the difference is significant; null: the runs cannot tell.
        pair_differs: of two that are ranked and differ: whether they do by their own runs alone, as
            `testbed diff` has it; where not, the others' runs, which spread less, decided. Null:
            not asked.
        test_accuracy: of the method, in the end.
    """

    name: str
    place: int
    step_time_s: float
    gain: float
    low: float | None = None
    high: float | None = None
    differs: bool | None = None
    pair_differs: bool | None = None
    test_accuracy: float | None = None


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """A memory strategy beside none.

    Attributes:
        name: of the strategy, with its compressor.
        place: of its cell in `Report.cells`.
        peak_bytes: of live storages, measured, else predicted.
        step_time_s: the cluster's.
        saves: 1 - peak / peak without a strategy; null: that was not run.
        slower: step / step without a strategy, less 1; null: likewise.
        num_runs: of it, or of none, whichever has fewer.
    """

    name: str
    place: int
    peak_bytes: int
    step_time_s: float
    saves: float | None = None
    slower: float | None = None
    num_runs: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Which method is fastest in one setting. Seconds are the emulated cluster's.

    Attributes:
        setting: workload, workers, cluster, and what tells it from the report's other settings.
        verdict: `fastest`: significantly, of all methods together; `tied` with others; `not
            proven`: the fastest seen cannot be ranked, see `why`; `only one` method was run;
            `none`: nothing was exchanged.
        best: names: the fastest first, then those tied with it.
        places: of their cells in `Report.cells`.
        step_time_s: of the fastest.
        low_s: of three runs or more: lower end of its 95 % interval; of two: the faster; else null.
        high_s: likewise.
        num_runs: of the fastest.
        why: it is not ranked.
        resolves: smallest difference between two methods that is significant, as a share.
        next: the fastest that is not tied with it; of those whose time is the cluster's, where
            its own is.
        usual: the framework as it comes; null: it is the fastest, or was not run.
        bound_s: the step without communication; null: not measured.
        exposed_s: communication that the fastest did not hide.
        test_accuracy: of the fastest.
        predicted: of the methods, that with the shortest predicted step; null: none was predicted.
        predicted_s: that step.
        unranked: methods that may be faster, with what was seen of them.
        compressed: the fastest lossy method beside the fastest dense one; a positive gain means
            that the dense one is faster.
        memory: the strategy that takes least; null: none were compared.
        cheapest: of those that save memory, that whose step grows least.
        lines: all this for people, at most three lines of 100 characters.
    """

    setting: str
    verdict: Literal["fastest", "tied", "not proven", "only one", "none"]
    best: list[str] = []
    places: list[int] = []
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    num_runs: int = 0
    why: str = ""
    resolves: float | None = None
    next: Beside | None = None
    usual: Beside | None = None
    bound_s: float | None = None
    exposed_s: float | None = None
    test_accuracy: float | None = None
    predicted: str | None = None
    predicted_s: float | None = None
    unranked: list[str] = []
    compressed: Beside | None = None
    memory: Saving | None = None
    cheapest: Saving | None = None
    lines: list[str] = []
