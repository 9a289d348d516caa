"""The first lines of a report, derived from the records of the committed folders by another way."""

import functools
import itertools
import json
import math
import shutil
import statistics
from collections import defaultdict

import msgspec
import pytest
from scipy import stats

from testbed.base.config import RunConfig
from testbed.records.answer import Answer, Beside
from testbed.records.cell import Cell
from testbed.reporting.aggregate import Collected, Found, collect_cells
from testbed.reporting.answer_text import lines_of
from testbed.reporting.make import make_report
from testbed.reporting.short import to_text
from tests.harness.source_tree import ROOT

FOLDERS = sorted(path.parent for path in (ROOT / "runs").rglob("sweep.json"))
AXES = ("backend", "scheduler", "compressor", "memory", "momentum")
OLD_NAMES = {"peer": "ddp", "peer:ddp": "ddp"}  # in records of before
MANY_MESSAGES, UNSTABLE, CONFIDENCE = 32, 0.03, 0.95


def name_of(folder):
    return str(folder.relative_to(ROOT / "runs"))


def records(folder):
    cells = folder / "cells" if (folder / "cells").is_dir() else folder
    found = [json.loads(path.read_text()) for path in sorted(cells.glob("*.json"))]
    return [record for record in found if record.get("schema") == "testbed.cell/1"]


class Method:
    """The runs of one method in one setting, in the emulated cluster's seconds."""

    def __init__(self, runs):
        self.record = runs[0]
        self.config = {"compressor": "none", "memory": "none"} | runs[0]["config"]
        self.config["backend"] = OLD_NAMES.get(self.config["backend"], self.config["backend"])
        self.by_round = {r["config"]["repeat"]: r["step_time_s"] / r["dilation"] for r in runs}
        self.runs = [*self.by_round.values()]
        self.logs = [math.log(run) for run in self.runs]
        self.busy = statistics.median(r.get("cores_busy") or 0.0 for r in runs)
        self.time = math.exp(statistics.fmean(self.logs))
        self.spread = statistics.stdev(self.logs) if len(self.logs) > 1 else None
        memory = [r["memory"]["measured"] for r in runs if r.get("memory")]
        self.peak = max((sum(each.values()) for each in memory), default=None)
        backend, scheduler = self.config["backend"], self.record["scheduler"]
        plain = backend.partition("=")[0] + "=" + backend.rpartition("/")[2]
        backend = plain if "/" in backend else backend
        self.name = backend if backend.startswith("ddp") else f"{backend}/{scheduler}"

    def depends(self, others):
        """Whether its time is not known to be the cluster's."""
        own = self.record["dilation"]
        if own == 1 or self.record["cluster"] is None:
            return False
        at = {own: self.time}
        for other in others:
            if other.name == self.name and other.config["workload"] == self.config["workload"]:
                at[other.record["dilation"]] = other.time
        pairs = itertools.product((d for d in at if d <= own), (d for d in at if d >= own))
        around = [at[most] / at[least] for least, most in pairs if most >= 4 * least]
        if around:
            return all(abs(ratio - 1) >= 0.05 for ratio in around)
        messages = self.record["num_messages"]
        return messages is not None and (messages > MANY_MESSAGES or self.busy >= 0.4)


def settings(folder):
    """Setting -> its methods: what changes the work, and nothing else."""
    groups = defaultdict(lambda: defaultdict(list))
    for record in records(folder):
        if record["status"] == "ok":
            config = record["config"]
            what = record["workload"], record["num_workers"], record["batch_size"]
            axes = [config.get(name) for name in AXES]
            groups[*what, config["cluster"]][tuple(axes)].append(record)
    return {key: [Method(runs) for runs in methods.values()] for key, methods in groups.items()}


def significant(one, other, methods):
    """Tukey's test with Kramer's numbers, as a p-value: scipy's own distribution function."""
    freedom = sum(len(m.logs) - 1 for m in methods)
    pooled = sum((len(m.logs) - 1) * m.spread**2 for m in methods) / freedom
    error = math.sqrt(pooled / 2 * (1 / len(one.logs) + 1 / len(other.logs)))
    apart = abs(statistics.fmean(one.logs) - statistics.fmean(other.logs))
    p = stats.studentized_range.sf(apart / error, len(methods), freedom)
    return p < 1 - CONFIDENCE


def simultaneous(one, other, methods):
    """Gain of the second over the first with the interval of all pairs: scipy's own."""
    found = stats.tukey_hsd(*(m.logs for m in methods)).confidence_interval(CONFIDENCE)
    at = methods.index(one), methods.index(other)
    apart = statistics.fmean(one.logs) - statistics.fmean(other.logs)
    return math.expm1(apart), math.expm1(found.low[at]), math.expm1(found.high[at])


