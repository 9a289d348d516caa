"""A run at a real terminal shows a bar, leaves the terminal in order, and is quiet if told to."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest

RUN = ("run", "--workload", "digits-mlp", "--verify-steps", "0", "--workers", "2")
LIMIT_S = 120


def at_terminal(*arguments, stop_when=None):
    """Exit status and all that a command wrote to a terminal; Ctrl-C once a pattern was seen."""
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "testbed", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    seen = b""
    while select.select([main], [], [], LIMIT_S)[0]:
        try:
            part = os.read(main, 65536)
        except OSError:  # the last process that had it open has ended
            break
        seen += part
        if stop_when and re.search(stop_when, seen):
            process.send_signal(2)
            stop_when = None
    os.close(main)
    return process.wait(LIMIT_S), seen


@pytest.mark.parametrize("backend", ["gloo", "loopback"])
def test_a_bar_stands_at_a_terminal_and_the_result_stands_alone(backend):
    # So many steps that the bar is drawn between two of them, which it is once a second.
    status, seen = at_terminal(*RUN, "--backend", backend, "--steps", "1500")
    assert status == 0
    assert re.search(rb"\d+/1500", seen)
    assert b"a step, about" in seen
    assert b"\x1b[?25l" not in seen
    plain = re.sub(rb"\x1b\[[0-9;]*[A-Za-z]", b"", seen)
    assert b"\nsame work" in plain or re.search(rb"[\r\n]  same work", plain)


def test_ctrl_c_leaves_no_hidden_cursor():
    status, seen = at_terminal(
        *RUN, "--backend", "gloo", "--steps", "100000", stop_when=rb"a step, about"
    )
    assert status == 130
    assert b"interrupted by SIGINT" in seen
    assert b"\x1b[?25l" not in seen


def test_a_quiet_run_shows_nothing_but_its_result():
    status, seen = at_terminal(*RUN, "--backend", "gloo", "--steps", "50", "--quiet")
    assert status == 0
    assert b"/50" not in seen
    assert b"\x1b" not in seen
    assert b"step time" in seen
