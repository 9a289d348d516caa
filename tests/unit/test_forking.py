"""A forked process is as if freshly started, and ends with whoever it belongs to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from testbed.forking import OWNER, SERVER, fork_server, how_started, through_stub
from testbed.forking.process import prctl

ROOT = Path(__file__).parents[2]
TOLD = (sys.executable, "-m", "tests.harness.told")
SAFE = {"PYTHONSAFEPATH": "1"}
OTHER = {"OMP_NUM_THREADS": "3"}
GONE_S = 20.0
PR_CAPBSET_DROP, CAP_SYS_RESOURCE = 24, 24

Environment = dict[str, str]


@pytest.fixture(scope="module")
def forks() -> Iterator[Environment]:
    base = {k: v for k, v in os.environ.items() if k != SERVER}
    paths = [str(ROOT), *filter(None, [base.get("PYTHONPATH")])]
    with fork_server({**base, "PYTHONPATH": os.pathsep.join(paths)}) as environment:
        assert SERVER in environment
        for other in (OTHER, SAFE):  # their servers belong to no test alone
            tell({**environment, **other}, "ids")
        yield environment


def start(
    environment: Mapping[str, str],
    *arguments: str,
    modules: tuple[str, ...] = (),
    answer_s: float = 60.0,
    **more: Any,
) -> subprocess.Popen[str]:
    command = through_stub([*TOLD, *arguments], environment, modules, answer_s)
    return subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, text=True, **more
    )


def tell(environment: Mapping[str, str], *arguments: str, **more: Any) -> Any:
    with start(environment, *arguments, **more) as process:
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0
    return json.loads(text)


def fresh(environment: Mapping[str, str]) -> Environment:
    return {**environment, SERVER: "none"}


def await_gone(*pids: int) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    assert psutil.wait_procs(processes, GONE_S)[1] == []


@pytest.fixture(params=["compiled", "python"])
def stubbed(request: pytest.FixtureRequest, forks: Environment, tmp_path: Path) -> Environment:
    """The server, to be asked by either kind of stub."""
    if request.param == "python":  # a folder without a compiled one
        away = tmp_path / "0"
        away.symlink_to(forks[SERVER])
        return {**forks, SERVER: str(away)}
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    assert wait_for(lambda: is_compiled(forks))
    return forks


def is_compiled(forks: Environment) -> bool:
    """The stub is compiled once there have been several requests."""
    tell(forks, "ids")
    return os.access(Path(forks[SERVER]).with_name("stub"), os.X_OK)


def wait_for(happened: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + GONE_S
    while not happened() and time.monotonic() < end_s:
        time.sleep(0.01)
    return happened()


def unusual() -> None:
    """What a launcher may set before it starts a program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.parametrize(
    ("before", "environment"),
    [(None, {}), (unusual, {}), (None, SAFE)],
    ids=["usual", "unusual", "safe-path"],
)
def test_it_has_what_a_fresh_process_has(
    stubbed: Environment,
    before: Callable[[], None] | None,
    environment: Environment,
    tmp_path: Path,
) -> None:
    numbered = fcntl.fcntl(0, fcntl.F_DUPFD, 57)
    words = ("surroundings", "", "two words", "--json", "\u00e4\udcff")
    odd = {**environment, "ODD": "a line\nand = another", "NOT_UTF8": "\udcff", "EMPTY": ""}
    more = {
        "preexec_fn": before,
        "pass_fds": [numbered],
        "cwd": tmp_path,
        "stdin": subprocess.DEVNULL,
        "start_new_session": True,
    }
    try:
        forked = tell({**stubbed, **odd}, *words, **more)
        started = tell(fresh({**stubbed, **odd}), *words, **more)
    finally:
        os.close(numbered)
    for found in (forked, started):
        found["cmdline"] = found["cmdline"].rstrip("\0")
        pipe, inherited = found["descriptors"].pop("1")
        assert pipe.startswith("pipe:")
        assert inherited
    assert str(numbered) in forked["descriptors"]
    assert forked == started