def paired(one, other, confidence=CONFIDENCE):
    """Gain of the second over the first with its interval, rounds that both have in pairs."""
    common = sorted(one.by_round.keys() & other.by_round.keys())
    logs = [math.log(one.by_round[n] / other.by_round[n]) for n in common]
    if len(logs) < 3:
        return one.time / other.time - 1, None, None
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = stats.t.interval(confidence, len(logs) - 1, statistics.fmean(logs), error)
    return math.exp(statistics.fmean(logs)) - 1, math.exp(low) - 1, math.exp(high) - 1


def expected(methods, every):
    """What the answer has to be: verdict, names, times."""
    plain = [m for m in methods if m.config["backend"] != "none" and m.config["memory"] == "none"]
    dense = [m for m in plain if m.config["compressor"] == "none"] or plain
    peaks = [m.peak for m in methods if m.peak]
    several = len({m.config["memory"] for m in methods if m.peak}) > 1
    least = min(peaks) if several else None
    if not dense:
        return {"verdict": "none", "best": set(), "least": least}
    ordered = sorted(dense, key=lambda m: m.time)
    lossy = [m for m in methods if m.config["compressor"] != "none" and m not in dense]
    lossy = sorted((m for m in lossy if m.config["backend"] != "none"), key=lambda m: m.time)
    best = ordered[0]
    steady = [m for m in dense if not m.depends(every) and m.spread is not None]
    steady = [m for m in steady if m.spread < UNSTABLE]
    ranked = best in steady and len(steady) > 1
    tied = [m for m in steady if m is not best and not significant(best, m, steady)]
    tied = tied if ranked else []
    others = [m for m in ordered[1:] if m not in tied]
    if ranked:
        others = [m for m in others if not m.depends(every)]

    def beside(method):
        if ranked and method in steady:
            return simultaneous(method, best, steady)
        return paired(method, best, 1 - 0.05 / (len(dense) - 1))

    usual = [m for m in ordered if m.config["backend"].startswith("ddp")]
    usual = [m for m in usual if m.config["backend"] == "ddp"] or usual
    bounds = [m.time for m in methods if m.config["backend"] == "none"]
    if ranked:
        verdict = "tied" if tied else "fastest"
    else:
        verdict = "only one" if len(dense) == 1 else "not proven"
    return {
        "verdict": verdict,
        "best": {m.name + lossy_part(m.config) for m in [best, *tied]},
        "time": best.time,
        "next": beside(others[0]) if others else None,
        "usual": beside(usual[0]) if usual and usual[0] is not best else None,
        "bound": bounds[0] if bounds else None,
        "least": least,
        # The fastest of several: as much wider as Bonferroni asks for.
        "lossy": paired(lossy[0], best, 1 - 0.05 / len(lossy)) if lossy else None,
        "ends": (min(best.runs), max(best.runs)) if len(best.runs) == 2 else None,
    }


@functools.cache
def report_of(folder):
    return make_report(collect_cells([folder]))


def answers(folder):
    return report_of(folder).answers


def same(beside, gain):
    if gain is None:
        return beside is None
    found = (beside.gain, beside.low, beside.high)
    return all(
        (a is None and b is None) or a == pytest.approx(b, rel=1e-6, abs=1e-9)
        for a, b in zip(found, gain, strict=True)
    )


def full_name(told):
    """With the scheduler that is left out where it is `wfbp`."""
    name, *lossy = told.partition(" with ")
    is_full = "/" in name or name.startswith("ddp")
    return "".join([name if is_full else f"{name}/wfbp", *lossy])


def lossy_part(config):
    return "" if config["compressor"] == "none" else f" with {config['compressor']}"


def held_against_the_records(folder):
    found = settings(folder)
    every = [*itertools.chain.from_iterable(found.values())]
    wanted = {key: expected(methods, every) for key, methods in found.items()}
    made = answers(folder)
    assert len(made) == len(wanted)
    report = report_of(folder)
    for answer in made:
        cell = report.cells[answer.places[0]] if answer.places else report.cells[0]
        key = (cell.workload, cell.num_workers, cell.batch_size, cell.config.cluster)
        want = wanted[key]
        assert answer.verdict == want["verdict"], key
        assert {full_name(n) for n in answer.best} == want["best"], key
        assert (answer.memory and answer.memory.peak_bytes) == want["least"]
        if answer.best:
            assert same(answer.compressed, want["lossy"]), key
            assert answer.step_time_s == pytest.approx(want["time"])
            assert same(answer.next, want["next"]), key
            assert same(answer.usual, want["usual"]), key
            assert (answer.bound_s is None) == (want["bound"] is None)
            assert answer.bound_s in (None, pytest.approx(want["bound"]))
            if want["ends"]:
                assert (answer.low_s, answer.high_s) == pytest.approx(want["ends"])
    return made


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_answers_are_those_of_the_records(folder):
    assert held_against_the_records(folder)


