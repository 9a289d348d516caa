"""The short report: what fits a screen, what stands in its tables, the same in every format."""

import csv
import io
import re

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.base.units import rounded
from testbed.commands.report import Format, text_of
from testbed.records.cell import MemoryResult, encode_cell
from testbed.reporting.aggregate import Collected, Found, sweeps_in
from testbed.reporting.formats import latex_text, markdown_text, to_csv
from testbed.reporting.make import make_report
from testbed.reporting.short import short_latex, short_markdown, shorten, to_text
from testbed.reporting.table import MOST_COLUMNS, Column, Table, table_of, table_text
from testbed.sweeping.executor import failed_cell
from tests.harness.source_tree import ROOT
from tests.unit.test_answers import FOLDERS, name_of
from tests.unit.test_answers import report_of as read
from tests.unit.test_reporting import cell, framework_cells, known_cells, ranked_cells, report_of

WIDTH = 100


def tables(report):
    short = shorten(report)
    return [*short.summary, *(table for section in short.sections for table in section.tables)]


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_report_of_each_committed_folder_fits_a_screen_of_100_columns(folder):
    report = read(folder)
    lines = to_text(report).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for table in tables(report):
        assert len(table.headings) <= MOST_COLUMNS
        assert not any("\n" in heading or "…" in heading for heading in table.headings)
        one_line = r"\s{2,}".join(map(re.escape, table.headings))
        assert any(re.fullmatch(rf"\s*{one_line}", line) for line in lines), table.headings


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_same_texts_stand_in_every_format(folder):
    report = read(folder)
    markdown, latex = short_markdown(report), short_latex(report)
    for table in tables(report):
        for row in table.rows:
            assert "| " + " | ".join(map(markdown_text, row)) + " |" in markdown
            assert " & ".join(map(latex_text, row)) in latex
    for answer in report.answers:
        assert all(markdown_text(line) in markdown for line in answer.lines)
        assert all(latex_text(line) in latex for line in answer.lines)


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_figures_are_those_of_the_columns_for_programs(folder):
    report = read(folder)
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert len(rows) == len(report.cells)
    steps = {rounded(1e3 * float(row["step_time_s"])) for row in rows}
    for answer in report.answers:
        for place in answer.places[:1]:
            assert float(rows[place]["step_time_s"]) == pytest.approx(answer.step_time_s)
    for table in tables(report):
        for number, heading in enumerate(table.headings):
            if heading.startswith("step ms"):
                assert {row[number].split(" ")[0] for row in table.rows} <= {*steps, ""}


