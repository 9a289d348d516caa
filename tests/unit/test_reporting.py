"""Reports: what they say of known cells, in every format.

`python tests/unit/test_reporting.py --rewrite` writes the golden files anew.
"""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.units import rounded
from testbed.records.cell import Cell, StepSamples, encode_cell
from testbed.records.report import BULK, Report, ReportCell, encode_report
from testbed.reporting.aggregate import Collected, Found, collect_cells
from testbed.reporting.columns import columns_for
from testbed.reporting.formats import FORMATS, to_csv, to_latex, to_markdown
from testbed.reporting.make import make_report
from testbed.reporting.short import SHORT, to_text
from testbed.reporting.terminal import print_report
from testbed.reporting.work import same_work
from testbed.statistics.summary import quantile
from testbed.sweeping.executor import failed_cell
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, make_plan

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKED = "20 steps equal one process on the same batches, bit for bit"
ENVIRONMENT = {
    "commit": "0123abcd",
    "versions": {"python": "3.11", "torch": "2.13"},
    "cpu": "Example CPU",
    "launcher": "mpirun 5.0",
}


def cell(backend, step_ms, repeat=0, **changes):
    """A finished cell whose steps take `step_ms`, give or take a little."""
    times = [1e-3 * (step_ms + 0.1 * ((7 * i + 3 * repeat) % 11 - 5)) for i in range(40)]
    config = {
        "backend": backend,
        "batch_size": 64,
        "steps": 40,
        "target_accuracy": (0.95, 0.97),
        **changes.pop("config", {}),
    }
    median = quantile(times, 0.5)
    values = {
        "workload": "digits-cnn",
        "data": "scikit-learn digits",
        "num_workers": 2,
        "num_processes": 2,
        "steps": 40,
        "batch_size": 64,
        "step_time_s": median,
        "samples_per_s": 128 / median,
        "wire_bytes_per_step": 1_234_567.0,
        "peak_memory_bytes": 345_678_901,
        "test_accuracy": 0.975,
        "time_to_accuracy_s": {"0.95": 0.01 * step_ms, "0.97": 0.02 * step_ms},
        "identical_work": True,
        "identical_work_note": CHECKED,
        "sample_digest": "5a5a5a5a5a",
        "initial_digest": "1d1d1d1d1d",
        "samples": StepSamples(
            step_time_s=times, compute_s=[0.02] * 40, exposed_comm_s=[0.001] * 40
        ),
        "environment": ENVIRONMENT,
        "command": f"testbed run --backend {backend}",
        **changes,
    }
    return Cell(backend=backend, config=RunConfig(repeat=repeat, **config), **values)


def known_cells():
    """One cell of each kind that a table has to show."""
    free = {"identical_work": None, "identical_work_note": "", "wire_bytes_per_step": 0.0}
    bound = [cell("none", 21, r, test_accuracy=0.91, **free) for r in (0, 1)]
    bound = [
        msgspec.structs.replace(c, time_to_accuracy_s={"0.95": None, "0.97": None}) for c in bound
    ]
    server = "zmq-ps:servers=dedicated:1"
    asynchronous = "zmq-ps:update=server,consistency=async"
    return [
        cell("gloo", 30),
        cell("gloo", 31, 1),
        *bound,
        cell(server, 42.5, num_servers=1, num_processes=3),
        failed_cell(RunConfig(backend="mpi", steps=40), "exit status 1\nRankLost: x"),
        cell("mpi-ring", 25, sample_digest="0b0b0b0b0b"),
        cell(
            asynchronous,
            28,
            identical_work=False,
            identical_work_note="asynchronous: workers see parameters of different age",
            time_to_accuracy_s={"0.95": 1.5, "0.97": None},
        ),
        cell("gloo", 300, workload="resnet20", data="synthetic CIFAR-10 shapes", num_workers=4,
             num_processes=4, config={"workload": "resnet20", "workers": 4},
             test_accuracy=None, time_to_accuracy_s={}),
    ]  # fmt: skip


def report_of(cells):
    def group(c):
        settings = (c.config.seed, c.config.batch_size, c.config.memory, c.config.scheduler)
        return repr((c.backend, c.workload, *settings))

    return make_report(Collected(tuple(Found("folder", group(c), c) for c in cells), ()))