def subset(tmp_path, folder, keep):
    """A folder of the cells of another that are kept."""
    for path in (folder / "cells").glob("*.json"):
        if keep(json.loads(path.read_text())):
            shutil.copy(path, tmp_path)
    return tmp_path


def test_frameworks_alone_are_tied(tmp_path):
    """Six runs each of DDP as it comes and with other buckets: no difference."""
    folder = ROOT / "runs" / "tables" / "ddp-pairs-dilated"
    cells = subset(
        tmp_path,
        folder,
        lambda r: r["config"]["backend"].startswith("ddp") and "101" in r["workload"],
    )
    (answer,) = held_against_the_records(cells)
    assert answer.verdict == "tied"
    assert len(answer.best) == 2
    assert answer.lines[0].startswith("Tied: ddp, ddp:bucket_mib=8, ")
    assert answer.next is None


def test_two_plans_on_a_link_are_tied_and_a_third_is_the_next(tmp_path):
    """At a dilation at which they leave the cores idle for most of the time."""
    folder = ROOT / "runs" / "tables" / "emulated-dilated"
    schedulers = ("bucket", "optimal")
    cells = subset(
        tmp_path,
        folder,
        lambda r: r["backend"] in ("mpi-ring", "none", "ddp")
        and r["scheduler"] in (*schedulers, "wfbp", "ddp", "torch's buckets"),
    )  # fmt: skip
    (answer,) = held_against_the_records(cells)
    assert answer.verdict == "tied"
    assert [name.partition("/")[2] for name in answer.best] == list(schedulers)
    assert answer.usual == answer.next


FIRST = {
    "fastest": "Fastest: {}, ",
    "tied": "Tied: {}, ",
    "not proven": "Fastest seen, not proven: {}, ",
    "only one": "Only one",
    "none": "No ",
}


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_lines_say_what_the_values_say(folder):
    text = to_text(report_of(folder))
    for answer in answers(folder):
        assert 1 <= len(answer.lines) <= 3
        assert all(len(line) <= 100 for line in answer.lines)
        assert "\n".join(answer.lines) in text
        best = answer.best[0] if answer.best else ""
        assert answer.lines[0].startswith(FIRST[answer.verdict].format(best))
        told = " ".join(answer.lines)
        if answer.next is not None:
            assert f"{three(100 * answer.next.gain)} %" in told
        if answer.usual is not None:
            assert f"{three(100 * answer.usual.gain)} %" in told
            name = answer.usual.name
            assert (name if len(name) <= 44 else f"{name[:43]}…") in told
        if answer.bound_s is not None:
            assert f"{three(1e3 * answer.bound_s)} ms" in told


def three(figure):
    """Three significant digits, whole numbers as they are."""
    if figure >= 100:
        return f"{figure:.0f}"
    return f"{figure:#.3g}".rstrip(".")


def test_the_first_lines_stand_at_the_top_where_there_is_one_setting():
    folder = ROOT / "runs" / "schedulers"
    lines = to_text(report_of(folder)).splitlines()
    assert lines[1 : 1 + len(answers(folder)[0].lines)] == answers(folder)[0].lines


@pytest.mark.parametrize(
    ("gain", "verdict", "told"),
    [
        (0.12, "fastest", "12.0 %, not proven, faster than ddp"),
        (-0.004, "fastest", "0.400 %, not proven, slower than ddp"),
        (0.12, "not proven", "12.0 % faster than ddp"),
    ],
)
def test_what_the_runs_cannot_tell_is_no_fact(gain, verdict, told):
    usual = Beside(name="ddp", place=1, step_time_s=0.1, gain=gain)
    answer = Answer(setting="", verdict=verdict, best=("gloo/dear",), step_time_s=0.1, usual=usual)
    assert told in " ".join(lines_of(answer)).lower()


def test_that_the_verdict_may_not_hold_is_never_left_out():
    """Long names leave no room for which method may be faster, nor may the bound make room."""
    name = "zmq-ps:servers=dedicated:4/bytescheduler:mib=64"
    answer = Answer(
        setting="",
        verdict="fastest",
        best=[name],
        step_time_s=0.1234,
        low_s=0.1200,
        high_s=0.1267,
        num_runs=5,
        next=Beside(
            name=f"{name},a=1", place=1, step_time_s=0.15, gain=0.22, low=0.20, high=0.24,
            differs=True,
        ),
        usual=Beside(
            name="ddp:bucket_view=1,static_graph=1,bucket_mib=25", place=2, step_time_s=0.3,
            gain=1.43, low=1.39, high=1.47, differs=True,
        ),
        bound_s=0.1,
        unranked=[f"{name},b=2 (120 ms, unstable)", f"{name},c=3 (121 ms, one run)"],
    )  # fmt: skip
    text = " ".join(lines_of(answer)).lower()
    assert "2 not ranked may be faster" in text
    known = ["gloo/pace (120 ms, unstable)"]
    few = msgspec.structs.replace(answer, usual=None, bound_s=None, unranked=known)
    text = " ".join(lines_of(few)).lower()
    assert "may be faster, not ranked: gloo/pace (120 ms, unstable)" in text
    assert "1 not ranked" not in text


