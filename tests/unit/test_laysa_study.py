"""The study `laysa`: forecasts, cells and table of a small model; what is chosen and refused."""

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.records.cell import Cell, MemoryResult
from testbed.studies import laysa
from testbed.studies.laysa import LAYSA, foresee_model
from testbed.studies.laysa_claims import claims
from testbed.studies.laysa_table import (
    HALF,
    LEAST,
    LEAST_HOST,
    MODELS,
    NAIVE,
    ROWS,
    SPARSE,
    to_markdown,
)
from testbed.sweeping.study import find_study, read_cells
from testbed.training.forecast import RESERVE_BYTES

MLP = "digits-mlp"


@pytest.fixture(scope="module")
def foreseen():
    return foresee_model(MLP, (64, 512))


def rows_of(foreseen, size=512, momentum=0.9):
    return {
        row.label: row
        for row in foreseen.rows
        if (row.batch_size, row.momentum) == (size, momentum)
    }


def test_every_row_is_foreseen_at_every_batch_and_momentum(foreseen):
    assert len(foreseen.rows) == 2 * 2 * len(ROWS)
    rows = rows_of(foreseen)
    sparse, half = rows["sparse-only"], rows[HALF]
    assert all(row.peak_bytes > 0 for row in rows.values() if row.memory)
    assert rows["dense"].peak_bytes < sparse.peak_bytes
    assert half.peak_bytes <= sparse.peak_bytes / 2 if half.memory else half.why
    assert rows["laysa, least peak"].peak_bytes < sparse.peak_bytes


def test_the_largest_batch_fits_and_the_next_does_not(foreseen):
    budget = rows_of(foreseen, size=64)["sparse-only"].peak_bytes
    job = laysa._Job(MLP, 0.9)
    for row in rows_of(foreseen).values():
        if row.largest_batch is not None:
            found = job.forecast(row.memory, row.compressor, row.largest_batch)
            slack = found.peak_bytes // 50 if row.memory.startswith("laysa") else 0  # planned anew
            assert found.peak_bytes <= budget + slack
    dense = rows_of(foreseen)["dense"]
    assert job.forecast("none", "none", dense.largest_batch + 1).peak_bytes > budget
    assert rows_of(foreseen)["sparse-only"].largest_batch == 64


def test_cells_are_measured_kept_and_stand_beside_the_forecasts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, MLP, (64, 512))
    monkeypatch.setattr(laysa, "ROWS", ROWS[:2])
    monkeypatch.setattr(laysa, "MOMENTA", (0.9,))
    monkeypatch.setattr(laysa, "claims", lambda models, cells: "")  # they speak of other rows
    study = find_study(f"laysa:models={MLP},steps=3")
    before = study.go_on(tmp_path)
    measured = study.measure(tmp_path, before)
    assert measured.status == 0, capsys.readouterr().err
    cells = read_cells(tmp_path / MLP / "batch-64")
    assert {c.config.compressor for c in cells.values()} == {"none", SPARSE}
    assert all(cell.memory.measured_bytes for cell in cells.values())
    table = measured.files["laysa.md"]
    assert table != before["laysa.md"]
    errors = [line.split("|")[5].strip() for line in table.splitlines() if "| `" in line]
    assert any(error.endswith("%") for error in errors)
    assert study.measure(tmp_path, before).files == measured.files  # nothing is run twice


def test_a_table_without_cells_says_what_is_estimated(foreseen):
    table = to_markdown([foreseen], [])
    assert table.count("| row |") == 4
    assert "(0.0" in table
    assert msgspec.json.decode(msgspec.json.encode(foreseen), type=type(foreseen)) == foreseen


def test_planned_for_each_other_is_no_worse_than_planned_alone(foreseen):
    kinds = [(each.batch_size, each.network) for each in foreseen.together]
    assert kinds == [(size, network) for size in (64, 512) for network in (1.0, 4.0)]
    assert all("give at least that" in each.why for each in foreseen.together)  # no room at all
    job = laysa._Job("digits-cnn", 0.0)
    budget = RESERVE_BYTES + job.forecast("none", "none", 512).peak_bytes * 9 // 10
    for network in (1.0, 4.0):
        found = job.together(512, budget, network)
        assert 0 < found.jointly_s <= min(found.alone_s, found.after_s), found


def cell_of(row, peak_bytes, step_s, steps=6):
    config = laysa.configuration(MLP, row)
    return Cell(
        backend="none",
        workload=MLP,
        num_workers=1,
        config=msgspec.structs.replace(config, steps=steps, warmup=2),
        step_time_s=step_s,
        memory=MemoryResult(predicted={"weights": peak_bytes}, measured={"weights": peak_bytes}),
    )


def test_each_claim_is_told_with_its_figures_and_whether_it_is_reached(foreseen):
    fitting = tuple(
        msgspec.structs.replace(row, memory="laysa:budget_mb=1") if row.label == HALF else row
        for row in foreseen.rows
    )
    foreseen = msgspec.structs.replace(foreseen, rows=fitting)
    rows = rows_of(foreseen, size=64, momentum=0.9)
    told = claims([foreseen], [])
    assert "1.10x" not in told  # nothing was run
    assert told.count("predicted") >= 2
    peaks = {"sparse-only": 1000, LEAST: 600, LEAST_HOST: 399, HALF: 500, NAIVE: 700}
    steps = {"sparse-only": 1.0, LEAST: 2.0, LEAST_HOST: 2.0, HALF: 1.05, NAIVE: 1.5}
    cells = [cell_of(rows[label], peaks[label], steps[label]) for label in peaks]
    lines = claims([foreseen], cells).splitlines()
    (heavy,) = [line for line in lines if "40.0% below" in line and "64 samples" in line]
    assert "reached: 40.0% (measured; laysa, least peak; 64 samples)" in heavy
    short = [cell_of(rows[label], peaks[label], steps[label], steps=3) for label in peaks]
    of_peaks = claims([foreseen], short)
    assert "measured" in of_peaks
    assert "1.10x" not in of_peaks  # one counted step says nothing of the time
    only_sparse = claims([foreseen], cells[:1])
    assert "measured" not in only_sparse  # a row that was not run is predicted
    (half,) = [line for line in lines if "1.10x" in line]
    assert half.endswith("1.050x")
    (saved,) = [line for line in lines if "12.25%" in line]
    assert saved.endswith("30.0%")
    assert sum("samples/s" in line for line in lines) == 1


def test_models_are_chosen_by_name():
    assert find_study("laysa") is LAYSA
    assert LAYSA.measure is not None
    assert find_study("laysa:models=vgg16+bert-base,measure=0").measure is None
    with pytest.raises(UsageError, match="no model 'vgg19'; expected resnet50"):
        find_study("laysa:models=vgg19")