def row(report, backend, workload="digits-cnn"):
    (found,) = [c for c in report.cells if (c.backend, c.workload) == (backend, workload)]
    return found


def table(report):
    out = io.StringIO()
    print_report(report, out)
    return out.getvalue()


def ranked_cells():
    """Four methods of one backend with five runs each: one fastest, two alike, one unstable."""
    times = {"mg-wfbp": 25.0, "wfbp": 30.0, "bucket": 30.2, "p3": 33.0}
    usual = {name: (1.0, 0.995, 1.006, 1.002, 0.991) for name in times}
    factors = {**usual, "bucket": (0.992, 1.004, 1.0, 1.008, 0.996), "p3": (1, 0.9, 1.1, 1.3, 0.8)}
    return [
        cell("gloo", ms * factors[name][r], r, scheduler=name, config={"scheduler": name})
        for name, ms in times.items() for r in range(5)
    ]  # fmt: skip


def framework_cells():
    """A framework over Gloo, as it comes and tuned, methods over Gloo, and one over MPI; 5 rounds.

    Rounds differ by a fifth, methods within a round hardly.
    """
    tuned = {"scheduler": "dear:mib=9.5", "tuned": "trials=30,confirm=3,steps=15,seed=1"}
    times = {
        ("ddp", "ddp", ""): 40.0,
        ("ddp:static_graph=1", "ddp", ""): 38.0,
        ("gloo", "wfbp", ""): 36.0,
        ("gloo", "dear:mib=9.5", tuned["tuned"]): 30.0,
        ("gloo", "bytescheduler", ""): 44.0,
        ("mpi-ring", "wfbp", ""): 20.0,
        ("mpi-ring", "bucket", ""): 22.0,
    }
    tcp = {"spec": "nodes=2", "tcp": {"ipv4/tcp_wmem": ["4096 65536 125000"]}}
    variables = {"OMPI_MCA_btl_tcp_eager_limit": "1048576", "OMP_NUM_THREADS": "1"}
    sets = {"ddp": "buckets of 25 MiB, the first of 1 MiB", "mpi-ring": "segments of 512 KiB"}
    return [
        cell(backend, ms * (1 + 0.05 * r) * (1 + 0.001 * ((r * n) % 3)), r, scheduler=scheduler,
             config={"scheduler": "wfbp" if scheduler == "ddp" else scheduler, "tuned": mark},
             cluster=tcp,
             environment={**ENVIRONMENT, "variables": variables, "sets": sets.get(backend)})
        for n, ((backend, scheduler, mark), ms) in enumerate(times.items()) for r in range(5)
    ]  # fmt: skip


def golden_texts():
    report, ranked = report_of(known_cells()), report_of(ranked_cells())
    ratios = report_of(framework_cells())
    texts = {f"report.{name}": write(report) for name, write in FORMATS.items()}
    own = {"report_ranked.md": to_markdown(ranked), "report_ranked.txt": table(ranked)}
    own |= {f"report_ratios.{name}": FORMATS[name](ratios) for name in ("md", "csv", "json")}
    own["report_ratios.txt"] = table(ratios)
    for name, write in SHORT.items():
        ending = "txt" if name == "table" else name
        own[f"report_short.{ending}"] = write(report)
        own[f"report_ratios_short.{ending}"] = write(ratios)
    own["report_ranked_short.txt"] = to_text(ranked)
    return {**texts, "report.txt": table(report), **own}


@pytest.mark.parametrize("name", sorted(golden_texts()))
def test_golden(name):
    assert golden_texts()[name] == (GOLDEN / name).read_text(), "see the top of this file"


def test_table_fits_120_columns():
    lines = table(report_of(known_cells())).splitlines()
    assert max(map(len, lines)) <= 120
    assert not any("…" in line for line in lines)


