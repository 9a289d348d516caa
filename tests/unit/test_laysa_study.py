"""The study `laysa`: forecasts, cells and table of a small model; what is chosen and refused."""

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.studies import laysa
from testbed.studies.laysa import LAYSA, foresee_model
from testbed.studies.laysa_table import HALF, MODELS, ROWS, SPARSE, to_markdown
from testbed.sweeping.study import find_study, read_cells

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
            assert row.memory.startswith("laysa") or found.peak_bytes <= budget
    dense = rows_of(foreseen)["dense"]
    assert job.forecast("none", "none", dense.largest_batch + 1).peak_bytes > budget
    assert rows_of(foreseen)["sparse-only"].largest_batch == 64


def test_cells_are_measured_kept_and_stand_beside_the_forecasts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, MLP, (64, 512))
    monkeypatch.setattr(laysa, "ROWS", ROWS[:2])
    monkeypatch.setattr(laysa, "MOMENTA", (0.9,))
    study = find_study(f"laysa:models={MLP},steps=3")
    before = study.go_on(tmp_path)
    measured = study.measure(tmp_path, before)
    assert measured.status == 0, capsys.readouterr().err
    cells = read_cells(tmp_path / MLP / "runs")
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


def test_models_are_chosen_by_name():
    assert find_study("laysa") is LAYSA
    assert LAYSA.measure is not None
    assert find_study("laysa:models=vgg16+bert-base,measure=0").measure is None
    with pytest.raises(UsageError, match="no model 'vgg19'; expected resnet50"):
        find_study("laysa:models=vgg19")
