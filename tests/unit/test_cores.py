"""What is recorded and said of the machine's cores."""

from __future__ import annotations

import time
from collections import namedtuple
from typing import Any

from testbed.base.config import RunConfig
from testbed.noise.steal_time import CoreTimes, read_cores, shares_of, sum_of
from testbed.records.cell import Cell
from testbed.reporting.cores import core_words, describe_again, describe_cores, is_core_bound


def cell(**given: Any) -> Cell:
    facts = {"backend": "gloo", "workload": "w", "num_workers": 2, "scheduler": "p3"}
    return Cell(**{**facts, "config": RunConfig(), "data": "replayed t of v100", **given})


def test_work_of_this_process_counts_as_busy() -> None:
    before, until_s = read_cores(), time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    assert read_cores().busy_s - before.busy_s >= 0.05


def test_what_counts_as_busy_idle_and_stolen() -> None:
    Core = namedtuple("Core", "user nice system idle iowait irq softirq steal guest guest_nice")
    one = Core(10.0, 1.0, 2.0, 30.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.5)
    assert sum_of([one]) == CoreTimes(busy_s=22.0, idle_s=33.0, stolen_s=6.0)
    assert sum_of([one, one]) == CoreTimes(busy_s=44.0, idle_s=66.0, stolen_s=12.0)


def test_shares() -> None:
    before = CoreTimes(busy_s=10.0, idle_s=5.0, stolen_s=1.0)
    assert shares_of(before, CoreTimes(19.0, 6.0, 1.0)) == (0.9, 0.0)
    assert shares_of(before, CoreTimes(14.0, 9.0, 3.0)) == (0.5, 0.2)
    assert shares_of(before, before) == (None, None)
    assert shares_of(before, CoreTimes(14.0, 4.0, 0.5)) == (1.0, 0.0)  # taken back by the system


def test_only_a_replayed_workload_can_be_bound_by_its_messages_work() -> None:
    assert is_core_bound(cell(cores_busy=0.95))
    assert not is_core_bound(cell(cores_busy=0.95, data="digits"))
    assert not is_core_bound(cell(cores_busy=0.5))
    assert not is_core_bound(cell())


def test_nothing_is_said_of_what_was_not_recorded() -> None:
    assert core_words(cell()) == ""
    assert describe_cores([cell()]) == []
    assert describe_cores([cell(cores_busy=0.5, cores_stolen=0.001)]) == []


def test_a_report_names_cells_that_the_cores_held_up_and_stolen_time() -> None:
    cells = [
        cell(cores_busy=0.95, cores_stolen=0.002),
        cell(cores_busy=0.6, cores_stolen=0.03, scheduler="wfbp"),
        cell(cores_busy=0.5, cores_stolen=0.02, scheduler="dear"),
    ]
    bound, stolen = describe_cores(cells)
    assert "p3 in w/gloo/2 (95 %)" in bound
    assert "wfbp" not in bound
    assert "in 2 of 3 runs, most in wfbp in w/gloo/2 (3.0 %)" in stolen


def test_stolen_time_counts_while_the_link_was_measured_too() -> None:
    during_link = cell(cores_busy=0.5, cores_stolen=0.001, link={"cores_stolen": 0.04})
    (stolen,) = describe_cores([during_link])
    assert "in 1 of 1 runs, most in p3 in w/gloo/2 (4.0 %)" in stolen
    assert "4.0 % while the link was measured, 0.1 % during the steps" in core_words(during_link)


def test_a_report_tells_each_run_that_was_repeated_and_how_many_were_not() -> None:
    cells = [cell(again="second of two runs; ..."), cell(cores_stolen=0.05), cell()]
    assert describe_again(cells) == [
        "p3 in w/gloo/2: second of two runs; ...",
        "1 more runs lost 3 % or more of what counts and were not run again",
    ]
    assert describe_again(cells[1:]) == []