def ran(backend, *steps_s, **changes):
    """The runs of one cell."""
    setting = {"workload": "w", **changes.pop("setting", {})}
    values = {"batch_size": 8, "identical_work": True, "initial_digest": "a", "sample_digest": "b"}
    return [
        Cell(
            backend=backend,
            num_workers=2,
            step_time_s=step_s,
            config=RunConfig(backend=backend, workers=2, repeat=number, **setting),
            **{**values, **setting, **changes},
        )
        for number, step_s in enumerate(steps_s)
    ]


def reported(*runs):
    found = [Found("here", repr((r.backend, r.workload)), r) for each in runs for r in each]
    return make_report(Collected(tuple(found), ()))


ALIKE = (0.1, 0.1003, 0.0998, 0.1001, 0.0999)


def test_a_gain_over_one_run_is_not_proven_beside_methods_that_are_tied():
    other = [{"workload": name} for name in "wx"]
    runs = [ran(b, *ALIKE, setting=o) for o in other for b in ("gloo", "loopback")]
    runs += [ran("mpi", 0.105, setting=o) for o in other]
    report = reported(*runs)
    assert {answer.verdict for answer in report.answers} == {"tied"}
    assert all(" %, not proven, faster than the next, mpi" in a.lines[-1] for a in report.answers)
    text = to_text(report)
    assert "4.98 ?" in text
    assert "(ns: not significantly, ?: not proven)" in text


@pytest.mark.parametrize("why", ["failed", "other"])
def test_a_method_whose_rivals_failed_or_did_other_work_was_not_the_only_one(why):
    rival = ran("mpi", *ALIKE, initial_digest="z")
    if why == "failed":
        rival = [msgspec.structs.replace(r, status="failed", step_time_s=None) for r in rival]
    told = reported(ran("gloo", *ALIKE), rival).answers
    lines = [line for answer in told for line in answer.lines]
    assert any("Only one method did work to compare: " in line for line in lines), lines
    alone = reported(ran("gloo", *ALIKE)).answers[0].lines
    assert alone[0].startswith("Only one method was run: gloo")


@pytest.mark.parametrize(
    ("bound_s", "told"),
    [
        (0.09, "11.1 % above the bound of 90.0 ms"),
        (0.1002, "not told apart from the bound of 100 ms (no communication)"),
        (0.15, "below the bound of 150 ms (no communication): something slowed one of them"),
    ],
)
def test_below_the_bound_is_said_where_the_interval_is(bound_s, told):
    none = ran("none", *(bound_s + step_s - 0.1 for step_s in ALIKE), consistency="none")
    (answer,) = reported(ran("gloo", *ALIKE), ran("mpi", *(2 * s for s in ALIKE)), none).answers
    assert told.lower() in " ".join(answer.lines).lower()


def test_what_depends_on_its_dilation_is_beside_the_fastest_but_not_proven():
    def emulated(name, factor, num_messages):
        setting = {"cluster": "nodes=2,rate=10gbit,dilation=10"}
        runs = ran(
            name, *(10 * factor * s for s in ALIKE), num_messages=num_messages, dilation=10.0
        )
        replace = msgspec.structs.replace
        return [replace(r, cluster={}, config=replace(r.config, **setting)) for r in runs]

    runs = [emulated("gloo", 1.0, 4), emulated("mpi", 1.1, 4), emulated("ddp", 1.3, 200)]
    (answer,) = reported(*runs).answers
    assert answer.usual is not None
    assert (answer.usual.name, answer.usual.differs) == ("ddp (dilation not checked)", None)
    assert "not proven, faster than ddp (dilation not checked)" in " ".join(answer.lines)


def test_two_files_of_one_name_are_told_apart_by_their_paths():
    names = [f"replay:trace=runs/{folder}/t.json" for folder in "ab"]
    runs = [ran(b, *ALIKE, setting={"workload": n}) for n in names for b in ("gloo", "mpi")]
    settings = [answer.setting for answer in reported(*runs).answers]
    assert len(set(settings)) == 2
    assert all(f"workload={name}" in setting for name, setting in zip(names, settings, strict=True))


def test_a_record_without_a_step_time_is_not_one_without_an_exchange():
    (cell,) = ran("gloo", 0.1)
    (answer,) = reported([msgspec.structs.replace(cell, step_time_s=None)]).answers
    assert answer.lines == ["No step time is recorded, so that no method is the fastest."]
