"""Which cells may be compared, and how far each is from the step without communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from testbed.config import RunConfig
from testbed.records.report import ReportCell
from testbed.reporting.dilation import sharing_of
from testbed.spec import parse_spec
from testbed.statistics.compare import efficiency, most_common

UPPER_BOUND = "none"  # the backend that does not communicate

# Settings of the exchange and of the record: they may differ between cells that do the same work.
_EXCHANGE = ("backend", "scheduler", "compressor", "trace", "link", "plan", "deadline", "slow")
_RECORD = (
    "repeat",
    "warmup",
    "target_accuracy",
    "evaluate_every",
    "verify_steps",
    "checkpoint",
    "every",
)
# What a step's time does not depend on: how many there are, which samples they see, and numbers.
_LENGTH = (
    *("steps", "epochs", "resume_from", "seed"),
    *("warmup_steps", "schedule", "learning_rate", "momentum"),
)


def is_upper_bound(cell: ReportCell) -> bool:
    """Whether the cell is the step without communication."""
    return parse_spec(cell.backend).name == UPPER_BOUND


def judge(cells: Sequence[ReportCell]) -> list[ReportCell]:
    """The cells with `efficiency`, `comparable` and `comparable_note` filled in."""
    bounds: dict[_Key, float | None] = {}
    for cell in cells:
        if cell.status == "ok" and is_upper_bound(cell):
            bounds.setdefault(_step_key(cell), cell.step_time_s)
    peers: dict[_Key, list[ReportCell]] = {}
    for cell in cells:
        peers.setdefault(_work_key(cell), []).append(cell)
    judged = []
    for cell in cells:
        comparable, note = _compare(cell, peers[_work_key(cell)])
        share = efficiency(bounds.get(_step_key(cell)), cell.step_time_s)
        judged.append(
            msgspec.structs.replace(
                cell, efficiency=share, comparable=comparable, comparable_note=note
            )
        )
    return judged


def sort_cells(cells: Iterable[ReportCell]) -> list[ReportCell]:
    """By workload and workers; then the upper bound, the others by step time, failed ones."""

    def position(cell: ReportCell) -> tuple[object, ...]:
        time_s = cell.step_time_s
        return (
            cell.workload,
            cell.num_workers,
            not is_upper_bound(cell),
            cell.status == "failed",
            float("inf") if time_s is None else time_s,
            cell.backend,
            cell.source,
        )

    return sorted(cells, key=position)


def same_work(cell: ReportCell) -> tuple[str, str]:
    """`yes`, `no` or `not checked`, and why, in words."""
    if cell.status == "failed":
        return "", ""
    if cell.comparable is False:
        return "no", cell.comparable_note
    if cell.identical_work is False:
        return "no", cell.identical_work_note
    if cell.identical_work is None:
        return "not checked", cell.identical_work_note or cell.comparable_note
    return "yes", cell.identical_work_note


_Key = tuple[RunConfig, str]  # settings, and how nodes of an emulated cluster share cores


def _work_key(cell: ReportCell) -> _Key:
    return _without(cell, _EXCHANGE + _RECORD), sharing_of(cell.cluster)


def _step_key(cell: ReportCell) -> _Key:
    levelled = tuple(n for n in _EXCHANGE if n != "slow") + _RECORD + _LENGTH
    return _without(cell, levelled), sharing_of(cell.cluster)


def _without(cell: ReportCell, names: Iterable[str]) -> RunConfig:
    """The cell's settings as they came out in the end, with some of them levelled."""
    asked = msgspec.structs.replace(
        cell.config,
        workers=cell.num_workers,
        batch_size=cell.batch_size or None,
        steps=cell.steps or None,
        epochs=None,
    )
    default = RunConfig()
    return msgspec.structs.replace(asked, **{name: getattr(default, name) for name in names})


def _compare(cell: ReportCell, peers: Sequence[ReportCell]) -> tuple[bool | None, str]:
    if cell.status == "failed":
        return None, "failed"
    finished = [peer for peer in peers if peer.status == "ok"]
    for what, name in (("initial parameters", "initial_digest"), ("samples", "sample_digest")):
        own = getattr(cell, name)
        if not own:
            return None, f"no single digest of the {what} is recorded"
        others = most_common([getattr(peer, name) for peer in finished])
        if own != others:
            return (
                False,
                f"{what} differ from those of the other cells: {own[:8]}, not {others[:8]}",
            )
    if len(finished) == 1:
        return True, "no other cell of the same work to compare with"
    return True, f"same initial parameters and samples as {len(finished) - 1} other cell(s)"