def ways(environment: Environment, *arguments: str) -> tuple[int, str, str]:
    command = through_stub([*TOLD, *arguments], environment, [])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


ENDS = (
    "exit 0",
    "exit 7",
    "exit 256",
    "say why",
    "kill 9",
    "kill 15",
    "kill 6",
    "raise ValueError",
)


@pytest.mark.parametrize("words", [*ENDS, "raise KeyboardInterrupt"])
def test_the_stub_ends_as_a_fresh_process_does(stubbed: Environment, words: str) -> None:
    status, out, errors = ways(stubbed, *words.split())
    expected, expected_out, expected_errors = ways(fresh(stubbed), *words.split())
    assert (status, out) == (expected, expected_out)
    assert (out == "left in order\n") == (not words.startswith("kill"))
    assert errors.splitlines()[-1:] == expected_errors.splitlines()[-1:]


def test_the_stub_passes_signals_on(stubbed: Environment) -> None:
    with start(stubbed, "stay") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.terminate()
        assert process.stdout.read() == "asked\n"
    assert process.returncode == 5
    await_gone(pid)


@pytest.mark.parametrize("whom", ["stub", "process", "keeper"])
def test_none_of_the_three_outlives_another(stubbed: Environment, whom: str) -> None:
    with start(stubbed, "stay") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        keeper = psutil.Process(pid).ppid()
        os.kill({"stub": process.pid, "process": pid, "keeper": keeper}[whom], signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    await_gone(pid, keeper)


def test_a_stopped_process_ends_with_its_stub(stubbed: Environment) -> None:
    with start(stubbed, "stay") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()
    await_gone(pid)


def test_what_a_process_leaves_behind_is_ended(stubbed: Environment) -> None:
    with start(stubbed, "leave-behind") as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
    assert process.returncode == 0
    assert not psutil.pid_exists(left)


OWNS = """
import os, subprocess, sys
from testbed.forking import fork_server, through_stub
with fork_server(os.environ) as environment:
    other = {**environment, "OMP_NUM_THREADS": "1"}
    told = [sys.executable, "-m", "tests.harness.told", "stay"]
    for variables in (environment, other):
        process = subprocess.Popen(through_stub(told, variables, []), env=variables)
    print(environment["TESTBED_FORK_SERVER"], flush=True)
    process.wait()
"""


def test_nothing_outlives_the_owner(forks: Environment) -> None:
    environment = {k: v for k, v in forks.items() if k != SERVER}
    command = [sys.executable, "-c", OWNS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        lines = [owner.stdout.readline() for _ in range(3)]
        (path,) = (line.strip() for line in lines if "/" in line)
        pids = [int(line) for line in lines if "/" not in line]
        family = [p.pid for p in psutil.Process(owner.pid).children(recursive=True)]
        assert len(pids) == 2
        assert set(pids) < set(family)
        owner.kill()
    await_gone(*family)
    assert not Path(path).parent.exists()


def test_a_killed_server_takes_all_with_it(forks: Environment) -> None:
    base = {k: v for k, v in forks.items() if k != SERVER}
    with fork_server(base) as environment:
        (server,) = (
            p.pid for p in psutil.Process().children() if environment[SERVER] in p.cmdline()
        )
        with start(environment, "stay") as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            os.kill(server, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        await_gone(pid)
        assert ways(environment, ["exit", "7"][0], "7")[0] == 7  # afresh


def test_a_stub_whose_server_s_owner_has_ended_starts_nothing(stubbed: Environment) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    without = {**stubbed, SERVER: "/no/server", OWNER: str(ended.pid)}
    command = through_stub([sys.executable, "-m", "tests.harness.told", "ids"], stubbed, [])
    command[command.index(stubbed[SERVER])] = without[SERVER]
    done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")
    alive = {**without, OWNER: str(os.getpid())}
    done = subprocess.run(command, env=alive, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_modules_are_loaded_once_and_before_the_fork(forks: Environment) -> None:
    names = ("colorsys", "wave")
    assert tell(forks, "loaded", *names) == [False, False]
    assert tell(forks, "loaded", *names, modules=names) == [True, True]
    assert tell(forks, "loaded", *names) == [True, True]
    assert tell(fresh(forks), "loaded", *names) == [False, False]


def test_another_identity_has_another_server(forks: Environment) -> None:
    *_, own = tell(forks, "ids")
    assert tell({**forks, "EDITOR": "ed", "OMPI_MCA_btl": "tcp"}, "ids")[-1] == own
    threads = {**forks, **OTHER}
    *_, other = tell(threads, "ids")
    assert other != own
    assert tell(threads, "ids")[-1] == other


def pid_of_process(environment: Environment, process: subprocess.Popen[str]) -> bool:
    """Whether it was started afresh: the stub became it."""
    text, _ = process.communicate(timeout=60)
    return bool(json.loads(text)[0] == process.pid)


def starts_afresh(environment: Environment, **more: Any) -> bool:
    with start(environment, "ids", **more) as process:
        return pid_of_process(environment, process)


def test_it_is_forked_at_all(stubbed: Environment) -> None:
    assert not starts_afresh(stubbed)
    assert starts_afresh(fresh(stubbed))


def other_cores() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def other_stacks() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, resource.RLIM_INFINITY))


@pytest.mark.parametrize("other", [other_cores, other_stacks, lambda: os.nice(3)])
def test_what_is_not_changed_after_a_fork_starts_afresh(
    stubbed: Environment, other: Callable[[], None]
) -> None:
    if other is other_cores and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core")
    assert starts_afresh(stubbed, preexec_fn=other)


def test_another_network_starts_afresh(stubbed: Environment) -> None:
    unshare = ["unshare", "--net"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    command = [*unshare, *through_stub([*TOLD, "ids"], stubbed, [])]
    with subprocess.Popen(command, env=stubbed, stdout=subprocess.PIPE, text=True) as process:
        assert pid_of_process(stubbed, process)


def test_a_folder_with_a_testbed_of_its_own_starts_afresh(
    stubbed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "testbed").mkdir()
    (tmp_path / "testbed/__init__.py").touch()
    assert starts_afresh({**stubbed, "PYTHONPATH": stubbed["PYTHONPATH"]}, cwd=tmp_path)


def test_a_server_that_hangs_means_a_fresh_start(stubbed: Environment) -> None:
    *_, server = tell(stubbed, "ids")
    os.kill(server, signal.SIGSTOP)
    try:
        with start(stubbed, "ids", answer_s=0.3) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())[0] == process.pid
            assert process.wait(GONE_S) == 0
            os.kill(server, signal.SIGCONT)  # which holds this output in the request, unread
            assert process.stdout.read() == ""
    finally:
        os.kill(server, signal.SIGCONT)
    assert not starts_afresh(stubbed)


def test_a_server_that_was_stopped_does_not_keep_its_owner(
    forks: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.forking.END_S", 0.2)
    with fork_server({k: v for k, v in forks.items() if k != SERVER}) as environment:
        *_, server = tell(environment, "ids")
        os.kill(server, signal.SIGSTOP)
    assert not psutil.pid_exists(server)


def test_a_stub_that_went_on_alone_is_not_forked_too(forks: Environment, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    (tmp_path / "waits.py").write_text(f"open({str(fifo)!r}).close()")
    base = {k: v for k, v in forks.items() if k != SERVER}
    paths = os.pathsep.join([base["PYTHONPATH"], str(tmp_path)])
    with fork_server({**base, "PYTHONPATH": paths}) as environment:
        with start(environment, "ids", modules=("waits",), answer_s=0.3) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())[0] == process.pid
            fifo.write_text("")  # the server goes on
            assert process.stdout.read() == ""
        assert not starts_afresh(environment)


# Keeps a process for a stub that has closed its connection.
KEEPS = """
import os, socket
from testbed.forking import process, server
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
theirs.close()
request = process.Request(os.getpid(), (), (), {}, {}, frozenset(), frozenset(), 0o022)
if (keeper := os.fork()) == 0:
    os.register_at_fork(before=lambda: os.write(1, b"forked"))
    server._keep(ours, request, os.getppid())
    os._exit(0)
os.waitpid(keeper, 0)
"""


def test_nothing_is_forked_once_the_stub_has_hung_up(forks: Environment) -> None:
    command = [sys.executable, "-c", KEEPS]
    assert subprocess.run(command, env=forks, capture_output=True, check=True).stdout == b""


def test_who_is_no_stub_leaves_the_server_as_it_was(forks: Environment) -> None:
    *_, server = tell(forks, "ids")
    before = len(os.listdir(f"/proc/{server}/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(forks[SERVER])
        socket.send_fds(stranger, [b"five."], [stranger.fileno()])
        assert stranger.recv(1) == b""
    assert tell(forks, "ids")[-1] == server
    assert len(os.listdir(f"/proc/{server}/fd")) == before


# A server whose limit is lower than its stub's, and which may not raise it.
LOW = """
import json, os, resource, subprocess, sys
from testbed.forking import fork_server, through_stub
with fork_server(os.environ) as environment:
    command = through_stub([sys.executable, "-m", "tests.harness.told", "ids"], environment, [])
    *_, server = json.loads(subprocess.check_output(command, env=environment))
    resource.prlimit(server, resource.RLIMIT_NOFILE, (99, 99))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as stub:
        print(json.loads(stub.stdout.read())[0] == stub.pid)
"""


def test_a_limit_that_the_server_may_not_raise_means_a_fresh_start(forks: Environment) -> None:
    base = {k: v for k, v in forks.items() if k != SERVER}
    done = subprocess.run(
        [sys.executable, "-c", LOW],
        env=base,
        capture_output=True,
        text=True,
        preexec_fn=lambda: prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE),
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_supervisor_waits_for_what_was_forked_for_its_cell(forks: Environment) -> None:
    cell = through_stub([*TOLD, "stay-deaf"], forks, [])
    command = [sys.executable, "-m", "testbed.sweeping.supervise", "0.2", *cell]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=forks, **pipes) as supervisor:
        assert supervisor.stdout is not None
        left = int(supervisor.stdout.readline())
        (stub,) = psutil.Process(supervisor.pid).children()
        stub.kill()
        assert supervisor.wait(GONE_S) == 128 + signal.SIGKILL
        assert not psutil.pid_exists(left)


def test_another_program_is_itself(stubbed: Environment) -> None:
    echo = ["echo", "-m", "hello"]
    assert through_stub(echo, stubbed, []) == echo
    told = through_stub([*TOLD, "ids"], stubbed, [])
    command = [*told[: -len(TOLD) - 1], *echo]
    done = subprocess.run(command, env=stubbed, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "-m hello\n")


def test_a_server_with_threads_forks_nothing_and_says_so(
    forks: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    base = {k: v for k, v in forks.items() if k != SERVER}
    with fork_server(base) as environment:
        assert starts_afresh(environment, modules=("tests.harness.threaded",))
        assert starts_afresh(environment)
    assert capfd.readouterr().err.count("the fork server has 2 threads, 0 open files after") == 2


def test_a_module_that_is_not_there_is_the_matter_of_whoever_needs_it(forks: Environment) -> None:
    assert not starts_afresh(forks, modules=("no_such_module",))


def test_generators_are_those_of_a_fresh_process(forks: Environment) -> None:
    modules = ("numpy", "torch")
    first, second = (tell(forks, "draw", modules=modules) for _ in range(2))
    assert not set(first) & set(second)


def test_variables_that_name_a_server_are_left_as_they_are(forks: Environment) -> None:
    with fork_server(forks) as again:
        assert again == forks
    with fork_server({SERVER: "none"}) as none:
        assert none == {SERVER: "none"}
        assert through_stub(["x"], none, []) == ["x"]


def test_a_path_too_long_for_a_socket_means_fresh_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with fork_server({}) as environment:
        assert environment == {}
    assert list(folder.iterdir()) == []


def test_this_process_is_fresh() -> None:
    assert how_started() == "fresh"