def test_repeats_are_put_together_by_their_medians():
    cells = [cell("gloo", 30), cell("gloo", 31, 1)]
    made = row(report_of(cells), "gloo")
    pooled = [t for c in cells for t in c.samples.step_time_s]
    assert (made.repeats, made.counted_steps) == (2, 80)
    assert made.run_medians_s == [c.step_time_s for c in cells]
    assert made.step_time_s == pytest.approx((cells[0].step_time_s * cells[1].step_time_s) ** 0.5)
    assert made.step_time_p95_s == quantile(pooled, 0.95)
    assert (made.step_time_smallest_s, made.step_time_largest_s) == tuple(made.run_medians_s)
    assert made.step_time_low_s < made.step_time_smallest_s
    assert made.step_time_largest_s < made.step_time_high_s
    assert made.samples_per_s == pytest.approx(128 / made.step_time_s)
    assert made.config.repeat == 0


def test_one_run_has_no_interval_whatever_an_old_record_holds():
    old = cell("gloo", 30, step_time_low_s=0.0299, step_time_high_s=0.0301)
    for made in report_of([old]).cells, report_of([without_steps(old)]).cells:
        assert made[0].step_time_low_s is made[0].step_time_high_s is None
        assert made[0].step_time_s == old.step_time_s
        assert (made[0].rank, made[0].rank_note) == (None, "")


def without_steps(one):
    return msgspec.structs.replace(one, samples=StepSamples())


def test_runs_without_steps_enter_with_their_medians():
    cells = [without_steps(cell("gloo", ms, r)) for r, ms in enumerate((30, 31, 32))]
    (made,) = report_of(cells).cells
    assert (made.repeats, made.counted_steps) == (3, 0)
    assert made.step_time_low_s < 0.031 < made.step_time_high_s


def test_methods_of_a_backend_are_ranked_tied_or_unstable():
    report = report_of(ranked_cells())
    found = {c.scheduler: (c.rank, c.rank_note) for c in report.cells}
    assert found == {
        "mg-wfbp": (1, ""),
        "wfbp": (2, "tied"),
        "bucket": (2, "tied"),
        "p3": (None, "unstable"),
    }
    (family,) = report.families
    assert (family.num_ranked, family.num_unstable, family.num_runs) == (3, 1, 5)
    assert 0 < family.resolves < 0.02
    assert {c.family for c in report.cells} == {family.number}


def families_of(*cells):
    return [{c.backend for c in cells_of} for cells_of in by_family(report_of(cells)).values()]


def by_family(report):
    members = {}
    for one in report.cells:
        if one.family is not None:
            members.setdefault(one.family, []).append(one)
    return members


def runs(backend, step_ms, **changes):
    return [cell(backend, step_ms, repeat, **changes) for repeat in range(2)]


def test_a_family_is_one_backend_or_one_method_on_each():
    mine = {"scheduler": "p3", "config": {"scheduler": "p3"}}
    several = [*runs("gloo", 30), *runs("gloo", 40, **mine), *runs("mpi", 35), *runs("none", 20)]
    assert families_of(*several) == [{"gloo"}]
    assert families_of(*runs("gloo", 30), *runs("mpi", 35), *runs("none", 20)) == [{"gloo", "mpi"}]
    alone = [*runs("gloo", 30), *runs("mpi", 35, config={"batch_size": 8}, batch_size=8)]
    assert families_of(*alone) == []
    ddp = [*runs("ddp", 36, scheduler="ddp"), *runs("ddp:static_graph=1", 37, scheduler="ddp")]
    assert families_of(*several, *ddp) == [{"gloo"}, {"ddp", "ddp:static_graph=1"}]
    assert families_of(*runs("gloo", 30), *ddp) == [{"gloo", "ddp", "ddp:static_graph=1"}]


def test_a_method_is_compared_with_the_fastest_framework_of_its_transport_by_pairs():
    report = report_of(framework_cells())
    of = {(c.backend, c.scheduler): c for c in report.cells}
    own = of["gloo", "dear:mib=9.5"]
    assert (own.transport, own.ratio_to) == ("Gloo", "ddp:static_graph=1")
    assert own.ratio == pytest.approx(30 / 38, rel=0.01)
    assert own.ratio_high - own.ratio_low < 0.01  # rounds differ by far more
    assert of["mpi-ring", "wfbp"].ratio is None
    assert (of["ddp:static_graph=1", "ddp"].ratio, of["ddp", "ddp"].ratio > 1) == (None, True)


