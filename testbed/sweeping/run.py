"""Carries a sweep out: every cell that is not finished yet, in order, into the store."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import msgspec

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.forking import fork_server
from testbed.noise.reruns import TimeLeft, choose, to_repeat, why_no_more, why_none
from testbed.noise.steal_time import TOO_MUCH
from testbed.records.cell import Cell
from testbed.records.environment import describe_environment, program_words, what_differs
from testbed.records.forecast import link_digests
from testbed.records.store import Store, SweepPlan, cell_key, create_store
from testbed.sweeping.executor import ProcessRunner, Runner, failed_cell, progress_file, run_command
from testbed.sweeping.grid import Sweep, check_again, interleave
from testbed.sweeping.progress import Reporter, reporting

INTERRUPTED = 130

Tuner = Callable[[RunConfig], RunConfig]
"""A cell that asks for it with its knobs found; raises UsageError where that cannot be."""


def make_plan(
    sweep: Sweep,
    hostfile: str = "",
    arguments: Sequence[str] = (),
    *,
    interface: str = "",
    timeline: bool = False,
) -> SweepPlan:
    """The order in which the cells run, with the machine that they run on.

    Args:
        sweep: what is to be measured.
        hostfile: text that names the hosts to run on; empty: this machine.
        arguments: the command line that asked for it; wherever its script lies, it is `testbed`.
        interface: the network interface that runs use; empty: each decides.
        timeline: each run is to record what its ranks do.

    Raises:
        UsageError: hosts or an interface beside emulated clusters, which have their own.
    """
    _check_one_place(sweep.cells, hostfile, interface)
    order = []
    for index, repeat in interleave(len(sweep.cells), sweep.repeats, sweep.seed):
        config = msgspec.structs.replace(sweep.cells[index], repeat=repeat)
        order.append((cell_key(config), index, repeat))
    return SweepPlan(
        name=sweep.name,
        summary=sweep.summary,
        seed=sweep.seed,
        repeats=sweep.repeats,
        cells=sweep.cells,
        order=tuple(order),
        max_again=sweep.max_again,
        again_within_min=sweep.again_within_min,
        hostfile=hostfile,
        interface=interface,
        environment=describe_environment(),
        command=shlex.join(("testbed", *arguments[1:])) if arguments else "",
        timeline=timeline,
    )


def decided_anew(plan: SweepPlan, given: Mapping[str, Any]) -> SweepPlan:
    """The plan with what may change once it was begun: hosts, how many runs may be run again.

    Args:
        plan: as it was begun.
        given: values of its fields.

    Raises:
        UsageError: another interface on the same hosts: the runs would not be alike; or as of
            `make_plan`.
    """
    interface = given.get("interface", plan.interface)
    if interface != plan.interface and "hostfile" not in given:
        raise UsageError(
            f"--interface is {interface!r}, but the sweep was begun with "
            f"{plan.interface or 'none given'}: its runs would not be alike; leave it out, or "
            "start a new sweep without --resume"
        )
    plan = msgspec.structs.replace(plan, **given)
    _check_one_place(plan.cells, plan.hostfile, plan.interface)
    check_again(plan.max_again, plan.again_within_min)
    return plan


def _check_one_place(cells: Sequence[RunConfig], hostfile: str, interface: str) -> None:
    """Refuse what names a place for cells that make a cluster of their own."""
    hosts = ", ".join(hostfile.splitlines())
    for name, value in {"--interface": interface, "--hostfile or launcher's host": hosts}.items():
        if value and any(cell.cluster for cell in cells):
            raise UsageError(
                f"{name} is {value!r} beside --cluster, whose nodes and network are made on one "
                "machine; give one of them"
            )


def to_hostfile(hosts: Sequence[tuple[str, int]]) -> str:
    r"""Hosts and their slots as `mpirun --hostfile` reads them.

    Example:
        >>> to_hostfile([("h1", 2)])
        'h1 slots=2\n'
    """
    return "".join(f"{host} slots={slots}\n" for host, slots in hosts)


def begin(plan: SweepPlan, directory: Path | None) -> Store:
    """A new folder that holds the plan, with the digests of its links, and no cell yet."""
    store = create_store(plan.name, datetime.datetime.now(), directory)
    links = link_digests(cell.link for cell in plan.cells)
    keep_plan(store, msgspec.structs.replace(plan, links=links))
    return store


def keep_plan(store: Store, plan: SweepPlan) -> None:
    """Write the plan, and its hosts where the cells find them; of a begun sweep under its lock."""
    if plan.hostfile:
        write_atomically(store.hostfile, plan.hostfile.encode())
    store.write_plan(plan)


@contextmanager
def process_runner(
    store: Store,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ProcessRunner]:
    """Runs each cell as `testbed run`, on the hosts that the store names; forked, if it can be.

    Args:
        store: the sweep's folder.
        timeout_s: seconds that one run of a cell may take; None: no limit.
        environment: variables of the cells' processes; None: this process's own.
    """
    hostfile = store.hostfile if store.hostfile.exists() else None
    plan = store.read_plan()
    where = functools.partial(run_command, hostfile=hostfile, interface=plan.interface)
    command = functools.partial(where, timeline=plan.timeline)
    with fork_server(os.environ if environment is None else environment) as variables:
        yield ProcessRunner(command, timeout_s, environment=variables)


def carry_out(
    store: Store,
    runner: Runner,
    out: TextIO | None = None,
    share: int | None = None,
    tuner: Tuner | None = None,
    *,
    quiet: bool = False,
) -> int:
    """Run what the plan in the store asks for and is not finished there.

    A failed cell is recorded and the sweep goes on; a finished one is not run again, unless the
    plan lets those be that a virtual machine's host disturbed (see `testbed.noise.reruns`). May be
    called again on the same store after any kind of end: it then tells whose runs are there, if
    another program made them.

    Args:
        store: a folder with a plan.
        runner: runs one cell.
        out: where progress is told; None: standard error.
        share: the number of the Slurm task whose runs alone are carried out, while others may be
            at work on theirs; None: all runs. What is run again is decided from all runs alone.
        tuner: finds the knobs of cells that ask for it; None: no cell does.
        quiet: only failures are told.

    Returns:
        0: all cells finished; 1: some failed; 130: interrupted by Ctrl-C or SIGTERM.

    Raises:
        UsageError: the store holds no plan or no such share, another sweep is at work in it, or a
            link file is not what it was when the sweep began.
    """
    out = out or sys.stderr
    runner = runner if tuner is None else functools.partial(_run_tuned, runner, tuner)
    store.read_plan()  # a folder without a plan is refused before a lock is made there
    begin_s = time.monotonic()
    with store.locked(share):
        plan = store.read_plan()  # nobody writes it anew while the lock is held
        if share is not None and not 0 <= share < plan.tasks:
            raise UsageError(f"--share is {share}; expected one of 0 .. {plan.tasks - 1}")
        runs = dict(plan.runs(share))
        store.clear_scratch(runs)
        finished = store.finished() & runs.keys()
        pending = [(key, config) for key, config in runs.items() if key not in finished]
        more = bool(pending or plan.max_again)
        if more:
            _check_links(store, plan)
        if finished:
            told = f"{len(finished)} of {len(runs)} runs are there already"
            print(told + (_made_by_others(store, plan, finished) if more else ""), file=out)
        try:
            with _interruptible():
                with reporting([c for _, c in pending], out, quiet=quiet) as reporter:
                    ran = {run[0]: _run_cell(store, runner, reporter, *run) for run in pending}
                if share is None:
                    longest_s = max((time_s for _, time_s in ran.values()), default=0.0)
                    left = TimeLeft(begin_s, plan.again_within_min, longest_s)
                    _run_again(store, plan, runner, left, out, quiet=quiet)
        except KeyboardInterrupt:
            own = "" if share is None else f" --share {share}"
            print(f"interrupted; go on with: testbed sweep --resume {store.path}{own}", file=out)
            return INTERRUPTED
    return 1 if "failed" in [status for status, _ in ran.values()] else 0


def _check_links(store: Store, plan: SweepPlan) -> None:
    """Raise UsageError if a link file of the cells is not what it was when the sweep began."""
    now = link_digests(plan.links)
    for name, digest in plan.links.items():
        if now.get(name) != digest:
            found = f"has {now[name]} now" if name in now else "cannot be read from here now"
            raise UsageError(
                f"link {name} had the digest {digest} when the sweep in {store.path} began, and "
                f"{found}; put that file back, or start a new sweep without --resume"
            )


class _Origin(msgspec.Struct):
    """What is read of a cell to know what made it; the rest is skipped."""

    environment: dict[str, Any] = {}
    cluster: dict[str, Any] | None = None


def _made_by_others(store: Store, plan: SweepPlan, keys: Collection[str]) -> str:
    """In words, which of these cells another program than this one made; empty: none.

    Where cells run on hosts of their own, the platform here is not theirs: commits alone count.
    """
    here, others, differ = describe_environment(), Counter[str](), dict[str, None]()
    for key in sorted(keys):
        data = (store.cells / f"{key}.json").read_bytes()
        made = msgspec.json.decode(data, type=_Origin)
        names = what_differs([made.environment, _made_here(made, here)])
        if plan.hostfile:
            names = [name for name in names if name == "commit"]
        if names:
            others[program_words(made.environment, names)] += 1
            differ |= dict.fromkeys(names)
    if not others:
        return ""
    told = ", ".join(f"{count} made by {words}" for words, count in others.items())
    return f", {told}; this is {program_words(here, differ)}: a report names both"


def _made_here(made: _Origin, here: Mapping[str, Any]) -> dict[str, Any]:
    """The environment that the cell would have had here, with what its launcher told and set.

    An emulated cluster sets variables of MPI and Gloo whatever they are.
    """
    found = {**made.environment, **here}
    if "variables" in made.environment:
        kept = ("OMPI_MCA_", "GLOO_") if made.cluster else ()
        own = {k: v for k, v in here["variables"].items() if not k.startswith(kept)}
        found["variables"] = {**made.environment["variables"], **own}
    return found


def _run_tuned(
    runner: Runner, tuner: Tuner, config: RunConfig, json_path: Path, log_path: Path
) -> Cell:
    """See `Runner`."""
    try:
        found = config if config.tune is None else tuner(config)
    except UsageError as error:
        return failed_cell(config, f"UsageError: {error}")
    return runner(found, json_path, log_path)


def _run_cell(
    store: Store, runner: Runner, reporter: Reporter, key: str, config: RunConfig
) -> tuple[str, float]:
    """Its status, and the seconds that it took."""
    result = store.scratch / f"{key}.json"
    reporter.started(config, progress_file(result))
    begin_s = time.monotonic()
    cell = runner(config, result, store.cells / f"{key}.log")
    store.write_cell(key, cell)
    store.keep_timeline(key, result, store.cells)
    time_s = time.monotonic() - begin_s
    reporter.ended(config, cell.status, time_s, cell.error)
    return cell.status, time_s


def _run_again(
    store: Store, plan: SweepPlan, runner: Runner, left: TimeLeft, out: TextIO, *, quiet: bool
) -> None:
    """Repeat what a virtual machine's host disturbed most, as far as the plan and time let.

    Args:
        store: locked, with all cells that could be measured.
        plan: the store's.
        runner: runs one cell.
        left: until when.
        out: where progress is told.
        quiet: only failures are told.
    """
    cells, configs = store.read_cells(), dict(plan.runs())
    present = {key: cells[key] for key in configs if key in cells}
    repeated = store.repeated()
    keys = to_repeat(present, repeated, plan.max_again)
    if not keys:
        if plan.max_again:
            print(why_none(len(repeated), plan.max_again), file=out)
        return
    end = "" if left.within_min is None else f", as far as {left.within_min:g} minutes reach"
    print(
        f"{len(keys)} runs again, of which the host of this virtual machine took "
        f"{100 * TOO_MUCH:.0f} % of the cores' time or more, of what counts{end}",
        file=out,
    )
    store.make_others()
    with reporting([configs[key] for key in keys], out, quiet=quiet) as reporter:
        for number, key in enumerate(keys):
            if not left.suffices():
                print(why_no_more(len(keys) - number, left), file=out)
                break
            result, log = store.scratch / f"{key}-2.json", store.others / f"{key}-2.log"
            reporter.started(configs[key], progress_file(result))
            begin_s = time.monotonic()
            cell = runner(configs[key], result, log)
            counting, other = choose(cells[key], cell)
            counts = other is cells[key]
            if counts:
                store.keep_timeline(key, store.cells / f"{key}.json", store.others)
            store.write_pair(key, counting, other)
            store.keep_timeline(key, result, store.cells if counts else store.others)
            time_s = time.monotonic() - begin_s
            reporter.ended(configs[key], cell.status, time_s, cell.error)
            left = dataclasses.replace(left, longest_s=max(left.longest_s, time_s))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a sweep as Ctrl-C does; signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
    before = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, *hung_up)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
