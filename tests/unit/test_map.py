"""The map: which codec a setup answers, and cells that are foreseen before they run."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.base.files import load_link, load_shipped_trace
from testbed.base.link import Link
from testbed.prediction.codec import CodecCost, CodecSample, RoundCost, encode_codecs
from testbed.records.cell import Cell
from testbed.records.forecast import digest_of, load_forecast
from testbed.reporting.tiles import Tile, svg_tiles
from testbed.studies.map import cells, study
from testbed.studies.map.setups import (
    CODECS,
    DENSE,
    HALF,
    LATENCIES,
    MODELS,
    RATES,
    SPEEDS,
    WORKERS,
    Setup,
    answers,
    setups,
    simulate,
)
from testbed.studies.map.tables import to_csv, to_markdown, to_svg
from testbed.sweeping.study import find_study

LINK = Path(__file__).parents[2] / "runs" / "unseen" / "mpi-ring.json"
ONE_CORE, MANY_CORES = 1, 64


def cost(codec, workers, *, share, seconds_per_element):
    """A codec that gathers this share of the bytes, encoding and decoding alike."""
    samples = tuple(
        CodecSample(
            num_elements=n,
            compute_s=(n * seconds_per_element, n * seconds_per_element),
            rounds=(RoundCost(form="gather", num_bytes=4 * n * share),),
        )
        for n in (1 << 10, 1 << 20)
    )
    return CodecCost(compressor=codec, num_workers=workers, samples=samples)


def half(workers):
    samples = tuple(
        CodecSample(
            num_elements=n,
            compute_s=(0.0, 0.0),
            rounds=(RoundCost(form="sum", num_bytes=2 * n),),
        )
        for n in (1 << 10, 1 << 20)
    )
    return CodecCost(compressor=HALF, num_workers=workers, samples=samples)


def costs(workers=(2, 4, 8, 16, 32)):
    return tuple(
        half(n) if c == HALF else cost(c, n, share=0.01, seconds_per_element=1e-9)
        for c in CODECS
        for n in workers
    )


def found_for(setup, *others):
    (answer,) = answers(simulate([setup], [half(setup.workers), *others]))
    return answer


def test_the_grid_has_more_than_a_thousand_setups_and_half_precision_in_each():
    assert len(setups(speeds=(1.0,))) * (1 + len(CODECS)) >= 1000
    points = list(simulate([Setup("resnet50-v100", 4, "1gbit", "100us")], costs()))
    assert [p.codec for p in points] == [DENSE, *CODECS]
    assert {"fp16", "bf16"} <= set(CODECS)
    assert {c.num_workers for c in costs()} >= {*WORKERS, *cells.WORKERS}


def test_a_fast_network_wants_dense_messages_and_a_slow_one_the_smallest():
    small = cost("small", 4, share=0.001, seconds_per_element=0.0)
    slow = Setup("resnet50-v100", 4, "100mbit", "10us")
    answer = found_for(slow, small)
    assert answer.codec == "small"
    assert answer.over_dense > 10
    assert answer.over_bf16 > 5
    fast = found_for(replace(slow, rate="10000gbit", latency="0"), small)
    assert (fast.codec, fast.over_dense) == (DENSE, 1.0)


def test_where_no_codec_beats_half_precision_it_is_the_answer():
    dear = cost("dear", 4, share=0.001, seconds_per_element=1e-5)
    assert found_for(Setup("resnet50-v100", 4, "1gbit", "10us"), dear).codec == HALF


def test_a_faster_codec_may_change_the_answer():
    slow = cost("slow", 4, share=0.001, seconds_per_element=5e-8)
    setup = Setup("resnet50-v100", 4, "1gbit", "10us")
    assert found_for(setup, slow).codec == HALF
    assert found_for(replace(setup, speed=100.0), slow).codec == "slow"


def test_dense_and_compressed_steps_take_at_least_the_compute():
    trace = load_shipped_trace("resnet50-v100")
    compute_s = trace.forward_s + trace.backward_s
    points = simulate(setups(("resnet50-v100",), (4,), RATES, ("10us",), (1.0,)), costs())
    assert all(p.step_s >= compute_s * (1 - 1e-9) for p in points)


def test_the_tables_hold_what_was_simulated():
    grid = setups(("resnet50-v100", "vgg16bn-v100"), (4, 8), ("100mbit", "100gbit"), ("10us",))
    points = list(simulate(grid, costs()))
    text = to_markdown(points, costs((4, 8)), "Their costs are made up.")
    assert f"{len(points)} simulated setups" in text
    assert "## Codecs at 1 times the recorded speed" in text
    assert "## Codecs at 10 times the recorded speed" in text
    assert "| 100gbit | 10us | " in text
    of_speed = [a for a in answers(points) if a.setup[4] == 1.0]
    best = sum(a.codec == DENSE for a in of_speed)
    assert f"Of {len(of_speed)} setups dense messages are best in {best}, bf16 in" in text
    rows = list(csv.DictReader(io.StringIO(to_csv(points))))
    assert len(rows) == len(points)
    assert float(rows[0]["step_s"]) == pytest.approx(points[0].step_s, rel=1e-5)
    drawn = ET.fromstring(to_svg(points, 1.0))
    tiles = [e for e in drawn.iter("{http://www.w3.org/2000/svg}rect") if e.get("width") == "43"]
    assert len(tiles) == len(of_speed)


def test_tiles_leave_out_what_is_not_there():
    text = svg_tiles("<t>", ["a", "b"], ["x"], {("a", "x"): Tile("dense", "1")})
    assert "&lt;t&gt;" in text
    assert text.count('width="43"') == 1


def test_cells_are_drawn_by_their_seed_alone():
    drawn = cells.draw(7)
    assert drawn == cells.draw(7)
    assert drawn != cells.draw(8)
    assert len({(d.model, d.workers, d.rate) for d in drawn}) == len(drawn) == cells.NUM_SETUPS
    sweep = cells.sweep_of(drawn)
    assert len(sweep.cells) == len(set(sweep.cells)) == 24
    assert {c.scheduler for c in sweep.cells} == {"bucket"}
    assert sum(c.compressor == HALF for c in sweep.cells) == cells.NUM_SETUPS
    assert all(d.codec in CODECS and d.codec != HALF for d in drawn)


def test_what_is_drawn_from_lies_in_the_map():
    assert set(cells.MODELS) <= set(MODELS)
    assert len(LATENCIES) * len(SPEEDS) > 1


def foreseen(num_cores=MANY_CORES, seed=7):
    link = load_link(LINK)
    return cells.foreseen(cells.draw(seed), {"ring.json": link}, costs((2, 4)), num_cores)


def test_every_cell_is_foreseen_and_the_forecast_is_sealed():
    forecast = foreseen()
    assert forecast.digest == digest_of(forecast)
    assert len(forecast.cells) == 24
    assert all(c.held_out_s and c.null_s and c.plan_digest for c in forecast.cells)
    assert forecast.links.keys() == {"ring.json", "codecs"}
    cells.check_foreseen(forecast, cells.sweep_of(cells.draw(7)))
    with pytest.raises(UsageError, match="made with another seed or version"):
        cells.check_foreseen(forecast, cells.sweep_of(cells.draw(8)))


def test_ranks_that_share_cores_compress_more_slowly():
    alone = {c.key: c for c in foreseen(MANY_CORES).cells}
    for crowded in foreseen(ONE_CORE).cells:
        assert crowded.held_out_s >= alone[crowded.key].held_out_s * (1 - 1e-9)
        assert crowded.null_s == pytest.approx(alone[crowded.key].null_s, rel=1e-6)
    assert any(c.held_out_s > 1.01 * alone[c.key].held_out_s for c in foreseen(ONE_CORE).cells)


def measured(config, step_s, began):
    return Cell(
        status="ok",
        backend="mpi-ring",
        workload=config.workload,
        num_workers=config.workers,
        config=config,
        step_time_s=step_s,
        environment={"began": began},
    )


def test_measured_stands_beside_predicted():
    forecast, drawn = foreseen(), cells.draw(7)
    seconds = {c.key: c.held_out_s for c in forecast.cells}
    sweep = cells.sweep_of(drawn)
    ran = {
        cells.cell_key(config): measured(
            # As a run records them: filled up with what the workload has of its own.
            msgspec.structs.replace(config, batch_size=32, learning_rate=0.1),
            2 * seconds[cells.cell_key(config)],
            "2999-01-01T00:00:00+00:00",
        )
        for config in sweep.cells
    }
    text = cells.measured_text(forecast, drawn, 7, ran)
    assert "8 setups and a further codec for each, drawn with seed 7" in text
    assert text.count("| -50.0 % |") == 24
    assert "was foreseen in 8 of 8 setups" in text
    assert f"forecast {forecast.digest} of map" in text
    assert "older than each of the 24 cells" in text
    first = drawn[0]
    row = next(line for line in text.splitlines() if line.startswith(f"| {first.model}"))
    columns = row.strip("| ").split(" | ")
    assert columns[1] == DENSE
    assert columns[5:7] == ["1.00", "1.00"]


def test_cells_that_ran_before_the_forecast_do_not_count():
    forecast, drawn = foreseen(), cells.draw(7)
    config = cells.sweep_of(drawn).cells[0]
    ran = {cells.cell_key(config): measured(config, 1.0, "1999-01-01T00:00:00Z")}
    text = cells.measured_text(forecast, drawn, 7, ran)
    assert "began before it was written" in text
    assert "foreseen in 0 of 0 setups" in text


def test_the_forecast_is_written_before_cells_run_and_never_again(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "setups", lambda: setups(("resnet50-v100",), (4,), ("1gbit",)))
    (tmp_path / "codecs.json").write_bytes(encode_codecs(costs()))
    chosen = find_study(f"map:link={LINK}")
    files = chosen.go_on(tmp_path)
    assert list(files)[:2] == ["map.md", "map.csv"]
    assert {f"map-{speed:g}x.svg" for speed in SPEEDS} <= files.keys()
    first = load_forecast(tmp_path / "forecast.json")
    assert chosen.go_on(tmp_path) == files
    assert load_forecast(tmp_path / "forecast.json") == first
    content = json.loads((tmp_path / "forecast.json").read_text())
    content["cells"][0]["held_out_s"] += 1
    (tmp_path / "forecast.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="was changed after it was written"):
        chosen.go_on(tmp_path)


def test_the_map_alone_needs_no_link_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "setups", lambda: setups(("resnet50-v100",), (4,), ("1gbit",)))
    path = tmp_path / "costs.json"
    path.write_bytes(encode_codecs(costs()))
    alone = find_study(f"map:emulate=0,codecs={path}")
    assert alone.measure is None
    assert "map.md" in alone.compute()
    path.write_bytes(encode_codecs(costs((2, 4))))
    with pytest.raises(UsageError, match=r"has no cost of .* workers; expected one of each codec"):
        alone.compute()
    with pytest.raises(UsageError, match="has no option 'cells'"):
        find_study("map:cells=3")


def test_codecs_are_recorded_on_one_thread_for_each_number_of_workers():
    found = study.record_codecs(("bf16", "ef+topk:ratio=0.01"), (1, 2, 2), sizes=(64, 256))
    assert [(c.compressor, c.num_workers) for c in found] == [
        ("bf16", 1),
        ("bf16", 2),
        ("ef+topk:ratio=0.01", 1),
        ("ef+topk:ratio=0.01", 2),
    ]
    assert all(s.num_elements in (64, 256) for c in found for s in c.samples)


def test_a_link_of_another_backend_foresees_nothing():
    other = Link(backend="zmq-ps", num_workers=4, latency_s=1e-4, seconds_per_byte=1e-9)
    with pytest.raises(UsageError, match="no link of mpi-ring was given"):
        cells.foreseen(cells.draw(7), {"ps.json": other}, costs((2, 4)), MANY_CORES)


def test_a_point_is_a_record():
    (point, *_) = simulate([Setup("resnet50-v100", 4, "1gbit", "10us")], costs())
    assert msgspec.json.decode(msgspec.json.encode(point), type=type(point)) == point
