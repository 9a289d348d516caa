"""Makes faults in real runs and counts how often `testbed why` names them first.

    python -m tests.tools.live_faults --backends mpi-ring,zmq-ps --faults late --windows 8

Late ranks, slower links, start-ups and a busy core are turned on in windows of a run; each window
is explained against the run's quiet steps. `none` is windows in which nothing is done, right where
no cause takes 2 ms more than in the others. Bad order, dependencies, a slow codec and tiny messages
are the whole run's. Runs on emulated clusters of this machine; keep it quiet meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from testbed.base.link import Link
from testbed.base.plan import encode_plan
from testbed.base.trace import Trace, TraceTensor
from testbed.causes.explain import DEPENDENCY, explain
from testbed.records.cell import Cell, decode_cell
from testbed.records.timeline import Timeline, decode_timeline
from testbed.scheduling.protocol import make_plan
from tests.tools.faulty_model import build, parse_windows

MODEL = Path(__file__).with_name("faulty_model.py")
WINDOW = 12  # steps; as many quiet ones follow
WARMUP = 4
QUIET_S, FAULT_S = 2.5, 4.0  # of faults that are turned on by the clock
RATE = "400mbit"
NOTICED_S = 2e-3  # a quarter of the smallest fault
TOGGLED = {
    "late": "late rank",
    "link": "saturated link",
    "startup": "start-up",
    "busy": "busy host",
    "none": "",
}
WHOLE = {"order": "order", "dependency": DEPENDENCY, "codec": "codec", "tiny": "tiny messages"}


@dataclass
class Run:
    """One run that is to be made.

    Attributes:
        options: of `testbed run`.
        model: options of the model.
        cluster: options of the cluster.
        spin: when a core is to be busy, seconds since the start; empty: never.
    """

    options: dict[str, str]
    model: dict[str, str] = field(default_factory=dict)
    cluster: dict[str, str] = field(default_factory=dict)
    spin: list[tuple[float, float]] = field(default_factory=list)

    def make(self, folder: Path) -> tuple[Cell, Timeline, list[tuple[float, float]]]:
        """Its record, its timeline and when a core was busy, on `time.perf_counter`."""
        model = ",".join(f"{k}={v}" for k, v in self.model.items())
        cluster = {"nodes": "2", "rate": RATE, **self.cluster}
        given = {
            "workload": f"{MODEL}:build" + f":{model}" * bool(model),
            "cluster": ",".join(f"{k}={v}" for k, v in cluster.items()),
            "workers": "2",
            "warmup": str(WARMUP),
            "json": str(folder / "cell.json"),
            "timeline": str(folder / "cell.timeline.json"),
            **self.options,
        }
        words = [w for k, v in given.items() for w in (f"--{k}", v)]
        command = [sys.executable, "-m", "testbed", "run", *words]
        with spinning(self.spin) as spun:
            status, told = _ended(command)
        if status:
            raise SystemExit(f"{' '.join(command)}\n{told}")
        cell = decode_cell((folder / "cell.json").read_bytes())
        return cell, decode_timeline((folder / "cell.timeline.json").read_bytes()), spun


def _ended(command: Sequence[str]) -> tuple[int, str]:
    """Its exit status and the end of what it said; ended with us if we are ended before."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            told = process.communicate(timeout=1800)[0]
        except BaseException:
            process.terminate()  # it ends its own; a second one would not
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            raise
    return process.returncode, told[-6000:]


def _spin() -> None:
    while True:
        pass


