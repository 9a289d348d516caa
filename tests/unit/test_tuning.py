"""One search with a stated budget for the knobs of every method, and what a run makes of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from testbed.base.axes import BACKENDS, SCHEDULERS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.knobs import Grid, Range, no_knobs
from testbed.base.parts import Part
from testbed.commands.tuning import tuned_run
from testbed.launch.held_out import scorer
from testbed.launch.plan_options import parts_of
from testbed.launch.tuning import COLUMNS, space_of, tuned, with_knobs
from testbed.records.cell import Cell
from testbed.reporting.naming import tuning_of
from testbed.scheduling.tuning import APART, Budget, Trial, best_of, search

LINK = "rate=10gbit,latency=50us,workers=4"
REPLAY = "replay:resnet50-v100"
WITH_KNOBS = [
    (axis, name)
    for axis in (SCHEDULERS, BACKENDS)
    for name in axis.builtin
    if axis.load(name).knobs(axis.load(name).options())
]


def config(scheduler: str = "bytescheduler", **changes: Any) -> RunConfig:
    given = {"workload": REPLAY, "backend": "gloo", "link": LINK, "workers": 4, **changes}
    return RunConfig(scheduler=scheduler, **given)


def distance(values: Mapping[str, Any]) -> float:
    return abs(log(values.get("mib", 256) / 20)) + abs(values.get("depth", 4) - 2)


SPACE = {"mib": Range(1, 256), "depth": Grid((1, 2, 4))}


def test_the_same_seed_finds_the_same_and_another_looks_elsewhere():
    first, again, other = (search(SPACE, distance, Budget(seed=s)) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("trials", [2, 3, 10, 30])
def test_a_search_takes_its_budget_and_begins_with_what_was_given(trials: int):
    found = search(SPACE, distance, Budget(trials=trials))
    assert len(found) == trials
    assert found[0].values == {}


def test_the_later_trials_are_nearer_to_the_best():
    found = search(SPACE, distance, Budget(trials=60))
    assert min(t.score for t in found[31:]) < min(t.score for t in found[:31])
    best = found[best_of(found, 1, {})[0]].values
    assert best["depth"] == 2
    assert 15 < best["mib"] < 27


def test_a_small_space_is_scored_whole():
    grids = {"a": Grid((1, 2)), "b": Grid((False, True))}
    found = search(grids, lambda v: float(len(v)), Budget(trials=10))
    assert [dict(t.values) for t in found[1:]] == [
        {"a": a, "b": b} for a in (1, 2) for b in (False, True)
    ]


def test_what_cannot_be_is_a_trial_with_its_reason():
    def score(values: Mapping[str, Any]) -> float:
        if values.get("mib", 0) > 30:
            raise UsageError("too large")
        return values.get("mib", 40.0)

    found = search({"mib": Range(1, 256)}, score, Budget(trials=20))
    refused = [t for t in found if t.score is None]
    assert refused
    assert {t.why for t in refused} == {"too large"}
    assert not {found.index(t) for t in refused} & set(best_of(found, 20, {}))


def test_of_the_best_each_setting_is_there_once():
    trials = [Trial({}, 2.0), Trial({"k": 4}, 1.0), Trial({"k": 2}, 2.0), Trial({"k": 4}, 1.0)]
    assert best_of(trials, 3, {"k": 2}) == [1, 0]
    assert best_of(trials, 1, {"k": 2}) == [1, 0]
    assert best_of(trials, 3, {"k": 8}) == [1, 0, 2]


def test_near_sizes_take_no_runs_from_settings_that_differ_otherwise():
    found = search(SPACE, distance, Budget(trials=60))
    first, second = (found[n] for n in best_of(found, 2, {"mib": 256, "depth": 4}, SPACE)[:2])
    assert first == min(found[1:], key=lambda t: t.score)
    apart = abs(first.places["mib"] - second.places["mib"]) >= APART
    assert apart or first.values["depth"] != second.values["depth"]
    near = (Trial({"mib": 20 + k}, k, places={"mib": 0.5 + k / 100}) for k in range(3))
    alone = best_of([Trial({}, 9.0), *near], 3, {"mib": 1}, {"mib": SPACE["mib"]})
    assert alone == [1, 2, 3, 0]


@pytest.mark.parametrize("name", ["osf", "asc-wfbp"])
def test_the_given_setting_is_not_run_again_as_a_point_of_a_grid(name: str, tmp_path: Path):
    seen: list[Any] = []

    def measure(one: RunConfig, number: int) -> Cell:
        seen.append(SCHEDULERS.resolve(one.scheduler).options)
        return Cell(backend="gloo", workload=REPLAY, num_workers=4, config=one, step_time_s=1.0)

    tuned(config(name, tune="trials=9,confirm=9"), tmp_path / "log.csv", measure)
    (grid,) = space_of(config(name)).values()
    assert len(seen) == len(set(seen)) == len(grid.values)
    assert SCHEDULERS.resolve(name).options in seen


@pytest.mark.parametrize(("axis", "name"), WITH_KNOBS, ids=lambda e: getattr(e, "what", e))
def test_every_declared_value_is_one_that_the_part_takes(axis: Any, name: str):
    part = axis.load(name)
    base = RunConfig(**{axis.what: name})
    for knob, space in part.knobs(part.options()).items():
        for share in (0.0, 0.5, 1 - 1e-9):
            text = with_knobs(axis, base, {knob: space.at(share)})
            assert getattr(axis.resolve(text).options, knob) == space.at(share)


def test_those_whose_papers_tune_them_can_be_tuned():
    published = {"bucket", "cycle", "dear", "bytescheduler", "p3"}
    assert published | {"osf", "optimal", "pace", "asc-wfbp"} <= {n for _, n in WITH_KNOBS}
    assert set(space_of(RunConfig(backend="ddp"))) == {"bucket_mib", "bucket_view", "static_graph"}


@pytest.mark.parametrize("name", SCHEDULERS.builtin)
def test_a_scheduler_with_numbers_among_its_options_says_which_are_knobs(name: str):
    part = SCHEDULERS.load(name)
    hints = get_type_hints(part.options)
    numeric = {
        option
        for option, kind in hints.items()
        if {int, float} & {kind, *get_args(kind)} and bool not in {kind, *get_args(kind)}
    }
    undeclared = Part.__dataclass_fields__["knobs"].default
    if numeric:
        assert part.knobs is not undeclared, f"declare knobs of {sorted(numeric)}, or no_knobs"
    if part.knobs not in (undeclared, no_knobs):
        assert set(part.knobs(part.options())) <= set(hints)
        assert part.knobs(part.options())


@pytest.mark.parametrize("name", ["osf", "optimal", "pace"])
def test_those_that_plan_by_the_link_are_searched_too(name: str, tmp_path: Path):
    asked = config(name, tune="trials=5,confirm=0")
    found = tuned(asked, tmp_path / "log.csv", never)
    scores = [float(row["predicted_s"]) for row in rows(tmp_path / "log.csv") if not row["why_not"]]
    assert len(scores) > 1
    chosen = [row for row in rows(tmp_path / "log.csv") if row["chosen"] == "1"]
    assert [row["specification"] for row in chosen] == [found.scheduler]
    assert float(chosen[0]["predicted_s"]) == min(scores)


def test_a_scheduler_without_options_has_no_knobs():
    assert space_of(config("wfbp")) == {}


def test_knobs_that_are_given_stay():
    given = config("bytescheduler:credit_kib=8192", tune="trials=8,confirm=0")
    assert sorted(space_of(given)) == ["partition_kib"]


def never(one: RunConfig, number: int) -> Cell:
    raise AssertionError(f"trial {number} was run: {one}")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.mark.parametrize(
    ("scheduler", "backend"), [("bytescheduler", "gloo"), ("dear", "zmq-ps"), ("wfbp", "ddp")]
)
def test_the_model_decides_alone_without_runs_and_all_samples_are_kept(
    scheduler: str, backend: str, tmp_path: Path
):
    asked = config(scheduler, backend=backend, tune="trials=12,confirm=0")
    found = tuned(asked, tmp_path / "log.csv", never)
    log_rows = rows(tmp_path / "log.csv")
    assert tuple(log_rows[0]) == COLUMNS
    assert len(log_rows) == 12
    (chosen,) = [row for row in log_rows if row["chosen"] == "1"]
    assert float(chosen["predicted_s"]) == min(float(row["predicted_s"]) for row in log_rows)
    assert chosen["specification"] in (found.scheduler, found.backend)
    plain = config(scheduler, backend=backend)
    assert scorer(plain)(found) <= scorer(plain)(plain)
    assert (found.tune, found.tuned) == (None, "trials=12,confirm=0,steps=15,seed=1")
    assert tuned(asked, tmp_path / "log.csv", never) == found  # from the log


def test_runs_of_the_best_and_of_the_given_setting_decide(tmp_path: Path):
    seen: dict[int, RunConfig] = {}

    def measure(one: RunConfig, number: int) -> Cell:
        seen[number] = one
        if len(seen) == 1:
            return Cell(
                status="failed", error="RankLost: rank 1", step_time_s=0.1,
                backend="gloo", workload=REPLAY, num_workers=4, config=one,
            )  # fmt: skip
        time_s = 0.9 if number == 0 else 1.0
        return Cell(backend="gloo", workload=REPLAY, num_workers=4, config=one, step_time_s=time_s)

    asked = config("dear", tune="trials=10,confirm=2,steps=7", steps=90)
    found = tuned(asked, tmp_path / "log.csv", measure)
    assert len(seen) == 3
    assert 0 in seen
    assert {one.steps for one in seen.values()} == {7}
    assert not any(one.tune or one.verify_steps for one in seen.values())
    assert (found.scheduler, found.steps) == ("dear", 90)  # the given setting was the fastest
    log_rows = rows(tmp_path / "log.csv")
    confirmed = {n for n, row in enumerate(log_rows) if row["confirmed_s"]}
    assert confirmed == set(list(seen)[1:])
    assert sum(row["why_not"] == "RankLost: rank 1" for row in log_rows) == 1


def test_a_method_without_knobs_runs_as_it_is(tmp_path: Path):
    asked = config("wfbp", tune="trials=9")
    found = tuned(asked, tmp_path / "log.csv", never)
    assert (found.scheduler, found.tuned, found.tune) == ("wfbp", "", None)
    assert not (tmp_path / "log.csv").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tune": "trials=1"}, "trials of 2 or more"),
        ({"tune": "budget=3"}, "known options"),
        ({"tune": "trials=9", "compressor": "topk"}, "does not know what compressor"),
        ({"tune": "trials=9", "plan": "plan.json", "link": None}, "a finished one"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_starts(changes: dict[str, Any], why: str):
    with pytest.raises(UsageError, match=why):
        parts_of(config(**changes))


def test_an_earlier_log_is_replaced_by_another_search_and_by_nothing_else(tmp_path: Path):
    record, log = tmp_path / "cell.json", tmp_path / "cell.tuning.csv"
    log.write_text("an earlier search")
    with pytest.raises(UsageError, match="over which link"):
        tuned_run(config("dear", link=None, tune="trials=9"), "alone", record)
    tuned_run(config("wfbp", tune="trials=9"), "alone", record)  # nothing to search
    assert log.read_text() == "an earlier search"
    tuned_run(config("dear", tune="trials=3,confirm=0"), "alone", record)
    assert len(rows(log)) == 3
    assert [path.name for path in tmp_path.iterdir()] == [log.name]


def test_a_search_needs_a_link(tmp_path: Path):
    with pytest.raises(UsageError, match="over which link"):
        tuned(config(link=None, tune="trials=9"), tmp_path / "log.csv", never)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler": "dear"}, "untuned"),
        ({"scheduler": "wfbp"}, "-"),
        ({"scheduler": "dear:mib=8"}, "set by hand"),
        ({"scheduler": "dear:mib=8", "tuned": str(Budget(trials=40))}, "tuned (40 trials)"),
        ({"backend": "ddp"}, "untuned"),
        ({"backend": "ddp:static_graph=1"}, "set by hand"),
    ],
)
def test_a_row_says_who_was_tuned(changes: dict[str, Any], words: str):
    one = RunConfig(**changes)
    assert tuning_of(Cell(backend=one.backend, workload="w", num_workers=2, config=one)) == words
