"""Files that commands write: checked before any work, then written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.base.errors import UsageError
from testbed.base.files import load_link, load_trace, save_link, save_trace, write_atomically
from testbed.cli import main
from testbed.commands.checks import check_output
from tests.harness.runs import answer
from tests.unit.crossing_cases import LINK_A, TRACE_A
from tests.unit.test_diff import folder_of, made

ROOT = Path(__file__).parents[2]
WRITERS = {
    "bytes": lambda path: write_atomically(path, bytes(1000)),
    "trace": lambda path: save_trace(TRACE_A, path),
    "link": lambda path: save_link(LINK_A, path),
}


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """This process cannot write beyond so many bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Writing


@pytest.mark.parametrize("what", WRITERS)
def test_what_cannot_be_written_whole_leaves_the_old_file(what, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="too large") as caught, files_of_at_most(10):
        WRITERS[what](path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_and_a_link_are_replaced(tmp_path):
    path = tmp_path / "file.json"
    save_link(LINK_A, path)
    assert load_link(path) == LINK_A
    save_trace(TRACE_A, path)
    assert load_trace(path) == TRACE_A


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real/file", tmp_path / "link"
    link.symlink_to("real/file")
    for data in (b"first", b"second"):  # made, then replaced
        write_atomically(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
        assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_is_written_into(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(tmp_path / name, b"data")
        assert os.read(reader, 10) == b"data"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert (tmp_path / "link").is_symlink()


def test_what_is_open_already_is_written_into(tmp_path):
    """A file that standard output goes to holds what was printed before and after as well."""
    code = (
        "import sys; from pathlib import Path; from testbed.base.files import write_atomically\n"
        "print('before', flush=True)\n"
        "write_atomically(Path(sys.argv[1]), b'data\\n')\n"
        "print('after')"
    )
    link, told = tmp_path / "link", tmp_path / "told"
    link.symlink_to("/proc/self/fd/1")
    for path in ("/proc/self/fd/1", str(link)):
        command = [sys.executable, "-c", code, path]
        with told.open("wb") as out:
            subprocess.run(command, cwd=ROOT, stdout=out, check=True, timeout=60)
        assert told.read_text() == "before\ndata\nafter\n"
        piped = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
        assert piped.stdout == b"before\ndata\nafter\n"
    assert link.is_symlink()


# Checked before


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    Path("astray").symlink_to("gone/x")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "makes_folder", "told"),
    [
        (".", False, "--json is '.', a folder; expected the name of a file"),
        ("folder", True, "--json is 'folder', a folder"),
        ("no/x", False, "there is no folder 'no'; make it first"),
        ("file/x", False, "there is no folder 'file'"),
        ("file/x/y", True, "there is no folder 'file'"),
        ("astray", False, "there is no folder '.*/gone'"),
    ],
)
def test_what_cannot_be_written_is_told(path, makes_folder, told, here):
    with pytest.raises(UsageError, match=told):
        check_output("--json", Path(path), makes_folder=makes_folder)


def test_what_can_be_written_is_let_be(here):
    for path in ("x", "file", "folder/x", "pipe", "/dev/null", str(here / "x")):
        check_output("--json", Path(path))
    check_output("--json", Path("no/such/x"), makes_folder=True)
    assert {path.name for path in here.iterdir()} == {"file", "folder", "astray", "pipe"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-J", "no/x.json"), "--json is 'no/x.json', but there is no folder 'no'"),
        (("-J", "folder"), "--json is 'folder', a folder"),
        (("--fit", "-o", "folder"), "-o is 'folder', a folder"),
        (("--fit", "-J", "link.json"), "--fit measures a link, no exchanges"),
        (("--hostfile", "hosts"), "--hostfile is 'hosts', but there is no such file"),
    ],
)
def test_the_micro_benchmark_starts_nothing_for_a_file_that_it_cannot_write(words, told, here):
    done = answer("comm", "--backend", "gloo", *words)
    assert (done.status, told in done.err) == (2, True), done.err


# Failing nevertheless


def test_a_file_that_fails_is_told_by_its_name(tmp_path):
    cells = folder_of(tmp_path / "a", [made(1.0)])
    done = answer("diff", cells, cells, "--output", str(tmp_path))
    assert (done.status, str(tmp_path) in done.err) == (2, True), done.err


def test_an_error_that_names_no_file_is_not_taken_for_the_user_s(tmp_path):
    cells = folder_of(tmp_path / "a", [made(1.0)])
    with (
        io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full,
        contextlib.redirect_stdout(full),
        pytest.raises(OSError, match="No space left") as caught,
    ):
        main(["diff", cells, cells])
    assert caught.value.filename is None