def test_ratios_on_the_same_transport_come_first_then_the_fastest_of_others():
    report = report_of(framework_cells())
    lines = [(n.framework, n.method, n.same_transport) for n in report.ratios]
    stock = [(method, same) for framework, method, same in lines if framework == "ddp"]
    assert stock == [
        ("gloo/dear:mib=9.5", True),
        ("gloo/wfbp", True),
        ("ddp:static_graph=1", True),
        ("gloo/bytescheduler", True),
        ("mpi-ring/wfbp", False),
    ]
    assert {n.num_pairs for n in report.ratios} == {5}
    told = [note for note in report.notes if "times the step of ddp over Gloo" in note]
    assert ["the same transport" in note for note in told] == [True, False]


def test_transports_tell_what_they_were_given():
    told = [n for n in report_of(framework_cells()).notes if n.startswith("transport ")]
    gloo, mpi = sorted(told)
    assert "tcp_wmem 4096 65536 125000" in gloo
    assert "buckets of 25 MiB, the first of 1 MiB" in gloo
    assert "eager" not in gloo
    assert "OMPI_MCA_btl_tcp_eager_limit=1048576" in mpi
    assert "segments of 512 KiB" in mpi


def test_what_a_backend_sets_today_is_not_told_of_runs_that_do_not_say():
    cells = [msgspec.structs.replace(c, environment=ENVIRONMENT) for c in framework_cells()]
    told = [n for n in report_of(cells).notes if n.startswith("transport ")]
    assert told
    assert not any("buckets of" in note or "segments of" in note for note in told)


def test_without_known_rounds_runs_are_not_paired():
    cells = [msgspec.structs.replace(c, config=msgspec.structs.replace(c.config, repeat=0))
             for c in framework_cells()]  # fmt: skip
    report = report_of(cells)
    assert {n.num_pairs for n in report.ratios} == {0}
    own = next(c for c in report.cells if c.scheduler == "dear:mib=9.5")
    assert own.ratio_high - own.ratio_low > 0.1


def test_compressed_cells_and_given_plans_are_no_frameworks_to_compare_with():
    cells = [
        *runs("gloo", 30),
        *runs("ddp:hook=fp16", 20, scheduler="ddp"),
        *runs("ddp:plan=x.json", 25, scheduler="ddp"),
    ]
    assert report_of(cells).ratios == []


def test_other_work_is_not_ranked():
    other = runs("mpi", 25, identical_work=False)
    assert families_of(*runs("gloo", 30), *runs("zmq-ps", 31), *other) == [{"gloo", "zmq-ps"}]


def test_efficiency_is_against_no_communication_of_the_same_work():
    report = report_of(known_cells())
    bound = row(report, "none")
    assert bound.efficiency == 1.0
    assert row(report, "gloo").efficiency == bound.step_time_s / row(report, "gloo").step_time_s
    assert row(report, "gloo", "resnet20").efficiency is None


def test_efficiency_never_mixes_ways_to_share_cores():
    pinned, shared = ({"spec": "nodes=2", "cores": how} for how in ("pinned", "shared"))
    bound, other = cell("none", 20, cluster=pinned), cell("gloo", 40, cluster=shared)
    assert row(report_of([bound, other]), "gloo").efficiency is None
    same = cell("gloo", 40, cluster=pinned)
    assert row(report_of([bound, same]), "gloo").efficiency == pytest.approx(0.5)


def test_efficiency_never_mixes_batch_sizes():
    other = cell("gloo", 30, batch_size=32, config={"batch_size": 32})
    assert row(report_of([cell("none", 20), other]), "gloo").efficiency is None


def test_efficiency_never_mixes_memory_strategies():
    cells = [cell(name, 20 if name == "none" else 40) for name in ("none", "gloo")]
    slow = [cell(c.backend, 100, config={"memory": "slow"}) for c in cells]
    judged = report_of([*slow, *cells]).cells
    shares = {(c.backend, c.config.memory): c.efficiency for c in judged}
    assert shares["none", "slow"] == shares["none", "none"] == 1.0
    assert shares["gloo", "none"] == pytest.approx(0.5, rel=0.02)
    assert shares["gloo", "slow"] == pytest.approx(1.0, rel=0.02)
    assert row(report_of([cells[0], slow[1]]), "gloo").efficiency is None
    assert row(report_of([cells[1], slow[0]]), "gloo").comparable


