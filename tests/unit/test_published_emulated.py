"""Published shapes in emulation: what recorded cells say of each inequality."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from testbed.base.errors import UsageError
from testbed.base.files import save_trace, shipped_traces
from testbed.base.trace import Trace, TraceTensor
from testbed.cluster.spec import parse_cluster
from testbed.cluster.system import lacking
from testbed.records.cell import Cell
from testbed.records.store import cell_key
from testbed.studies.published.emulate import (
    FOLDER,
    NO_INTERVAL,
    WITHIN_NOISE,
    count_emulated,
    emulate,
    emulation_to_markdown,
    judge,
)
from testbed.studies.published.lines import Comparison, gain
from testbed.studies.published.shapes import HEADERS, Setting, Shape, published_shapes, sweep_of
from testbed.studies.published.study import PAPER_SHAPES
from testbed.sweeping.study import Measured, Study, carry_out_study, find_study

PUBLISHED = Path(__file__).parents[2] / "runs" / "published" / "paper-shapes.json"
HERE = Setting("resnet50-v100", 32, 1e-3, 1.25e-9)
SHAPE = Shape("Paper A", "resnet50, 10GbE", "dear over wfbp", "wfbp", "dear", HERE)
LINE = gain("Paper A", "resnet50, 10GbE", "dear over wfbp", 1.3, 1.2, "")


def measured(scheduler, step_s, *, spread_s=0.01, predicted_s=None, here=HERE, error=""):
    """A cell as a run leaves it, its times in seconds of the emulated cluster."""
    factor = here.dilation
    cell = Cell(
        status="failed" if error else "ok",
        backend="mpi-ring",
        workload=f"replay:{here.trace}",
        num_workers=here.workers,
        config=here.cell(scheduler),
        dilation=factor,
        error=error,
        step_time_s=None if error else factor * step_s,
        step_time_low_s=None if spread_s is None else factor * (step_s - spread_s),
        step_time_high_s=None if spread_s is None else factor * (step_s + spread_s),
        predicted_step_time_s=factor * (step_s if predicted_s is None else predicted_s),
    )
    return {cell_key(cell.config): cell}


def judged(*cells, shape=SHAPE, line=LINE, lacking=None):
    (found,) = judge([shape], [line], {k: v for c in cells for k, v in c.items()}, lacking).lines
    return found


def test_every_shape_repeats_a_published_line_and_fits_the_machine():
    simulated = msgspec.json.decode(PUBLISHED.read_bytes(), type=Comparison).lines
    shapes = published_shapes()
    emulation = judge(shapes, simulated, {}, "no root")
    assert len(emulation.lines) == len(shapes) == len(set(shapes))
    for shape, line in zip(shapes, emulation.lines, strict=True):
        assert shape.here.trace in shipped_traces()
        assert shape.here.workers <= 8
        spec = parse_cluster(shape.here.cluster)
        assert spec.kernel_bps(1, "up") < 1.1e9
        assert (line.slow, line.fast, line.emulated, line.verdict) == (None, None, None, "")
        assert line.reason == "not emulated: no root"
        assert line.simulated_verdict
        if shape.at_least != 1:
            assert line.published == shape.at_least
    cells = sweep_of(shapes).cells
    assert len(cells) == len(set(cells)) <= 10


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (4, 1), (2, 2)])
def test_a_ring_on_the_cluster_takes_the_published_time_per_byte(nodes, ranks_per_node):
    here = replace(HERE, nodes=nodes, ranks_per_node=ranks_per_node)
    n = nodes * ranks_per_node
    num_bytes = 1e8
    carried = 2 * (n - 1) / n * num_bytes * HEADERS  # a node's link, one direction
    bps = parse_cluster(here.cluster).link_bps(1, "up")
    assert 8 * carried / bps == pytest.approx(num_bytes * HERE.seconds_per_byte, rel=1e-4)


def test_a_startup_that_starting_takes_anyhow_is_not_waited_twice():
    assert parse_cluster(HERE.cluster).latency_s == pytest.approx(1e-3)
    assert parse_cluster(replace(HERE, startup_s=1e-4).cluster).latency_s == 0


def test_times_are_those_of_the_emulated_cluster():
    line = judged(measured("wfbp", 0.30, predicted_s=0.28), measured("dear", 0.20))
    assert line.slow.emulated_s == pytest.approx(0.30)
    assert line.slow.predicted_s == pytest.approx(0.28)
    assert (line.slow.low_s, line.slow.high_s) == pytest.approx((0.29, 0.31))
    assert line.emulated == pytest.approx(1.5)
    assert line.predicted == pytest.approx(1.4)
    assert (line.verdict, line.predicted_verdict, line.reason) == ("holds", "holds", "")
    assert (line.published, line.simulated, line.simulated_verdict) == (1.3, 1.2, "holds")
    assert (line.published_workers, line.workers) == (32, 4)


@pytest.mark.parametrize(
    ("published", "at_least", "slow_s", "fast_s", "verdict"),
    [
        (1.3, 1.0, 0.2, 0.3, "does not hold"),
        (0.9, 1.0, 0.2, 0.3, "holds"),
        (0.9, 1.0, 0.3, 0.2, "does not hold"),
        (1.322, 1.322, 0.3, 0.2, "holds"),
        (1.322, 1.322, 0.26, 0.2, "does not hold"),
    ],
)
def test_an_inequality_is_judged_on_the_published_side(
    published, at_least, slow_s, fast_s, verdict
):
    line = gain(LINE.paper, LINE.setting, LINE.quantity, published, 1.4, "", at_least)
    shape = replace(SHAPE, at_least=at_least)
    found = judged(measured("wfbp", slow_s), measured("dear", fast_s), shape=shape, line=line)
    assert found.verdict == verdict


def test_doubts_are_told():
    close = judged(measured("wfbp", 0.21), measured("dear", 0.20))
    assert (close.verdict, close.reason) == ("holds", WITHIN_NOISE)
    few = judged(measured("wfbp", 0.3, spread_s=None), measured("dear", 0.2))
    assert (few.verdict, few.reason) == ("holds", NO_INTERVAL)
    sure = judged(measured("wfbp", 0.3), measured("dear", 0.2))
    assert count_emulated([close, few, sure]) == (1, 2, 3)


def test_what_was_not_measured_says_why():
    failed = judged(measured("wfbp", 0.3, error="log\nRankLost: rank 1"), measured("dear", 0.2))
    assert (failed.verdict, failed.reason) == ("", "wfbp failed: RankLost: rank 1")
    absent = judged(measured("wfbp", 0.3), lacking="needs root")
    assert absent.reason == "not emulated: needs root"
    assert judged(measured("wfbp", 0.3)).reason == "not emulated: its cell was not run"
    other = replace(HERE, steps=99)
    assert not judged(measured("wfbp", 0.3, here=other), measured("dear", 0.2)).verdict


def test_a_shape_without_its_line_is_refused():
    with pytest.raises(UsageError, match=r"no simulated line Paper A / .* / dear over wfbp"):
        judge([SHAPE], [msgspec.structs.replace(LINE, setting="another")], {})


def test_the_table_has_both_simulations_beside_what_was_measured():
    far = replace(SHAPE, setting="vgg, IB", here=replace(HERE, trace="vgg16bn-v100", nodes=32))
    lines = (LINE, msgspec.structs.replace(LINE, setting="vgg, IB"))
    cells = measured("wfbp", 0.30, predicted_s=0.28) | measured("dear", 0.20)
    emulation = judge((SHAPE, far), lines, cells)
    assert count_emulated(emulation.lines) == (1, 0, 1)
    text = emulation_to_markdown(emulation)
    assert "1 of 1 emulated inequalities hold, 0 are undecided" in text
    assert "one run vary). 1 could not be emulated here." in text
    assert (
        "| resnet50, 10GbE | dear over wfbp | 1.3 | 1.2 | holds | 280.0 / 200.0 | 1.400 | holds "
        "| 300.0 / 200.0 | 1.500 | holds |"
    ) in text
    assert "| vgg, IB | dear over wfbp | 1.3 | 1.2 | holds |  |  |  |  |  | not emulated (1) |" in (
        text
    )
    assert "\n(1) not emulated: its cell was not run\n" in text
    assert "resnet50, 10GbE: 4 workers for the paper's 32 workers on `nodes=4,rate=" in text
    assert "vgg, IB: the paper's 32 workers on `nodes=32,rate=" in text


class Recorded:
    """Hands out recorded cells; keeps what it was asked for."""

    def __init__(self, cells, stop_at=math.inf):
        self.cells, self.stop_at, self.asked = cells, stop_at, []

    def __call__(self, config, json_path, log_path):
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(config.scheduler)
        return self.cells[cell_key(config)]


def test_an_interrupted_emulation_goes_on_where_it_was(tmp_path):
    cells = measured("wfbp", 0.3) | measured("dear", 0.2)
    first, second, third = Recorded(cells, stop_at=1), Recorded(cells), Recorded(cells)
    stopped = emulate(tmp_path, (SHAPE,), (LINE,), runner=first, out=io.StringIO())
    assert stopped == Measured({}, 130)
    done = emulate(tmp_path, (SHAPE,), (LINE,), runner=second, out=io.StringIO())
    assert sorted(first.asked + second.asked) == ["dear", "wfbp"]
    assert done.status == 0
    again = emulate(tmp_path, (SHAPE,), (LINE,), runner=third, out=io.StringIO())
    assert (third.asked, again.files) == ([], done.files)
    (line,) = json.loads(done.files["paper-shapes-emulated.json"])["lines"]
    assert (line["emulated"], line["verdict"]) == (pytest.approx(1.5), "holds")


def test_a_failed_cell_shows_in_table_and_status_and_is_run_again(tmp_path):
    cells = measured("wfbp", 0.3) | measured("dear", 0.2, error="boom")
    done = emulate(tmp_path, (SHAPE,), (LINE,), runner=Recorded(cells), out=io.StringIO())
    assert done.status == 1
    assert "\n(1) dear failed: boom\n" in done.files["paper-shapes-emulated.md"]
    later = Recorded(measured("wfbp", 0.3) | measured("dear", 0.2))
    assert emulate(tmp_path, (SHAPE,), (LINE,), runner=later, out=io.StringIO()).status == 0
    assert later.asked == ["dear"]


def test_a_folder_of_other_settings_is_not_mixed_up(tmp_path):
    cells = measured("wfbp", 0.3) | measured("dear", 0.2)
    emulate(tmp_path, (SHAPE,), (LINE,), runner=Recorded(cells), out=io.StringIO())
    other = replace(SHAPE, here=replace(HERE, steps=99))
    with pytest.raises(UsageError, match="holds cells of other settings"):
        emulate(tmp_path, (other,), (LINE,), runner=Recorded(cells), out=io.StringIO())


def test_emulation_can_be_left_out():
    assert find_study("paper-shapes").measure is not None
    assert find_study("paper-shapes:emulate=1") is PAPER_SHAPES
    left_out = find_study("paper-shapes:emulate=0")
    assert (left_out.measure, left_out.compute) == (None, PAPER_SHAPES.compute)
    with pytest.raises(UsageError, match="has no option 'emulated'; known options: emulate"):
        find_study("paper-shapes:emulated=0")
    with pytest.raises(UsageError, match="'accuracy-compressed' has no options"):
        find_study("accuracy-compressed:emulate=0")


def test_a_study_that_measures_keeps_both_parts(tmp_path, monkeypatch):
    def measure(folder, files):
        assert (folder / "mine.json").read_text() == files["mine.json"] == "{}\n"
        return Measured({"cells.md": "# cells\n"}, 1)

    monkeypatch.chdir(tmp_path)
    study = Study("mine", "two parts", lambda: {"mine.md": "# text\n", "mine.json": "{}\n"})
    study = replace(study, measure=measure)
    out = io.StringIO()
    assert carry_out_study(study, None, None, {}, out) == 1
    (folder,) = Path("runs/results").glob("mine-*")
    assert out.getvalue() == f"# text\n\n# cells\n\n{folder}\n"
    assert {p.name for p in folder.iterdir()} == {"mine.md", "mine.json", "cells.md"}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_a_tiny_setting_is_emulated_end_to_end(tmp_path):
    """Twenty small messages, each after a start-up of 5 ms, against one."""
    tensors = tuple(
        TraceTensor(name=f"w{i}", num_elements=1000, forward_s=1e-4, backward_s=1e-4)
        for i in range(20)
    )
    trace = Trace(name="tiny", device="none", batch_size=1, tensors=tensors)
    save_trace(trace, tmp_path / "tiny.json")
    here = Setting(
        f"{tmp_path / 'tiny.json'}", 64, 5e-3, 1e-7, nodes=2, dilation=2, warmup=2, steps=8
    )
    shape = replace(SHAPE, fast="sequential", here=here)
    done = emulate(tmp_path / "out", (shape,), (LINE,), out=io.StringIO())
    logs = "\n".join(p.read_text() for p in (tmp_path / "out" / FOLDER / "cells").glob("*.log"))
    assert done.status == 0, logs
    (line,) = json.loads(done.files["paper-shapes-emulated.json"])["lines"]
    assert line["cluster"].startswith("nodes=2,rate=")
    assert line["slow"]["emulated_s"] >= 20 * 5e-3
    assert line["verdict"] in ("holds", "does not hold")
    assert "| dear over wfbp |" in done.files["paper-shapes-emulated.md"]
