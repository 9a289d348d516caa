"""What a forked process takes from the stub in its place, so that it is as if freshly started."""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import io
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from testbed.forking import FORKED, OWNER, SERVER

MAX_DESCRIPTORS = 250
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

# What libraries, Python and the allocator read while they load, or keep from then on.
_READ_AT_LOAD = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("MALLOC_", "GLIBC_TUNABLES", "LD_", "PYTHON", "LANG", "LC_", "TZ"),
    *("CUDA_", "NVIDIA_", "TORCH", "PYTORCH_", "THP_", "MPI4PY_", "SKLEARN_"),
    *("HF_", "TRANSFORMERS_", "HOME", "TMP", "TEMP", "XDG_"),
)
_OWN_LIBRARIES = str(Path(sys.prefix) / "lib")


Identity = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """A process that a stub asks for.

    Attributes:
        stub: the stub's process id.
        modules: what the process will load.
        command: `python -m module arguments`.
        environment: its variables.
        descriptors: number that it is to have -> our number.
        ignored: signals that it ignores from the start.
        blocked: signals that it blocks from the start.
        umask: of its files.
    """

    stub: int
    modules: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: Mapping[int, int]
    ignored: frozenset[int]
    blocked: frozenset[int]
    umask: int


def read_request(connection: socket.socket) -> Request:
    """What a stub asks for.

    Raises:
        OSError: the stub has ended, or sent nothing in time.
        PermissionError: it belongs to another user.
        ValueError: it is no stub.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    stub, user, group = struct.unpack("3i", peer)
    if (user, group) != (os.geteuid(), os.getegid()):
        raise PermissionError(f"process {stub} belongs to user {user}, group {group}")
    size = 4 * MAX_DESCRIPTORS
    numbers, descriptors, _, _ = socket.recv_fds(connection, size, MAX_DESCRIPTORS)
    try:
        given = array.array("i", numbers)
        return _described(stub, dict(zip(given, descriptors, strict=True)))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _described(stub: int, descriptors: Mapping[int, int]) -> Request:
    """A request as /proc shows it."""
    proc = Path("/proc", str(stub))
    pairs = os.fsdecode((proc / "environ").read_bytes()).split("\0")
    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    words = os.fsdecode((proc / "cmdline").read_bytes()).split("\0")[:-1]
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    _, modules, *command = words[words.index(environment[SERVER]) + 1 :]
    return Request(
        stub,
        tuple(filter(None, modules.split(","))),
        tuple(command),
        environment,
        descriptors,
        _signals(status["SigIgn"]),
        _signals(status["SigBlk"]),
        int(status["Umask"], 8),
    )


def _signals(mask: str) -> frozenset[int]:
    """Numbers of the signals of a mask as /proc prints it.

    Example:
        >>> sorted(_signals("0000000000004002"))
        [2, 15]
    """
    bits = int(mask, 16)
    return frozenset(n for n in range(1, signal.NSIG) if bits >> (n - 1) & 1)


def identity_of(environment: Mapping[str, str]) -> Identity:
    """The variables that are read while libraries load: they decide what is forked from what.

    The wheel of Open MPI has its `mpirun` put this Python's own `lib` on LD_LIBRARY_PATH. Nothing
    but MPI is there, and it finds its parts without the variable. What torchrun tells its ranks
    is read after they have loaded.

    Example:
        >>> sorted(identity_of({"OMP_NUM_THREADS": "2", "EDITOR": "ed"}))
        [('OMP_NUM_THREADS', '2')]
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_LOAD) and not name.startswith("TORCHELASTIC_")
    }
    folders = found.pop("LD_LIBRARY_PATH", "").split(":")
    others = [folder for folder in folders if folder not in ("", _OWN_LIBRARIES)]
    return frozenset([*found.items(), *(("LD_LIBRARY_PATH", folder) for folder in others)])


def can_be_forked(request: Request) -> bool:
    """Whether it asks for a module of this Python, and its folder holds no testbed of its own."""
    if request.command[:2] != (sys.executable, "-m"):
        return False
    own = Path(f"/proc/{request.stub}/cwd/testbed")
    return not own.exists() or own.samefile(Path(__file__).parents[1])