def test_a_default_and_the_same_value_given_are_the_same_work():
    given = cell("none", 20, config={"batch_size": None, "steps": None, "epochs": 2})
    report = report_of([given, cell("gloo", 40)])
    assert row(report, "gloo").efficiency == pytest.approx(0.5)
    assert "1 other cell" in row(report, "gloo").comparable_note


def test_a_cell_above_the_upper_bound_is_doubted():
    report = report_of([cell("none", 30), cell("gloo", 20), cell("mpi", 30.5)])
    doubts = [note for note in report.notes if "measure both again" in note]
    assert len(doubts) == 1
    assert doubts[0].startswith("digits-cnn/gloo/2: ")


def test_rows_are_sorted_upper_bound_first_failed_last():
    names = [c.backend for c in report_of(known_cells()).cells if c.workload == "digits-cnn"]
    assert names == [
        "none",
        "mpi-ring",
        "zmq-ps:update=server,consistency=async",
        "gloo",
        "zmq-ps:servers=dedicated:1",
        "mpi",
    ]


@pytest.mark.parametrize("name", ["sample_digest", "initial_digest"])
def test_other_samples_or_another_start_are_not_comparable(name):
    report = report_of([cell("gloo", 30), cell("mpi", 31), cell("zmq-ps", 32, **{name: "other"})])
    odd = row(report, "zmq-ps")
    assert odd.comparable is False
    assert "other, not" in odd.comparable_note
    assert same_work(odd) == ("no", odd.comparable_note)
    assert row(report, "gloo").comparable is True
    assert any(note.startswith("digits-cnn/zmq-ps/2: not comparable:") for note in report.notes)


def test_repeats_that_differ_in_their_samples_are_not_comparable():
    cells = [cell("gloo", 30), cell("gloo", 30, 1, sample_digest="x"), cell("mpi", 30)]
    made = row(report_of(cells), "gloo")
    assert made.comparable is None
    assert made.sample_digest == ""


def test_other_seeds_are_other_work():
    other = cell("mpi", 30, sample_digest="x", config={"seed": 2})
    report = report_of([cell("gloo", 30), other])
    assert [c.comparable for c in report.cells] == [True, True]
    assert "seed=2" in to_csv(report)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([True, True], "yes"),
        ([True, None], "not checked"),
        ([True, False, None], "no"),
    ],
)
def test_same_work_is_as_sure_as_the_least_sure_repeat(verdicts, expected):
    cells = [cell("gloo", 30, r, identical_work=v) for r, v in enumerate(verdicts)]
    assert same_work(row(report_of(cells), "gloo"))[0] == expected


def test_failed_repeats_are_counted_and_told():
    broken = failed_cell(cell("gloo", 30, 1).config, "exit status 1\nDeadlineExceeded: y")
    report = report_of([cell("gloo", 30), broken])
    made = row(report, "gloo")
    assert (made.status, made.repeats, made.failed_repeats) == ("ok", 1, 1)
    assert any("1 of 2 repeats failed: exit status 1: Deadline" in n for n in report.notes)


def test_a_target_that_most_repeats_missed_was_never_reached():
    times = [{"0.9": 1.0}, {"0.9": None}, {"0.9": None}]
    cells = [cell("gloo", 30, r, time_to_accuracy_s=t) for r, t in enumerate(times)]
    assert row(report_of(cells), "gloo").time_to_accuracy_s == {"0.9": None}
    assert row(report_of(cells[:1]), "gloo").time_to_accuracy_s == {"0.9": 1.0}


def test_a_column_tells_the_time_to_a_loss():
    cells = [cell("gloo", 30, time_to_loss_s={"2.5": 1.5, "2": None})]
    columns = {c.title: c for c in columns_for(report_of(cells).cells)}
    made = row(report_of(cells), "gloo")
    assert columns["s to\nloss 2.5"].text(made) == "1.50"
    assert columns["s to\nloss 2"].text(made) == "never"


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.floats(1e-9, 1e6), st.text("a|,\"'\n&_;é", max_size=9)
        ),
        max_size=6,
    )
)
def test_json_and_csv_keep_every_figure(rows):
    cells = [
        ReportCell(
            backend=name,
            workload="w",
            num_workers=2,
            step_time_s=time_s,
            identical_work=False,
            identical_work_note=text,
            config=RunConfig(backend=name),
        )
        for name, time_s, text in rows
    ]
    report = Report(cells=cells)
    assert msgspec.json.decode(encode_report(report), type=Report) == report
    read = list(csv.DictReader(io.StringIO(to_csv(report), newline="")))
    assert [(r["backend"], float(r["step_time_s"])) for r in read] == [
        (name, time_s) for name, time_s, _ in rows
    ]
    assert [r["same_work_note"] for r in read] == [text for _, _, text in rows]


