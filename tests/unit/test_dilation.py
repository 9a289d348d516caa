"""Which cells of an emulated cluster are ranked: those whose time does not depend on dilation."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.config import RunConfig
from testbed.records.cell import Cell
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.dilation import AGREE, MANY_MESSAGES, dilation_verdict
from testbed.reporting.make import make_report
from testbed.reporting.short import to_text

TIMES = st.dictionaries(st.sampled_from([5.0, 10.0, 20.0, 40.0, 80.0]), st.floats(0.01, 10))


@given(times_s=TIMES.filter(len), data=st.data())
def test_where_dilations_lie_apart_only_times_decide(times_s, data):
    at = data.draw(st.sampled_from(sorted(times_s)))
    few, many = (dilation_verdict(MANY_MESSAGES + more, times_s, at) for more in (0, 1))
    around = [(d, e) for d in times_s for e in times_s if d <= at <= e and e >= 4 * d]
    if not around:
        assert (few, many) == ("", "dilation not checked")
    else:
        agree = any(abs(times_s[e] / times_s[d] - 1) < AGREE for d, e in around)
        assert few == many == ("" if agree else "depends on dilation")


@pytest.mark.parametrize(
    ("times_s", "at", "verdict"),
    [
        ({10.0: 1.0}, 10.0, "dilation not checked"),
        ({10.0: 1.0, 20.0: 1.0, 39.0: 1.0}, 10.0, "dilation not checked"),
        ({10.0: 1.0, 40.0: 1 - AGREE / 2}, 10.0, ""),
        ({10.0: 1.0, 40.0: 1 - AGREE / 2}, 40.0, ""),
        ({10.0: 1.0, 40.0: 1 - 2 * AGREE}, 10.0, "depends on dilation"),
        ({10.0: 1.0, 40.0: 1 - 2 * AGREE}, 40.0, "depends on dilation"),
        ({10.0: 1.0, 40.0: 1 + 2 * AGREE}, 10.0, "depends on dilation"),
        # Two that agree clear what lies between them, and nothing else.
        ({10.0: 1.0, 40.0: 1.0, 80.0: 2.0}, 10.0, ""),
        ({10.0: 1.0, 40.0: 1.0, 80.0: 2.0}, 80.0, "depends on dilation"),
        ({10.0: 2.0, 20.0: 1.0, 40.0: 1.0, 80.0: 1.0}, 10.0, "depends on dilation"),
        ({10.0: 2.0, 20.0: 1.0, 40.0: 1.0, 80.0: 1.0}, 40.0, ""),
        ({1.0: 1.0}, 1.0, "dilation not checked"),
    ],
)
def test_many_messages_are_held_to_two_dilations(times_s, at, verdict):
    assert dilation_verdict(MANY_MESSAGES + 1, times_s, at) == verdict


def runs(scheduler, dilation, step_s, num_messages, steps=9, **more):
    """Three runs; step_s as emulated."""
    cluster = f"nodes=4,rate=10gbit,dilation={dilation:g}"
    config = RunConfig(scheduler=scheduler, cluster=cluster, workers=4, steps=steps)
    return [
        Cell(
            backend="gloo",
            workload="w",
            num_workers=4,
            config=msgspec.structs.replace(config, repeat=repeat),
            scheduler=scheduler,
            num_messages=num_messages,
            dilation=dilation,
            cluster={"spec": cluster},
            step_time_s=step_s * dilation * factor,
            **more,
        )
        for repeat, factor in enumerate((1.0, 1.002, 0.998))
    ]


def ranked(*cells):
    found = [
        Found("folder", f"{cell.scheduler} {cell.dilation:g}", cell)
        for runs in cells
        for cell in runs
    ]
    report = make_report(Collected(tuple(found), ()))
    return {(c.scheduler, c.dilation): (c.rank, c.rank_note) for c in report.cells}, report.notes


def test_what_depends_on_dilation_is_not_ranked_and_says_so():
    few = [runs("bucket", d, 0.16, 5) for d in (10.0, 40.0)]
    held = [runs("wfbp", d, 0.15, 161, steps=20 - d // 10) for d in (10.0, 40.0)]
    p3 = [runs("p3", d, step_s, 643) for d, step_s in ((10.0, 0.193), (40.0, 0.1445))]
    alone = [runs("pace", 10.0, 0.14, 100)]
    found, notes = ranked(*few, *held, *p3, *alone)
    assert found["bucket", 10.0] == found["bucket", 40.0] == (2, "")
    assert found["wfbp", 10.0] == found["wfbp", 40.0] == (1, "")
    assert found["p3", 10.0] == found["p3", 40.0] == (None, "depends on dilation")
    assert found["pace", 10.0] == (None, "dilation not checked")
    assert sum(note.startswith(("depends on", "dilation not")) for note in notes) == 2


def test_few_messages_that_keep_the_cores_busy_are_not_ranked_alone():
    slow, quiet = (runs("bucket", 10.0, 0.2, 5, cores_busy=busy) for busy in (0.4, 0.39))
    other = runs("mg-wfbp", 10.0, 0.21, 3, cores_busy=0.3)
    found, notes = ranked(slow, other)
    assert found["bucket", 10.0] == (None, "cores busy")
    (note,) = (note for note in notes if note.startswith("cores busy:"))
    assert "40 %" in note
    found, notes = ranked(quiet, other)
    assert found["bucket", 10.0] == (1, "")
    assert not any(note.startswith("cores busy:") for note in notes)


def test_busy_cores_are_cleared_by_the_same_time_at_another_dilation_or_found_out():
    at_40 = runs("bucket", 40.0, 0.2, 5, cores_busy=0.45)
    beside = [runs("mg-wfbp", d, 0.21, 3, cores_busy=0.45) for d in (10.0, 40.0)]
    same, _ = ranked(runs("bucket", 10.0, 0.202, 5, cores_busy=0.78), at_40, *beside)
    assert same["bucket", 10.0][1] == same["bucket", 40.0][1] == ""
    other, _ = ranked(runs("bucket", 10.0, 0.28, 5, cores_busy=0.78), at_40, *beside)
    assert other["bucket", 10.0] == (None, "depends on dilation")
    # Nobody knows what it would take at 160.
    assert other["bucket", 40.0] == (None, "depends on dilation")


def test_a_cell_is_held_to_its_own_time_and_first_to_its_own_folder():
    """An old sweep's slow time at the same dilation was taken for the new one's, or hid it."""
    sweeps = {
        "old": runs("bucket", 10.0, 0.20, 5),
        "new": runs("bucket", 10.0, 0.14, 5),
        "slow": runs("bucket", 40.0, 0.14, 5),
    }

    def notes(**sweeps):
        found = [Found(name, name, cell) for name, cells in sweeps.items() for cell in cells]
        report = make_report(Collected(tuple(found), ()))
        return {(c.source, c.dilation): c.rank_note for c in report.cells}

    for order in itertools.permutations(sweeps):
        found = notes(**{name: sweeps[name] for name in order})
        assert found["new", 10.0] == ""
        assert found["old", 10.0] == "depends on dilation"
    own = Found("new", "at 40", sweeps["slow"][0])
    cells = [Found(n, n, c) for n, of in sweeps.items() for c in of if n != "slow"] + [own]
    other = [Found("other", "o", c) for c in runs("bucket", 40.0, 0.3, 5)]
    report = make_report(Collected(tuple([*cells, *other]), ()))
    told = {(c.source, c.dilation): c.rank_note for c in report.cells}
    assert told["new", 10.0] == ""  # its own folder has it at 40
    assert told["old", 10.0] == "depends on dilation"


def test_a_cell_whose_work_differed_is_told_that_alone():
    found, notes = ranked(runs("p3", 10.0, 0.2, 643, identical_work=False))
    assert found["p3", 10.0] == (None, "")
    assert not any("dilation not" in note for note in notes)


def test_a_cell_whose_cores_were_busy_is_not_announced_as_the_fastest():
    cells = [*runs("bucket", 10.0, 0.2, 5, cores_busy=0.8)]
    cells += [*runs("mg-wfbp", 10.0, 0.21, 3, cores_busy=0.5)]
    cells += [*runs("optimal", 10.0, 0.22, 3, cores_busy=0.5)]
    found = tuple(Found("folder", f"{cell.scheduler}", cell) for cell in cells)
    report = make_report(Collected(found, ()))
    (answer,) = report.answers
    assert (answer.verdict, answer.why) == ("not proven", "cores busy")
    assert "c cores busy, not ranked" in to_text(report)
