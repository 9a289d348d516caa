"""Lists the files of the project that one gradient enters on its way, from its hook to its mean.

    python -m tests.tools.trace_gradient [CHECKOUT] [--backend mpi-ring,zmq-ps] [--mib 8]

Two ranks under `mpirun` train a model of a single gradient, an own loop with `testbed.distribute`,
scheduler `wfbp`, no compressor. What counts: every file below `testbed/` in which a function is
called, in any thread of rank 0 or in any process that rank 0 has started (its parameter server),
between the call of the gradient's hook in `loss.backward()` and the end of `optimizer.step()`.
Nothing is excluded: a script's own loop neither measures nor verifies.

The first step, in which ranks agree on a plan, does not count. A file counts if it is entered in
any of the steps after it, also where a step alone prepares what later ones use again (a transfer
of the same memory). Threads that are at work in fewer than half of the steps do not count: what the
control plane does by itself, such as a sign of life; files that they alone enter are listed apart.
Generated functions (a dataclass's `__init__`) and functions in C have no file and do not count.

Files are printed in the order in which they are first entered, each with its functions, and `*`
before those that are entered in the server process alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.forking import SERVER
from tests.tools import gradient_rank

FIRST_STEPS = 1
STEPS = 20
ROW_BYTES = 4096  # of the gradient, as `gradient_rank` makes it
TIMEOUT_S = 120.0
SITE = "from gradient_rank import record\n\nrecord()\n"


@dataclass(frozen=True)
class Call:
    """A call of a function of the project: when, in which process and thread."""

    time_ns: int
    process: str
    thread: str
    file: str
    function: str

    @property
    def thread_id(self) -> tuple[str, str]:
        """Process and name."""
        return self.process, self.thread


@dataclass
class Visits:
    """The calls in one file over all steps.

    Attributes:
        num_steps: in how many steps it was entered.
        first: its smallest position among the files that were entered in a step.
        functions: in the order of their first calls.
        threads: process and thread of each call.
    """

    num_steps: int = 0
    first: int = sys.maxsize
    functions: dict[str, None] = field(default_factory=dict)
    threads: set[tuple[str, str]] = field(default_factory=set)

    def add(self, position: int, calls: Sequence[Call]) -> None:
        """One more step with calls in the file, the file being the `position`-th of the step."""
        self.num_steps += 1
        self.first = min(self.first, position)
        self.functions |= dict.fromkeys(c.function for c in calls)
        self.threads |= {c.thread_id for c in calls}


@dataclass(frozen=True)
class Way:
    """Where a gradient comes by.

    Attributes:
        files: by name, in the order of their first calls.
        beside: entered by threads alone that are seldom at work.
        rank: the process of rank 0 itself.
        num_steps: that were traced.
    """

    files: dict[str, Visits]
    beside: dict[str, Visits]
    rank: str
    num_steps: int

    @property
    def steady(self) -> list[str]:
        """The files that are entered in at least half of the steps."""
        return [name for name, v in self.files.items() if 2 * v.num_steps >= self.num_steps]

    def text(self) -> str:
        """One line for each file."""
        lines = []
        for number, (name, visits) in enumerate(self.files.items(), 1):
            server = " " if any(p == self.rank for p, _ in visits.threads) else "*"
            lines.append(f"{number:3} {server} {self._line(name, visits)}")
        lines += [f"  - {self._line(name, visits)}" for name, visits in self.beside.items()]
        return "\n".join(lines)

    def _line(self, name: str, visits: Visits) -> str:
        seldom = "" if visits.num_steps == self.num_steps else f" ({visits.num_steps} steps)"
        return f"{name}: {', '.join(visits.functions)}{seldom}"


def trace(backends: Sequence[str], checkout: Path, num_bytes: int = 8 << 20) -> dict[str, Way]:
    """The way of a gradient of so many bytes on each backend, all in one job.

    Args:
        backends: as on the command line; different ones.
        checkout: whose code is traced, by the Python and `mpirun` of its `.venv`.
        num_bytes: of the gradient, a multiple of 4096.

    Raises:
        RuntimeError: the ranks failed; with what they wrote to stderr.
    """
    binaries = checkout / ".venv/bin"
    if not binaries.is_dir():  # an installation elsewhere, of this very checkout
        binaries = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(gradient_rank.__file__, folder)
        (folder / "sitecustomize.py").write_text(SITE)
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            SERVER: "none",  # a forked parameter server would not be recorded
            gradient_rank.FOLDER: str(folder),
            gradient_rank.ROOT: str(checkout.resolve() / "testbed"),
        }
        command = [
            *(str(binaries / "mpirun"), "--oversubscribe", "--allow-run-as-root", "-n", "2"),
            *(str(binaries / "python"), str(folder / "gradient_rank.py")),
            *(str(FIRST_STEPS + STEPS), str(num_bytes // ROW_BYTES), *backends),
        ]
        done = subprocess.run(  # not in a checkout: `python -m` takes a `testbed` from there
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise RuntimeError(f"mpirun ended with {done.returncode}: {done.stderr}")
        marks = list(_calls([folder / "marks.0"]))
        calls = sorted(_calls(folder.glob("*.calls")), key=lambda call: call.time_ns)
        rank = (folder / "rank.0").read_text()
    return {
        backend: _way([mark for mark in marks if mark.function == backend], calls, rank)
        for backend in backends
    }


def _way(marks: Sequence[Call], calls: Sequence[Call], rank: str) -> Way:
    steps = list(zip(marks[0::2], marks[1::2], strict=True))[FIRST_STEPS:]
    within = [_of_step(calls, begin, end, rank) for begin, end in steps]
    at_work = Counter(thread for found in within for thread in {c.thread_id for c in found})
    often = {thread for thread, count in at_work.items() if 2 * count >= len(steps)}
    files, beside = _visits(within, often), _visits(within, set(at_work) - often)
    alone = {name: visits for name, visits in beside.items() if name not in files}
    return Way(files, alone, rank, len(steps))


def _of_step(calls: Sequence[Call], begin: Call, end: Call, rank: str) -> list[Call]:
    """From the first call that `loss.backward()` makes into the project on."""
    found = [c for c in calls if begin.time_ns <= c.time_ns <= end.time_ns]
    hook = next(c for c in found if c.thread_id == (rank, begin.thread))
    return [c for c in found if c.time_ns >= hook.time_ns]


def _visits(steps: Sequence[Sequence[Call]], threads: set[tuple[str, str]]) -> dict[str, Visits]:
    visits: dict[str, Visits] = {}
    for calls in steps:
        by_file: dict[str, list[Call]] = {}
        for call in calls:
            if call.thread_id in threads:
                by_file.setdefault(call.file, []).append(call)
        for position, (name, found) in enumerate(by_file.items()):
            visits.setdefault(name, Visits()).add(position, found)
    return dict(sorted(visits.items(), key=lambda item: item[1].first))


def _calls(paths: Iterable[Path]) -> Iterator[Call]:
    for path in paths:
        for line in path.read_text().splitlines():
            time_ns, thread, file, function = line.split("\t")
            yield Call(int(time_ns), path.stem, thread, file, function)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the way on each backend."""
    here = Path(__file__).parent.parent.parent
    parser = argparse.ArgumentParser(prog="trace_gradient", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=here, help="[this]")
    parser.add_argument("--backend", default="mpi-ring,zmq-ps", help="with commas [%(default)s]")
    parser.add_argument("--mib", type=int, default=8, help="size of the gradient [%(default)s]")
    given = parser.parse_args(arguments)
    backends = given.backend.split(",")
    for backend, way in trace(backends, given.checkout, given.mib << 20).items():
        found = f"{len(way.files)} files, {len(way.steady)} of them in at least half of the steps"
        print(f"{backend}, a gradient of {given.mib} MiB: {found}\n{way.text()}\n")


if __name__ == "__main__":
    main()