def test_json_leaves_the_bulk_out_unless_asked():
    report = report_of(known_cells())
    short = json.loads(encode_report(report))
    full = json.loads(encode_report(report, full=True))
    assert short["schema"] == "testbed.report/1"
    assert all(key not in short["cells"][0] for key in BULK)
    assert full["cells"][0]["samples"]["step_time_s"]
    assert set(full["cells"][0]) - set(short["cells"][0]) == set(BULK)
    assert msgspec.json.decode(encode_report(report, full=True), type=Report) == report


def test_formats_hold_the_same_rows():
    report = report_of(known_cells())
    number = len(report.cells)
    assert len(list(csv.reader(io.StringIO(to_csv(report))))) == number + 1
    assert sum(line.startswith("|") for line in to_markdown(report).splitlines()) == number + 2
    assert sum(line.endswith(r"\\") for line in to_latex(report).splitlines()) == number + 1


@pytest.mark.parametrize(
    ("figure", "text"),
    [(0.0, "0"), (0.00012345, "0.000123"), (0.5, "0.500"), (9.876, "9.88"), (1e6, "1000000")],
)
def test_rounded(figure, text):
    assert rounded(figure) == text


@pytest.fixture
def folder(tmp_path):
    """A sweep's folder with two of its four runs."""
    configs = (RunConfig(backend="gloo"), RunConfig(backend="mpi"))
    store = begin(make_plan(Sweep("tiny", configs, repeats=2)), tmp_path / "tiny")
    for key, config in store.read_plan().runs():
        if config.backend == "gloo":
            store.write_cell(key, cell("gloo", 30, config.repeat))
    return store.path


def test_folder_is_read_and_what_is_missing_is_told(folder):
    report = make_report(collect_cells([folder]))
    assert row(report, "gloo").repeats == 2
    assert any("2 of 4 runs" in note and "--resume" in note for note in report.notes)


def test_a_failed_repeat_joins_its_cell_although_it_knows_less(folder):
    victim = sorted((folder / "cells").glob("*.json"))[0]
    victim.write_bytes(encode_cell(failed_cell(RunConfig(backend="gloo"), "broken")))
    made = row(make_report(collect_cells([folder])), "gloo")
    assert (made.repeats, made.failed_repeats) == (1, 1)


@pytest.mark.parametrize("content", [b"", b"{]", b'{"schema": "other/1"}', b"\xff\xfe"])
def test_a_foreign_file_is_named_and_the_rest_is_shown(folder, content):
    (folder / "cells" / "foreign.json").write_bytes(content)
    report = make_report(collect_cells([folder]))
    assert len(report.cells) == 1
    assert any("foreign.json is left out" in note for note in report.notes)


def test_a_study_s_own_table_is_pointed_to(folder):
    (folder / "cells" / "study.json").write_bytes(b'{"schema": "testbed.accuracy/1"}')
    (folder / "cells" / "study.md").write_text("| a |")
    (note,) = (n for n in make_report(collect_cells([folder])).notes if "study.json" in n)
    assert note.endswith("study.md")