def surroundings_of(pid: int) -> tuple[object, ...]:
    """What a fork cannot change, or what libraries have read while they loaded."""
    proc = Path("/proc", str(pid))
    spaces = {space.name: os.readlink(space) for space in (proc / "ns").iterdir()}
    texts = [(proc / name).read_text() for name in ("cgroup", "oom_score_adj")]
    share = (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid))
    stack = resource.prlimit(pid, resource.RLIMIT_STACK)  # of threads to come
    return (spaces, texts, share, os.sched_getaffinity(pid), stack, os.readlink(proc / "root"))


def take_limits(request: Request) -> None:
    """Folder, file mode and limits of the stub, for this process and its children.

    Raises:
        OSError, ValueError: one of them is above what this process may have.
    """
    stub = request.stub
    os.chdir(f"/proc/{stub}/cwd")
    os.umask(request.umask)
    for limit in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
        theirs = resource.prlimit(stub, limit)
        if theirs != resource.getrlimit(limit):
            resource.setrlimit(limit, theirs)


def become(request: Request) -> NoReturn:
    """Make this process the one that was asked for, run its module and end."""
    _take_descriptors(request.descriptors)
    _take_signals(request)
    os.setsid()
    os.environ.clear()
    os.environ.update({**request.environment, FORKED: str(os.getpid())})
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.path_importer_cache.clear()
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    if "numpy" in sys.modules:  # Python's own reseeds itself
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    take_title(request.command)
    _, _, module, *arguments = request.command
    sys.orig_argv[:] = request.command
    sys.argv[:] = ["-m", *arguments]
    interrupted = False
    sys.modules.pop(module, None)  # loaded before the fork by another that imports it
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # as Python itself ends
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        interrupted = isinstance(error, KeyboardInterrupt)
    _leave(status, interrupted)


def _leave(status: int, interrupted: bool) -> NoReturn:
    """End in the order of Python's own end, but leave out that of the modules.

    Clearing modules would first copy all of the memory that is shared with the server.

    Args:
        status: exit status.
        interrupted: end by SIGINT instead.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    mpi = sys.modules.get("mpi4py.MPI")
    started = mpi is not None and mpi.Is_initialized()
    if mpi is not None and started and not mpi.Is_finalized():
        mpi.Finalize()  # what mpi4py does once the modules are gone
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if started:
        ctypes.PyDLL(None).exit(status & 0xFF)  # MPICH leaves its launcher only here
    os._exit(status & 0xFF)


def _take_descriptors(descriptors: Mapping[int, int]) -> None:
    """Have exactly these, each under its number."""
    above = max(descriptors, default=2) + 1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in descriptors.items()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in moved.values():
            try:
                os.close(int(name))
            except OSError:
                continue  # that of the listing itself
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _take_signals(request: Request) -> None:
    """Dispositions as Python has them after its start under the stub's."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in request.ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def take_title(command: Sequence[str]) -> None:
    """Have tools show the command instead of the server's own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49
    text = b"\0".join(os.fsencode(word) for word in command)[: end - begin - 1]
    if begin:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def end_descendants(grace_s: float) -> None:
    """End every process below this one: SIGTERM first, SIGKILL after the grace.

    A process may start others while it ends, so this goes on until none is left.
    """
    for child in (family := _descendants()):
        _signal(child, signal.SIGTERM)
    psutil.wait_procs(family, timeout=grace_s)
    while family := _descendants():
        for child in family:
            _signal(child, signal.SIGKILL)
        psutil.wait_procs(family, timeout=grace_s)


def _descendants() -> list[psutil.Process]:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return []  # found without reading all processes of the machine
    family: list[psutil.Process] = psutil.Process().children(recursive=True)
    return family


def _signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the listing and the signal
        process.send_signal(signum)


def end_with(parent: int) -> None:
    """End when the process that forked this one does, even by kill -9."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def root_of(environment: Mapping[str, str], alone: bool) -> int:
    """The process below which all processes of this one's job on this machine are.

    The owner of the fork server, if this process descends from it; else what started this one: a
    launcher's daemon.

    Args:
        environment: of this process.
        alone: whether this process is the whole job.
    """
    owner = int(environment.get(OWNER) or 0)
    above = {process.pid for process in psutil.Process().parents()}
    if owner in above or owner == os.getpid():
        return owner
    return os.getpid() if alone else os.getppid()
