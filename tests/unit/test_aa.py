"""The study `aa`: banks of runs of one cell, real and made up, and what their splits say."""

import random

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.records.cell import Cell, StepSamples
from testbed.studies import aa
from testbed.studies.aa import AA, Bank, Options, judge_bank, split_bank, to_markdown
from testbed.sweeping.study import find_study, read_cells

FEW = Options(runs=8, each=2, splits=20, steps=9, emulate=False, workload="digits-mlp", workers=2)


def bank(medians, failed=0):
    """Cells with these median steps; in every other one a step was disturbed."""
    cells = [
        Cell(
            backend="gloo",
            workload="w",
            num_workers=2,
            config=FEW.cell(),
            step_time_s=median,
            step_time_unfiltered_s=median * (1 + 0.1 * (number % 2)),
            samples=StepSamples(step_time_s=[median, 1.1 * median, median, 1.1 * median]),
        )
        for number, median in enumerate(medians)
    ]
    lost = [msgspec.structs.replace(cells[0], status="failed", step_time_s=None)] * failed
    return [*lost, *cells]


def alike(number, seed=1):
    draw = random.Random(seed)
    return [draw.lognormvariate(0.0, 0.005) for _ in range(number)]


def test_a_bank_is_judged_with_and_without_the_filter():
    found = judge_bank(FEW, bank(alike(8), failed=1))
    counted, everything = found.outcomes
    assert (found.num_runs, found.failed_runs, found.splits) == (8, 1, 20)
    assert 0 < counted.spread < 0.01 < everything.spread
    assert (counted.unstable, counted.steps, everything.steps) == (0, "counted", "all")
    assert everything.unstable > 0
    assert counted.smallest_s < 1 < counted.largest_s
    assert found.within_runs == pytest.approx([-0.75] * 8)
    text = to_markdown(found)
    assert "8 runs, 1 failed of digits-mlp" in text
    assert "20 random splits into 2 + 2 runs" in text
    assert "median -0.75, -0.75 to -0.75" in text


def test_records_without_unfiltered_times_are_judged_by_what_they_have():
    old = [msgspec.structs.replace(c, step_time_unfiltered_s=None) for c in bank(alike(8))]
    assert [outcome.steps for outcome in judge_bank(FEW, old).outcomes] == ["counted"]


def test_a_bank_of_two_kinds_has_winners():
    """Half of the runs are 2 % slower: what splits find is no chance."""
    runs = [m * (1.0 if i % 2 else 1.02) for i, m in enumerate(alike(40))]
    lots = [m * (1.0 if i < 5 else 1.1) for i, m in enumerate(alike(10))]
    assert split_bank(alike(40), 5, 100, seed=1)[0] <= 10
    assert split_bank(runs, 5, 100, seed=1)[1] == 0
    winners, unstable, resolves = split_bank(lots, 5, 100, seed=1)
    assert winners + unstable > 90
    assert len(resolves) == 100 - unstable


def test_splits_repeat_themselves_and_differ_by_seed():
    one, again, other = (split_bank(alike(40), 5, 30, seed)[2] for seed in (1, 1, 2))
    assert one == again != other


def test_too_few_finished_runs_are_told():
    with pytest.raises(UsageError, match="3 runs of 4 finished; expected 4 or more"):
        judge_bank(FEW, bank(alike(3), failed=1))


@pytest.mark.parametrize("text", ["aa:runs=3", "aa:each=1", "aa:splits=0", "aa:runs=9"])
def test_a_bank_that_cannot_be_split_is_refused(text):
    with pytest.raises(UsageError, match="twice as many in the bank"):
        find_study(text)


def test_the_default_bank_has_forty_runs_on_an_emulated_cluster():
    options = Options()
    assert (options.runs, options.each, options.splits) == (40, 5, 100)
    cell = options.cell()
    assert (cell.cluster, cell.warmup) == ("nodes=4,rate=10gbit,dilation=10", 5)
    assert find_study("aa") is AA


def test_what_is_expected_of_independent_runs_is_computed(monkeypatch):
    monkeypatch.setattr(aa, "NUM_SIMULATED", 20)
    (text,) = AA.with_options({"splits": "20"}).compute().values()
    assert text.startswith("Of banks of independent runs half have at most ")
    assert "(20 simulated banks)" in text


def test_a_bank_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(aa, "NUM_SIMULATED", 5)
    study = find_study(
        "aa:runs=4,each=2,splits=6,steps=8,emulate=0,workload=digits-mlp,backend=loopback,workers=2"
    )
    files = study.compute()
    first = study.measure(tmp_path, files)
    assert first.status == 0
    assert list(first.files) == ["aa.md", "aa.json"]
    made = msgspec.json.decode(first.files["aa.json"], type=Bank)
    assert (made.num_runs, made.splits, len(made.outcomes)) == (4, 6, 2)
    removed, *kept = sorted((tmp_path / "bank" / "cells").glob("*.json"))
    removed.unlink()
    before = {file: file.stat().st_mtime_ns for file in kept}
    assert study.measure(tmp_path, files).status == 0
    assert before == {file: file.stat().st_mtime_ns for file in kept}
    assert len(read_cells(tmp_path / "bank")) == 4