def test_a_single_file_and_a_plain_folder_are_read(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    file = tmp_path / "plain" / "one.json"
    file.write_bytes(encode_cell(cell("gloo", 30)))
    for path in (file, file.parent):
        assert len(make_report(collect_cells([path])).cells) == 1
    (tmp_path / "empty").mkdir()
    both = make_report(collect_cells([tmp_path / "empty", file.parent]))
    assert len(both.cells) == 1
    assert f"{tmp_path / 'empty'} is left out: it holds no cells yet" in both.notes


def test_missing_and_empty_folders_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        collect_cells([tmp_path / "no"])
    with pytest.raises(UsageError, match="holds no cells"):
        collect_cells([tmp_path])


def test_reporting_and_sweeping_never_load_torch(folder):
    program = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None\n"
        "import testbed.commands.sweep, testbed.recipes.quick\n"
        "from testbed.commands.report import Format, report\n"
        "report([Path(sys.argv[1])], Format.MD)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Only one method was run: gloo, 30.0 ms" in done.stdout


def test_repeats_that_trained_something_else_did_not_do_the_same_work():
    """A file of the user's was changed between a sweep and its `--resume`."""
    runs = [cell("gloo", 30, r) for r in range(3)] + [cell("mpi-ring", 31, r) for r in range(3)]
    runs[1] = msgspec.structs.replace(runs[1], initial_digest="2e2e2e2e2e")
    report = report_of(runs)
    verdict, why = same_work(row(report, "gloo"))
    assert verdict == "no"
    assert why == (
        "repeats did different work: their initial parameters differ (1d1d1d1d, 2e2e2e2e)"
    )
    assert row(report, "gloo").rank is None
    assert same_work(row(report, "mpi-ring"))[0] == "yes"


def test_cells_are_held_against_those_of_their_own_folder():
    """Of two days' sweeps the first had everybody's bound, and the most common work won."""
    old = [cell("none", 20, identical_work=None), cell("gloo", 30)]
    other = {"initial_digest": "2e2e2e2e2e"}
    new = [cell("none", 10, identical_work=None, **other), cell("gloo", 15, **other)]
    for order in ((old, new), (new, old)):
        found = [
            Found("old" if cells is old else "new", c.backend, c) for cells in order for c in cells
        ]
        report = make_report(Collected(tuple(found), ()))
        bounds = {c.source: c.efficiency for c in report.cells if c.backend == "gloo"}
        assert bounds["old"] == pytest.approx(20 / 30, rel=0.01)
        assert bounds["new"] == pytest.approx(10 / 15, rel=0.01)
        assert all(c.comparable for c in report.cells)
    alone = [Found("old", "none", old[0]), Found("new", "gloo", new[1])]
    assert make_report(Collected(tuple(alone), ())).cells[1].efficiency is None


def test_runs_are_paired_by_round_only_if_they_ran_in_rounds():
    """A run that was repeated at the end shares nothing with what ran in its round."""
    cells = framework_cells()

    def pairs(began):
        timed = [
            msgspec.structs.replace(c, environment={**c.environment, "began": began(n, c)})
            for n, c in enumerate(cells)
        ]
        return {line.num_pairs for line in report_of(timed).ratios}

    def in_rounds(number, c):
        return f"2026-01-0{1 + c.config.repeat}T00:{number:02}:00+00:00"

    def again(number, c):
        return "2026-02-01T00:00:00+00:00" if number == 1 else in_rounds(number, c)

    assert pairs(in_rounds) == {5}
    assert pairs(again) == {0, 5}


@pytest.mark.parametrize("second", ["b", "bucket:mib=25,first_mib=1,count=12,min_kib=64"])
def test_the_fastest_by_others_spread_alone_says_so(second):
    """The pooled spread of quiet cells tells apart what the two noisy ones cannot themselves."""
    quiet = {f"quiet{n}": 30.0 + n for n in range(6)}
    times = {"a": (25.0, 25.4, 25.1), second: (25.5, 25.3, 25.4)}
    times |= {name: (ms, 1.0001 * ms, 0.9999 * ms) for name, ms in quiet.items()}
    cells = [
        cell("gloo", 1.0, r, scheduler=name, config={"scheduler": name}, step_time_s=ms / 1e3,
             samples=StepSamples())
        for name, runs in times.items() for r, ms in enumerate(runs)
    ]  # fmt: skip
    (answer,) = report_of(cells).answers
    assert (answer.verdict, answer.next.differs) == ("fastest", True)
    assert answer.next.pair_differs is False
    said = f"the next, gloo/{second[:6]}"
    (line,) = (line for line in answer.lines if said in line)
    assert line.endswith(", not by their own runs alone.")
    assert len(line) <= 100


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python tests/unit/test_reporting.py --rewrite")
    GOLDEN.mkdir(exist_ok=True)
    for golden_name, golden_text in golden_texts().items():
        (GOLDEN / golden_name).write_text(golden_text)
