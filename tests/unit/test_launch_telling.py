"""What a long run says while it lasts, and that a short one says nothing."""

import io
import threading

from testbed.launch.progress import WORDS, progress_lines
from testbed.sweeping.executor import _tail


class Heard(io.StringIO):
    """Lets a test wait for the second line."""

    def __init__(self):
        super().__init__()
        self.twice = threading.Event()

    def flush(self):
        if self.getvalue().count("\n") >= 2:
            self.twice.set()


def test_a_long_run_says_again_and_again_what_it_does():
    states = iter(["measuring the link"])
    out = Heard()
    with progress_lines(lambda: next(states, "computing step 3"), out, every_s=1e-3):
        assert out.twice.wait(30)
    first, second, *_ = out.getvalue().splitlines()
    assert first.startswith("testbed: after ")
    assert first.endswith(": measuring the link")
    assert second.endswith(": computing step 3")


def test_nothing_is_said_after_the_end_and_by_a_run_that_is_over_before():
    out = io.StringIO()
    with progress_lines(lambda: "computing", out, every_s=3600.0):
        assert any(thread.name == "telling" for thread in threading.enumerate())
    assert not any(thread.name == "telling" for thread in threading.enumerate())
    assert out.getvalue() == ""


def test_what_a_sweep_leaves_out_of_errors_is_what_a_run_tells(tmp_path):
    log = tmp_path / "cell.log"
    log.write_text("the reason\n" + f"{WORDS} 10 s: rank 0 is computing step 3\n" * 30)
    assert _tail(log) == "the reason"


def test_an_error_inside_ends_it_too():
    try:
        with progress_lines(lambda: "computing", io.StringIO(), every_s=3600.0):
            raise RuntimeError("lost")
    except RuntimeError:
        assert not any(thread.name == "telling" for thread in threading.enumerate())
    else:
        raise AssertionError("the error was swallowed")