@contextmanager
def spinning(times: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """A process computes for nothing at these times; yields when it really did."""
    ended, spun = threading.Event(), list[tuple[float, float]]()

    def follow() -> None:
        start = time.perf_counter()
        for begin, end in times:
            if ended.wait(start + begin - time.perf_counter()):
                return
            process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
            process.start()
            begun = time.perf_counter()
            ended.wait(start + end - time.perf_counter())
            spun.append((begun, time.perf_counter()))
            process.kill()
            process.join()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield spun
    finally:
        ended.set()
        thread.join()


def by_step(count: int) -> tuple[str, int]:
    """Windows of steps, as text, and how many steps the run has."""
    firsts = [WARMUP + WINDOW + 2 * WINDOW * k for k in range(count)]
    return "+".join(f"{f}-{f + WINDOW - 1}" for f in firsts), WARMUP + WINDOW * (2 * count + 1)


def by_clock(count: int) -> list[tuple[float, float]]:
    """Begins and ends of windows, seconds since the start."""
    first = 15.0  # processes have started and warmed up
    return [
        (first + k * (QUIET_S + FAULT_S), first + k * (QUIET_S + FAULT_S) + FAULT_S)
        for k in range(count)
    ]


def toggled(fault: str, backend: str, count: int, step_s: float) -> Run:
    """The run in which this fault is turned on in so many windows."""
    windows, steps = by_step(count)
    options = {"backend": backend, "steps": str(steps)}
    if fault == "late":
        return Run(options, {"late_rank": "1", "late_ms": "20", "windows": windows})
    if fault == "none":
        return Run(options, {"windows": windows})
    if fault == "startup":
        delay = {"latency": "200us", "latency_by": "injected"}
        return Run(options, {"startup_ms": "8", "windows": windows}, delay)
    times = by_clock(count)
    options["steps"] = str(WARMUP + int((times[-1][1] + QUIET_S) / step_s))
    if fault == "busy":
        return Run(options, spin=times)
    half = f"{int(RATE.removesuffix('mbit')) // 2}mbit"
    changes = "+".join(f"{b}s:all:{half}+{e}s:all:{RATE}" for b, e in times)
    # two buckets of one size would not tell start-up from bytes
    return Run(options, {"depth": "9"} if backend == "ddp" else {}, {"change": changes})


def windows_of(
    fault: str, run: Run, cell: Cell, timeline: Timeline, spun: list[tuple[float, float]]
) -> tuple[list[list[int]], set[int]]:
    """The steps of each window, and the quiet ones."""
    spans = {
        e.step: (e.begin_s, e.end_s) for e in timeline.events if e.kind == "step" and e.rank == 0
    }
    if "windows" in run.model:
        faulty = parse_windows(run.model["windows"])
        pieces = [parse_windows(piece) for piece in run.model["windows"].split("+")]
        return [sorted(p & spans.keys()) for p in pieces], set(spans) - faulty
    times = spun
    if fault == "link":
        offset = time.time() - time.perf_counter()
        done = [c["done_unix_s"] - offset for c in (cell.cluster or {})["changes"]]
        times = list(zip(done[::2], done[1::2], strict=False))
    zero = timeline.zero_s
    pieces = []
    quiet = set(spans)
    for begin, end in ((b - zero, e - zero) for b, e in times):
        pieces.append([s for s, (b, e) in spans.items() if begin <= b and e <= end])
        quiet -= {s for s, (b, e) in spans.items() if e >= begin and b <= end}
    return [p for p in pieces if len(p) >= WINDOW], quiet


def of_steps(timeline: Timeline, steps: set[int]) -> Timeline:
    """The timeline with the events of these steps alone."""
    events = tuple(e for e in timeline.events if e.step in steps)
    return msgspec.structs.replace(timeline, events=events)


def whole(fault: str, backend: str, folder: Path) -> Run:
    """The run that has this fault from begin to end."""
    options = {"backend": backend, "steps": "20"}
    hidden, fast = {"batch": "1024"}, {"rate": "1gbit"}  # a good order would hide nearly all
    if fault == "dependency":
        return Run({**options, "scheduler": "sequential"}, hidden, fast)
    if fault == "codec":
        slow = {"width": "4096", "batch": "64"}  # few messages: their start-ups are not the cause
        coded = {"compressor": "ef+topk:ratio=0.01", "scheduler": "bucket:mib=8"}
        return Run({**options, **coded}, slow, fast)
    if fault == "tiny":
        model = {"width": "48", "depth": "60", "batch": "1024"}
        return Run(options, model, {"latency": "2ms", "latency_by": "injected"})
    model = build().model
    tensors = tuple(
        TraceTensor(name=n, num_elements=p.numel(), forward_s=0.0, backward_s=0.0)
        for n, p in model.named_parameters()
    )
    trace = Trace(name="faulty", device="cpu", batch_size=1, tensors=tensors)
    link = Link(backend=backend, num_workers=2, latency_s=1e-3, seconds_per_byte=1e-8)
    plan = make_plan("wfbp", trace, link)
    first_last = msgspec.structs.replace(plan, messages=plan.messages[::-1])
    (folder / "plan.json").write_bytes(encode_plan(first_last))
    return Run({**options, "plan": str(folder / "plan.json")}, hidden, fast)


def count_toggled(
    fault: str, backend: str, windows: int, each: int, say: Callable[[str], None]
) -> Counter[str]:
    """What was named first in so many windows, in runs of `each`."""
    named: Counter[str] = Counter()
    step_s = 0.1
    for _ in range(4 * windows):
        if named.total() >= windows:
            break
        with tempfile.TemporaryDirectory() as folder:
            run = toggled(fault, backend, min(each, windows - named.total()), step_s)
            cell, timeline, spun = run.make(Path(folder))
        pieces, quiet = windows_of(fault, run, cell, timeline, spun)
        paces = sorted(e.duration_s for e in timeline.events if e.kind == "step")
        step_s = paces[len(paces) // 10]  # steps enough for all windows
        for piece in pieces:
            part = of_steps(timeline, quiet | set(piece))
            found, usual = explain(part, piece)
            ranked = found.ranked(usual)
            noticed = fault != "none" or ranked[0][1] >= NOTICED_S
            named[found.first(usual) if noticed else ""] += 1
            top = ", ".join(f"{c} {s * 1e3:+.1f} ms" for c, s in ranked[:3])
            say(f"{backend} {fault} steps {piece[0]}-{piece[-1]}: {top}")
    return named


def count_whole(fault: str, backend: str, runs: int, say: Callable[[str], None]) -> Counter[str]:
    """What was named first in so many runs."""
    named: Counter[str] = Counter()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            _, timeline, _ = whole(fault, backend, Path(folder)).make(Path(folder))
        found = explain(timeline)[0]
        ranked = found.ranked()
        named[found.first()] += 1
        say(f"{backend} {fault}: " + ", ".join(f"{c} {s * 1e3:.1f} ms" for c, s in ranked[:4]))
    return named


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts for each backend and fault; status 1 where less than 9 of 10 are right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--backends", default="mpi-ring,zmq-ps,gloo,ddp")
    parser.add_argument("--faults", default=",".join([*TOGGLED, *WHOLE]))
    parser.add_argument("--windows", type=int, default=40, help="of toggled faults")
    parser.add_argument("--each", type=int, default=8, help="windows of one run")
    parser.add_argument("--runs", type=int, default=20, help="of other faults")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended first
    failed = 0
    for backend in given.backends.split(","):
        for fault in given.faults.split(","):
            if backend == "ddp" and (fault in WHOLE or fault == "startup"):
                continue  # it plans by itself, and its exchanges cannot be held up
            say = partial(print, flush=True)
            if fault in TOGGLED:
                wanted = given.windows
                named = count_toggled(fault, backend, wanted, given.each, say)
                right = named[TOGGLED[fault]]
            else:
                wanted = given.runs
                named = count_whole(fault, backend, wanted, say)
                right = named[WHOLE[fault]]
            print(f"{backend} {fault}: {right} of {named.total()} right; {dict(named)}", flush=True)
            failed += named.total() < wanted or right < 0.9 * named.total()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
