"""What reports say of the memory of a step: peaks, errors, moved bytes, and the same parameters."""

import csv
import io
import json

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.records.cell import Cell, MemoryResult, decode_cell, encode_cell
from testbed.records.report import Report, encode_report
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.cell_text import describe_cell
from testbed.reporting.formats import to_csv, to_markdown
from testbed.reporting.make import make_report
from testbed.reporting.terminal import print_report

DIGESTS = {"initial_digest": "1d", "sample_digest": "5a", "final_digest": "f1"}


def cell(memory, predicted=None, measured=None, **changes):
    """A cell whose step took so many bytes; most of them activations, 1000 weights."""
    found = None
    if predicted is not None:
        found = MemoryResult(
            predicted={"weights": 1000, "activations": predicted - 1000},
            measured={} if measured is None else {"weights": 1000, "activations": measured - 1000},
            moved_bytes=changes.pop("moved", 0),
            resident_bytes=changes.pop("resident", None),
            kept_bytes=changes.pop("kept", None),
        )
    config = RunConfig(backend="gloo", memory=memory, **changes.pop("config", {}))
    values = {"workload": "w", "num_workers": 2, "step_time_s": 0.1, **DIGESTS, **changes}
    return Cell(backend="gloo", config=config, memory=found, **values)


def report_of(*cells):
    def group(c):
        return repr(msgspec.structs.replace(c.config, repeat=0))

    return make_report(Collected(tuple(Found("folder", group(c), c) for c in cells), ()))


def rows(report):
    read = csv.DictReader(io.StringIO(to_csv(report), newline=""))
    return {line["memory"]: line for line in read}


def test_csv_holds_peaks_error_moved_bytes_their_sum_and_resident():
    moved = cell("offload", 4000, 5000, moved=7000, resident=9000)
    lines = rows(report_of(cell("none"), moved))
    keys = [key for key in lines["offload"] if key.startswith("memory_")]
    assert [lines["offload"][key] for key in keys] == [
        *("4000", "5000", "-0.2", "7000", "12000", "9000"),
    ]
    assert {lines["none"][key] for key in keys} == {""}


def test_json_holds_them_by_category_and_reads_back():
    report = report_of(cell("offload", 4000, 5000))
    (found,) = json.loads(encode_report(report))["cells"]
    assert found["memory"]["measured"] == {"weights": 1000, "activations": 4000}
    assert found["memory_error"] == -0.2
    assert msgspec.json.decode(encode_report(report, full=True), type=Report) == report


def test_a_peak_that_was_not_measured_stands_beside_the_host_as_predicted():
    line = rows(report_of(cell("offload", 4000, moved=10)))["offload"]
    assert line["memory_measured_bytes"] == line["memory_error"] == ""
    assert line["memory_with_moved_bytes"] == "4010"


def test_tables_for_people_have_them_where_some_cell_has():
    with_memory = report_of(cell("none"), cell("laysa", 4_000_000, 5_000_000))
    out = io.StringIO()
    print_report(with_memory, out)
    assert "Live storages at the peak of a step" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 120
    assert "meas. peak MB" in to_markdown(with_memory)
    without = report_of(cell("none"))
    out = io.StringIO()
    print_report(without, out)
    assert "Live storages" not in out.getvalue()
    assert "meas. peak MB" not in to_markdown(without)


def test_of_repeats_the_largest_peak_counts():
    sizes = ((4000, 100, 7), (6000, 90, 8), (5000, None, None))
    repeats = [
        cell("laysa", 4000, measured, resident=resident, kept=kept, config={"repeat": number})
        for number, (measured, resident, kept) in enumerate(sizes)
    ]
    (found,) = report_of(*repeats).cells
    assert found.memory.measured_bytes == 6000
    assert (found.memory.resident_bytes, found.memory.kept_bytes) == (100, 7)


@pytest.mark.parametrize(("kept", "lines"), [(3 * 2**20, 1), (0, 0), (None, 0)])
def test_the_part_of_the_resident_set_that_no_prediction_has_is_named(kept, lines):
    told = describe_cell(cell("none", 4000, 4000, resident=9 * 2**20, kept=kept)).splitlines()
    named = [line for line in told if "3 MiB that no prediction has: freed pages" in line]
    assert len(named) == lines


def test_what_an_arena_of_buckets_loses_is_told():
    one = cell("release", 4000, 4000)
    one.memory.arena_bytes, one.memory.arena_fragmentation = 2 * 2**20, 0.031
    assert "an arena of 2 MiB, 3.1 % of it lost to fragmentation" in describe_cell(one)
    assert "arena" not in describe_cell(cell("none", 4000, 4000))


def test_errors_are_summed_up():
    (note,) = (
        n
        for n in report_of(cell("none", 5000, 5000), cell("laysa", 4000, 5000)).notes
        if "live storages" in n
    )
    assert "2 cells: error 10.00 % in the median, -20.00 % at worst (w, memory laysa)" in note


@pytest.mark.parametrize(
    ("digest", "said"), [("f1", "same parameters as"), ("f2", "not the same bits as")]
)
def test_parameters_are_compared_with_those_without_a_strategy(digest, said):
    other = cell("none", config={"compressor": "fp16"}, final_digest="f3")
    report = report_of(cell("none"), other, cell("laysa", final_digest=digest))
    said_of = {c.config.memory: c.same_parameters_note for c in report.cells}
    assert said_of["laysa"].startswith(said)
    assert said_of["none"] == ""
    assert any(said in note for note in report.notes)


def test_parameters_are_not_compared_across_compressors_or_schedulers():
    others = [{"compressor": "fp16"}, {"scheduler": "dear"}]
    cells = [cell("laysa", config=changes) for changes in others]
    assert {c.same_parameters_note for c in report_of(cell("none"), *cells).cells} == {""}


def test_a_budget_is_no_other_work_and_another_step_time():
    bound = cell("none")
    bound.backend = "none"
    small, large = (cell("laysa", config={"budget_mb": mb}) for mb in (10.0, 20.0))
    judged = report_of(bound, small, large).cells
    assert all("2 other cell(s)" in c.comparable_note for c in judged)
    assert [c.efficiency for c in judged if c.config.memory == "laysa"] == [None, None]


def test_records_of_before_read_as_they_did():
    plain = json.loads(encode_cell(cell("none")))
    del plain["memory"], plain["config"]["memory"], plain["config"]["budget_mb"]
    read = decode_cell(json.dumps(plain).encode())
    assert (read.memory, read.config.memory) == (None, "none")
    assert report_of(read).cells[0].memory_error is None
