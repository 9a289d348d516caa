"""How far a run is: counted, left in a file, and shown."""

import io
import threading

from testbed.base.config import RunConfig
from testbed.launch.worker import StepsDone
from testbed.records.progress import RunProgress, read_progress, run_bar, write_progress
from testbed.sweeping.executor import progress_file
from testbed.sweeping.progress import label, reporting
from testbed.training.protocol import StepRecord, StepReport


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self):
        return True


def step(done, time_s):
    return StepRecord(done, 0.0, 0.01, time_s, True, StepReport(0.0), time_s - 0.01, time_s)


def test_the_time_of_a_step_is_that_of_the_steps_since_it_was_last_told():
    steps = StepsDone()
    steps.begin(10, 100)
    assert steps.now("starting") == RunProgress("starting", 0, 100)
    steps.after_step(step(14, 0.8))
    told = steps.now("computing step 14")
    assert (told.done, told.total, told.step_s) == (14, 100, 0.2)
    assert told.left_s == 86 * 0.2
    steps.after_step(step(24, 1.8))
    assert round(steps.now("").step_s, 9) == 0.1
    assert round(steps.now("").step_s, 9) == 0.1  # none since: as before
    steps.after_step(step(100, 5.0))
    assert steps.now("").left_s == 0


def test_what_is_written_is_read_and_a_longer_text_leaves_nothing_behind(tmp_path):
    path = tmp_path / "told"
    assert not write_progress(path, RunProgress("no such file is made"))
    assert read_progress(path) is None
    path.touch()
    assert read_progress(path) is None
    for state in ("waiting for '" + "a" * 500, "é" * 300, "short"):
        assert write_progress(path, RunProgress(state, 3, 9, 0.5, 3.0))
        told = read_progress(path)
        assert told is not None
        assert state.startswith(told.state)
        assert told.done == 3
    assert told.state == "short"


def test_a_bar_is_drawn_and_the_cursor_is_never_hidden():
    out, asked = Terminal(), threading.Event()

    def now():
        asked.set()
        return RunProgress("computing step 31", 30, 100, 0.0125, 0.875)

    with run_bar(now, out):
        assert asked.wait(30)
    text = out.getvalue()
    assert "30/100" in text
    assert "12.5 ms a step, about 875 ms left" in text
    assert "\x1b[?25l" not in text


def cells():
    return [RunConfig(backend="gloo", repeat=r) for r in range(2)]


def test_a_sweep_tells_the_step_of_the_cell_that_runs_and_what_is_left(tmp_path):
    for out in (Terminal(), io.StringIO()):
        told = progress_file(tmp_path / "cell.json")
        told.touch()
        with reporting(cells(), out) as reporter:
            reporter.started(cells()[0], told)
            write_progress(told, RunProgress("computing step 5", 4, 10, 0.0125, 0.075))
            reporter.tick()
            reporter.ended(cells()[0], "ok", 8.0, "")
            told.unlink()  # as its runner does
            reporter.tick()
            reporter.started(cells()[1], told)
            reporter.tick()
        text = out.getvalue()
        assert "12.5 ms" in text
        assert "about 8 s left" in text
        assert "1/2" in text


def test_a_quiet_sweep_tells_failures_alone(tmp_path):
    out = io.StringIO()
    with reporting(cells(), out, quiet=True) as reporter:
        reporter.started(cells()[0], tmp_path / "told")
        reporter.ended(cells()[0], "ok", 8.0, "")
        reporter.started(cells()[1], tmp_path / "told")
        reporter.ended(cells()[1], "failed", 8.0, "exit status 1\nRankLost: rank 1")
    assert out.getvalue() == f"{label(cells()[1])}: failed: RankLost: rank 1\n"