def several_lengths():
    """Two methods, and a bound, of which each ran other numbers of steps."""
    return [
        cell(backend, ms * (1 + 0.001 * repeat), repeat, steps=steps, scheduler=scheduler,
             config={"steps": steps, "warmup": steps // 8, "scheduler": scheduler})
        for backend, scheduler, ms, steps in
        [("gloo", "wfbp", 30, 40), ("gloo", "dear", 33, 24), ("none", "wfbp", 20, 16)]
        for repeat in range(3)
    ]  # fmt: skip


def test_numbers_of_steps_split_no_table():
    (section,) = shorten(report_of(several_lengths())).sections
    (table,) = section.tables
    assert [row[:2] for row in table.rows] == [
        ("none (bound)", ""),
        ("gloo", "wfbp"),
        ("gloo", "dear"),
    ]
    assert section.lines[0].startswith("Fastest: gloo/wfbp, 30.0 ms [")
    assert "10.0 % [" in section.lines[0]
    assert "50" in " ".join(section.lines)


def test_failures_stand_below_once():
    broken = [failed_cell(RunConfig(backend="mpi", scheduler=s), "exit status 1\nRankLost: x")
              for s in ("wfbp", "dear")]  # fmt: skip
    report = report_of([*several_lengths(), *broken])
    text = to_text(report)
    assert text.count("RankLost: x") == 1
    assert "- mpi/wfbp; mpi/dear: failed: RankLost: x" in text
    assert not any("mpi" in " ".join(row) for table in tables(report) for row in table.rows)


def test_a_failure_is_that_of_its_compressor_and_its_workers():
    """The dense cell of two workers, which finished, is not named for what a compressed one did."""
    config = {"workload": "digits-cnn", "backend": "gloo", "batch_size": 64}
    broken = [
        failed_cell(RunConfig(**config, workers=4, **more), why)
        for more, why in (({"compressor": "powersgd"}, "Lost: x"), ({"memory": "laysa"}, "Lost: y"))
    ]
    finished = [cell("gloo", 30, config={"workers": 2, "workload": "digits-cnn"})]
    apart = [Found("folder", str(n), each) for n, each in enumerate([*finished, *broken])]
    text = to_text(make_report(Collected(tuple(apart), ())))
    assert "- gloo with powersgd, 4 workers: failed: Lost: x" in text
    assert "- gloo, memory laysa, 4 workers: failed: Lost: y" in text


def test_rows_of_one_method_tell_in_which_settings_they_differ():
    cells = [
        cell(backend, ms + (steps == 100), scheduler=scheduler, steps=steps,
             config={"scheduler": scheduler, "steps": steps})
        for backend, ms in (("gloo", 30), ("mpi", 35)) for scheduler in ("wfbp", "dear")
        for steps in (20, 100)
    ]  # fmt: skip
    apart = tuple(Found("folder", str(number), each) for number, each in enumerate(cells))
    _, matrix = tables(make_report(Collected(apart, ())))
    assert sorted(row[0].strip() for row in matrix.rows) == [
        *("dear (steps=100)", "dear (steps=20)", "wfbp (steps=100)", "wfbp (steps=20)")
    ]
    assert all(all(row) for row in matrix.rows)


def test_below_a_table_stand_same_transports_origins_and_kinds_of_predictions():
    cells = [
        msgspec.structs.replace(
            c,
            predicted_step_time_s=c.step_time_s,
            prediction="held-out",
            config=msgspec.structs.replace(
                c.config, workload="replay:resnet50-v100", link="link.json"
            ),
        )
        for c in framework_cells()
    ]
    backends, matrix = tables(report_of(cells))
    # Rounds differ by a fifth, so that nothing is ranked; in pairs of a round they hardly do.
    assert "over Gloo alone gloo/dear:mib=9.5 (unstable) takes 0.789 [" in backends.below
    assert "times the step of ddp:static_graph=1" in backends.below
    assert "over MPI" not in backends.below
    assert "untuned: " in matrix.below
    assert "bytescheduler" in matrix.below.partition("untuned: ")[2]
    assert "tuned (30 trials): dear:mib=9.5" in matrix.below
    assert "pred.: held-out" in matrix.below
    text = to_text(report_of(cells))
    assert "over Gloo alone" in " ".join(text.split())


def test_other_work_is_named_below_and_wins_nothing():
    report = report_of(known_cells())
    text = to_text(report)
    (answer,) = (a for a in report.answers if a.setting.startswith("digits-cnn"))
    assert answer.best == ["gloo"]
    assert "consistency=async" in text
    assert "not compared, other work: asynchronous" in " ".join(text.split())


def test_marks_and_ties_survive_in_short():
    text = to_text(report_of(ranked_cells()))
    (line,) = (line for line in text.splitlines() if line.startswith("p3"))
    assert " u " in f"{line} "
    assert "u unstable (spread of 3 % or more), not ranked" in text
    tied = [c for c in ranked_cells() if c.scheduler in ("wfbp", "bucket")]
    text = to_text(report_of(tied))
    assert text.splitlines()[1].startswith("Tied: gloo/wfbp, gloo/bucket, ")
    assert "= tied with the fastest" in text


def test_an_unranked_method_whose_runs_overlap_may_be_faster():
    times = {"mg-wfbp": (25, 25.1, 25.2), "wfbp": (30, 30.1, 30.2), "p3": (25, 26, 29)}
    cells = [
        cell("gloo", ms, repeat, scheduler=name, config={"scheduler": name})
        for name, each in times.items() for repeat, ms in enumerate(each)
    ]  # fmt: skip
    (answer,) = report_of(cells).answers
    assert (answer.verdict, answer.best) == ("fastest", ["gloo/mg-wfbp"])
    assert answer.unranked == ["gloo/p3 (26.6 ms, unstable)"]
    assert "may be faster, not ranked: gloo/p3" in " ".join(answer.lines).replace("May", "may")


def test_the_usual_choice_is_the_framework_as_it_comes():
    (answer,) = report_of(framework_cells()).answers
    assert answer.best == ["mpi-ring/wfbp"]
    assert (answer.usual.name, answer.usual.differs) == ("ddp", True)
    assert answer.usual.gain == pytest.approx(1.0, abs=0.01)


def test_scaling_holds_a_column_for_each_number_of_workers():
    cells = [
        cell("gloo", ms, num_workers=n, config={"workers": n, "scheduler": s}, scheduler=s)
        for n, ms, s in [(2, 30, "wfbp"), (4, 36, "wfbp"), (8, 50, "wfbp"), (4, 33, "dear")]
    ]
    apart = tuple(Found("folder", str(number), each) for number, each in enumerate(cells))
    summary, scaling = shorten(make_report(Collected(apart, ()))).summary
    assert scaling.headings == ("method", "2 workers", "4 workers", "8 workers")
    assert scaling.rows == (("gloo/wfbp", "30.0", "36.0", "50.0"), ("gloo/dear", "", "33.0", ""))
    assert [row[0] for row in summary.rows] == ["2 workers", "4 workers", "8 workers"]


def test_scaling_keeps_apart_what_differs_in_a_setting_or_in_the_size_of_the_cluster():
    cells = [
        cell("gloo", ms + steps / 100, num_workers=n, steps=steps,
             config={"workers": n, "steps": steps, "cluster": f"nodes={nodes}"},
             cluster={"spec": f"nodes={nodes}"})
        for nodes, n, ms in [(2, 2, 30), (4, 4, 36), (8, 4, 46)] for steps in (20, 100)
    ]  # fmt: skip
    apart = tuple(Found("folder", str(number), each) for number, each in enumerate(cells))
    (scaling,) = (
        table
        for table in shorten(make_report(Collected(apart, ()))).summary
        if table.title.startswith("Scaling")
    )
    assert scaling.rows == (
        ("gloo (steps=20)", "30.2", "36.2"),
        ("gloo (steps=100)", "31.0", "37.0"),
    )


def with_memory(memory, peak, step_ms):
    found = MemoryResult(predicted={"weights": peak}, measured={"weights": peak})
    return cell("gloo", step_ms, memory=found, config={"memory": memory})


def test_memory_strategies_are_answered_apart():
    report = report_of(
        [with_memory("none", 10**9, 30), with_memory("checkpoint", 4 * 10**8, 40),
         with_memory("offload", 6 * 10**8, 33)]
    )  # fmt: skip
    (answer,) = report.answers
    assert answer.best == ["gloo"]
    assert (answer.memory.name, answer.memory.saves) == ("gloo, memory checkpoint", 0.6)
    assert answer.memory.slower == pytest.approx(1 / 3)
    assert answer.cheapest.name == "gloo, memory offload"
    (table,) = (t for t in tables(report) if t.title.startswith("Memory"))
    assert [row[0] for row in table.rows] == ["checkpoint", "offload", "none"]


def test_csv_and_json_hold_everything_whatever_is_asked():
    report = report_of(known_cells())
    assert text_of(report, Format.CSV, full=False) == text_of(report, Format.CSV, full=True)
    names = {*msgspec.json.decode(text_of(report, Format.JSON, full=False))}
    assert {"answers", "cells", "notes"} <= names
    for format_ in (Format.TABLE, Format.MD, Format.LATEX):
        short, full = (text_of(report, format_, full=full) for full in (False, True))
        assert len(short) < len(full)


def test_what_one_setting_has_is_not_said_of_all():
    topk = {"compressor": "topk:ratio=0.01"}
    cells = [
        cell("gloo", ms, batch_size=batch, config={"batch_size": batch, **more})
        for batch, ms, more in [(64, 30, {}), (64, 20, topk), (128, 40, {})]
    ]
    apart = tuple(Found("folder", str(number), each) for number, each in enumerate(cells))
    summary = shorten(make_report(Collected(apart, ()))).summary[0]
    assert "lossy" not in summary.title
    lossy = [row[summary.headings.index("fastest lossy")] for row in summary.rows]
    assert lossy == ["topk:ratio=0.01 50.0 % faster", "-"]


def test_what_a_framework_compresses_stands_in_rows_of_its_own():
    backends = {"gloo": 30, "ddp": 32, "ddp:hook=fp16": 24, "ddp:hook=powersgd": 26}
    cells = [
        cell(backend, ms, scheduler="ddp" if "ddp" in backend else "wfbp")
        for backend, ms in backends.items()
    ]
    (table,) = (t for t in tables(report_of(cells)) if t.title.startswith("Compressors"))
    beside = table.headings.index("vs dense %")
    assert {row[0]: row[beside] for row in table.rows} == {
        "ddp:hook=fp16": "-25.0",
        "ddp:hook=powersgd": "-18.8",
        "none": "0",
    }


def test_rows_of_several_folders_tell_theirs():
    found = [Found(name, "group", cell("gloo", ms)) for name, ms in (("before", 30), ("after", 31))]
    report = make_report(Collected(tuple(found), ()))
    rows = csv.DictReader(io.StringIO(to_csv(report)))
    assert {row["source"]: round(1e3 * float(row["step_time_s"])) for row in rows} == {
        "before": 30,
        "after": 31,
    }
    assert "before" in text_of(report, Format.MD, full=True)


def test_a_folder_of_sweeps_is_read_as_all_of_them():
    runs = ROOT / "runs"
    assert sweeps_in([runs / "laysa"]) == [runs / "laysa" / "resnet50" / "batch-8"]
    tables = sorted(path.parent for path in (runs / "tables").glob("*/sweep.json"))
    assert len(tables) > 2
    assert sweeps_in([runs / "tables", tables[0]]) == tables
    assert sweeps_in([runs / "aa" / "bank" / "cells"]) == [runs / "aa" / "bank" / "cells"]
    assert sweeps_in([runs / "links"]) == [runs / "links"]


def test_a_cell_that_lies_beside_sweeps_does_not_hide_them(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sweep.json").write_text("{}")
    assert sweeps_in([tmp_path]) == [tmp_path / "a"]
    (tmp_path / "stray.json").write_bytes(encode_cell(cell("gloo", 30)))
    assert sweeps_in([tmp_path]) == [tmp_path, tmp_path / "a"]


def test_what_is_alike_in_all_rows_moves_to_the_title():
    columns = [Column("a", lambda row: row[0], numeric=False), Column("MB", lambda row: row[1]),
               Column("empty", lambda row: "")]  # fmt: skip
    table = table_of("t", columns, [("x", "1"), ("x", "2")])
    assert (table.title, table.headings) == ("t, a x", ("MB",))


def test_long_words_are_broken_and_figures_never_are():
    row = ("ddp:plan=" + "x" * 90, "a:b=1,c=2", "123456")
    table = Table("t", ("long", "words", "figure"), (False, False, True), (row,))
    lines = table_text(table, 60)
    assert max(map(len, lines)) <= 60
    assert any("123456" in line for line in lines)
    joined = "".join(line.split("  ")[0].strip() for line in lines[3:])
    assert joined.replace("a:b=1,", "").startswith("ddp:plan=xxx")
