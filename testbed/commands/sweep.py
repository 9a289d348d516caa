"""`testbed sweep`: measure a grid of cells."""

from __future__ import annotations

import functools
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from testbed.base.axes import BACKENDS, STUDIES
from testbed.base.config import RunConfig, option
from testbed.base.errors import Unavailable, UsageError
from testbed.base.files import write_atomically
from testbed.commands.checks import check_files
from testbed.commands.grid import cluster_axes, wanted_sweep
from testbed.commands.settings import lists_of, takes_lists
from testbed.commands.tuning import tuned_cell
from testbed.launch.processes import own_command
from testbed.launch.slurm import array_script
from testbed.records.report import encode_report
from testbed.records.store import PLAN, RESULTS, Store, SweepPlan, newest_store
from testbed.reporting.aggregate import collect_cells
from testbed.reporting.make import make_report
from testbed.reporting.short import to_text
from testbed.sweeping.executor import Runner, run_command
from testbed.sweeping.grid import Sweep
from testbed.sweeping.progress import label
from testbed.sweeping.recipe import recipe_names
from testbed.sweeping.run import (
    INTERRUPTED,
    begin,
    carry_out,
    decided_anew,
    keep_plan,
    make_plan,
    process_runner,
    to_hostfile,
)
from testbed.sweeping.study import carry_out_study, find_study


@takes_lists
def sweep(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's name, or a TOML file", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(help="with --resume: the folder to go on in", show_default=False),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="emulate a cluster: nodes=4,rate=10gbit,dilation=10; may be given several times",
            show_default="none",
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="how often each cell is run")] = None,
    order_seed: Annotated[int | None, typer.Option(help="seed of the order of the runs")] = None,
    max_again: Annotated[
        int | None,
        typer.Option(
            help="how many runs may be run again at the end: those of which the host of this "
            "virtual machine took 3 % of the cores' time or more, while their link was measured or "
            "in the steps that count; with --resume too"
        ),
    ] = None,
    again_within_min: Annotated[
        float | None,
        typer.Option(
            help="only while the next will be done so many minutes after this command "
            "began, should it take as long as the longest run so far"
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help="search the knobs of each cell's method before its first run, all with the same "
            "budget: trials=30,confirm=3,steps=15,seed=1; see testbed run"
        ),
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="record what every rank does, beside each run's cell"),
    ] = False,
    name: Annotated[str | None, typer.Option(help="name of the sweep")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"a new folder instead of {RESULTS}/NAME-TIME; a study goes on in its own"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="go on with a sweep: the folder may follow, else the newest of that name",
        ),
    ] = False,
    cell_timeout: Annotated[
        float | None, typer.Option(help="seconds that one run of a cell may take")
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="hosts to run on, one `host slots=N` per line; with --resume in place of those of "
            "before"
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            help="network interface that every run uses; MPI and NCCL have variables of their own "
            "for it",
            show_default="decided",
        ),
    ] = None,
    submit: Annotated[
        str | None,
        typer.Option(
            help="slurm: write an sbatch script that shares the runs among the tasks of an array"
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(help="with --submit: how many tasks", show_default="one per cell"),
    ] = None,
    go: Annotated[
        bool, typer.Option("--go", help="with --submit: hand the script to sbatch")
    ] = False,
    share: Annotated[
        int | None, typer.Option(help="with --resume: only the runs of this task of an array")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the commands instead of running them")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="tell failures alone, not how far the sweep is")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write the report to this file too")] = None,
    **given: Any,
) -> None:
    """Measure every combination of the axes, repeats interleaved, and print the table.

    A LIST is one value or several, separated by commas. What is given here replaces that of the
    recipe. Every run has processes of its own; a failed one
    is recorded and the sweep goes on. Combinations of parts that cannot be are told and left out.
    A sweep that was stopped goes on with --resume.

    Examples:
        testbed sweep quick

        testbed sweep --workload resnet20 --backend none,mpi-ring,zmq-ps --workers 2,4 --steps 30

        testbed sweep --backend mpi-ring,gloo --cluster nodes=4,rate=1gbit

        testbed sweep --scheduler wfbp,mg-wfbp,dear --compressor none,ef+topk:ratio=0.01

        testbed sweep emulated --tune trials=30,confirm=3,steps=15

        testbed sweep --resume

        testbed sweep quick --submit slurm --tasks 2

        testbed sweep paper-shapes --output runs/published

        testbed sweep paper-shapes:emulate=0
    """
    axes = lists_of(given)
    axes |= cluster_axes(cluster or (), "workers" in axes, recipe)
    again = {"max_again": max_again, "again_within_min": again_within_min}
    changes = {"repeats": repeats, "seed": order_seed, **again, "name": name}
    _check_json(json, output, submit)
    study = find_study(recipe)
    if study is not None:
        others = {**axes, **changes, "resume": resume, "dry-run": dry_run, "hostfile": hostfile}
        others |= {"submit": submit, "share": share, "tune": tune, "timeline": timeline or None}
        others |= {"interface": interface, "a second word": folder, "tasks": tasks, "go": go}
        others |= {"cell-timeout": cell_timeout}
        raise typer.Exit(carry_out_study(study, output, json, others, sys.stdout))
    _check_submission(submit, tasks, go, share, resume)
    recipe, folder = _sort_out(recipe, folder, output, resume)
    changes = {k: v for k, v in {**changes, "tune": tune}.items() if v is not None}
    wanted = wanted_sweep(recipe, axes, changes, begun=resume)
    hosts = _hostfile_text(hostfile, context)
    if resume:
        if wanted is None:
            _refuse_alone({"repeats": repeats, "order_seed": order_seed, "tune": tune})
        store = _store_to_resume(wanted, folder, name, timeline=timeline)
        _check_hosts(store.read_plan(), hosts, context)
        where = {"hostfile": hosts or None, "interface": interface}
        anew = {k: v for k, v in {**again, **where}.items() if v is not None}
        if dry_run:
            _print_commands(decided_anew(store.read_plan(), anew))
            return
        if anew or submit is not None:
            with store.locked():
                plan = decided_anew(store.read_plan(), anew)
                keep_plan(store, plan if submit is None else _shared_out(plan, tasks))
    else:
        if wanted is None:
            raise UsageError(
                f"nothing to sweep; give a recipe ({', '.join((*recipe_names(), *STUDIES))}), a "
                "TOML file, or axes such as --backend none,gloo"
            )
        plan = make_plan(wanted, hosts, sys.argv, interface=interface or "", timeline=timeline)
        if dry_run:
            _print_commands(plan)
            return
        store = begin(plan if submit is None else _shared_out(plan, tasks), output)
    if submit is not None:
        raise typer.Exit(_submit(store, go, cell_timeout))
    with process_runner(store, cell_timeout, _given(context).get("environment")) as runner:
        status = _finish(store, runner, json, share, quiet=quiet)
    raise typer.Exit(status)


def _check_json(json: Path | None, output: Path | None, submit: str | None) -> None:
    """Fail before anything runs if the report cannot be written; folders on the way are made."""
    if json is not None and submit is not None:
        raise UsageError("--json with --submit, whose tasks run later: use testbed report then")
    folder = None if json is None else json.resolve().parent
    if folder and output and not folder.exists() and output.resolve().is_relative_to(folder):
        return
    check_files(json, None)


def _sort_out(
    recipe: str | None, folder: Path | None, output: Path | None, resume: bool
) -> tuple[str | None, Path | None]:
    """Which of the two words is the recipe and which the folder to go on in."""
    if not resume:
        if folder is not None:
            raise UsageError(f"{folder} is one word too many; a folder may follow --resume alone")
        return recipe, None
    if recipe is not None and "/" in recipe and not Path(recipe).exists():
        raise UsageError(f"there is no {recipe}; give the folder of a sweep to go on with")
    folders = [each for each in (folder, output) if each is not None]
    if recipe is not None and (Path(recipe) / PLAN).is_file():
        folders.insert(0, Path(recipe))
        recipe = None
    if len(folders) > 1:
        words = " and ".join(map(str, folders))
        raise UsageError(f"{len(folders)} folders to go on in: {words}; give one of them")
    return recipe, folders[0] if folders else None


def _refuse_alone(given: Mapping[str, Any]) -> None:
    """Refuse what describes a sweep only together with a recipe or axes."""
    words = [f"{option(name)} {value}" for name, value in given.items() if value is not None]
    if words:
        raise UsageError(
            f"{' '.join(words)} beside --resume, which goes on with the sweep as it was begun; "
            "leave them out, or start a new sweep without --resume"
        )


def _store_to_resume(
    wanted: Sweep | None, folder: Path | None, name: str | None, *, timeline: bool
) -> Store:
    """The store to go on in; what the command line describes must be what was begun there."""
    store = Store(folder) if folder else newest_store(wanted.name if wanted else name)
    plan = store.read_plan()
    if wanted is not None and make_plan(wanted).order != plan.order:
        raise UsageError(
            f"{store.path} was begun with other cells, repeats or order; go on with "
            f"`testbed sweep --resume {store.path}` alone, or start a new sweep without --resume"
        )
    if name not in (None, plan.name):
        raise UsageError(
            f"--name is {name}, but {store.path} holds {plan.name}; leave --name out, or give the "
            "folder of the sweep that you mean"
        )
    if timeline and not plan.timeline:
        raise UsageError(
            f"--timeline, but the sweep in {store.path} was begun without: its runs would not be "
            "alike; leave it out, or start a new sweep without --resume"
        )
    return store


def _check_hosts(plan: SweepPlan, hosts: str, context: typer.Context) -> None:
    """Refuse hosts, or a launcher that tells none, that a begun sweep cannot go on with."""
    if hosts and plan.tasks > 1:
        raise UsageError(
            "--hostfile, or a launcher's hosts, for a sweep that --submit shared out: a task runs "
            "on the node that Slurm gives it; leave them out"
        )
    if plan.hostfile and not hosts and "hosts" in _given(context):
        raise UsageError(
            "the sweep was begun on other hosts, and this launcher tells of none but this one; say "
            "with --hostfile where to go on"
        )


def _hostfile_text(hostfile: Path | None, context: typer.Context) -> str:
    """The hosts to run on: the user's file, else those of the launcher that started the sweep."""
    if hostfile is not None:
        try:
            text = hostfile.read_text()
        except OSError as error:
            raise UsageError(f"--hostfile is {hostfile}: {error.strerror}") from error
        if not text.strip():
            raise UsageError(f"--hostfile is {hostfile}, which is empty; expected `host slots=N`")
        return text
    return to_hostfile(_given(context).get("hosts") or ())


def _given(context: typer.Context) -> Mapping[str, Any]:
    """What the caller knows of the launcher that started this process.

    `hosts`: the (host, slots) it was given; `environment`: the variables that the cells' processes
    shall have, without the launcher's own. Both may be missing.
    """
    return context.obj if isinstance(context.obj, Mapping) else {}


def _print_commands(plan: SweepPlan) -> None:
    runs = list(plan.runs())
    print(f"{plan.name}: {len(plan.cells)} cells, {plan.repeats} repeats, {len(runs)} runs")
    hostfile = Path("hostfile") if plan.hostfile else None
    for key, config in runs:
        command = run_command(
            config,
            Path(f"{key}.json"),
            hostfile,
            interface=plan.interface,
            timeline=plan.timeline,
        )
        print(f"# {label(config)}\n{shlex.join(['testbed', *command[3:]])}")


def _check_submission(
    submit: str | None, tasks: int | None, go: bool, share: int | None, resume: bool
) -> None:
    if submit not in (None, "slurm"):
        raise UsageError(f"--submit is {submit!r}; expected slurm, the one queue that is known")
    if submit is None and (tasks is not None or go):
        raise UsageError("--tasks and --go are for --submit slurm; give it too, or leave them out")
    if share is not None and not (resume and submit is None):
        raise UsageError("--share is for a task of an array: sweep --resume FOLDER --share NUMBER")


def _num_processes(cell: RunConfig) -> int:
    """How many processes a cell starts, with dedicated servers."""
    return cell.workers + BACKENDS.resolve(cell.backend).facts.num_servers


def _shared_out(plan: SweepPlan, tasks: int | None) -> SweepPlan:
    if tasks is None:
        tasks = plan.tasks if plan.tasks > 1 else len(plan.cells)
    if not 1 <= tasks <= len(plan.order):
        raise UsageError(f"--tasks is {tasks}; expected 1 .. {len(plan.order)}, the sweep's runs")
    if any(cell.tune for cell in plan.cells):
        raise UsageError("--tune with --submit: tasks of an array share no search; leave one out")
    if plan.hostfile:
        raise UsageError("--hostfile with --submit: a task runs on the node that Slurm gives it")
    return msgspec.structs.replace(plan, tasks=tasks)


def _submit(store: Store, go: bool, cell_timeout: float | None) -> int:
    """Write the array's script into the sweep's folder, and hand it to sbatch if asked to."""
    plan, folder = store.read_plan(), store.path.resolve()
    command = own_command("sweep", "--resume", str(folder))
    command += [] if cell_timeout is None else ["--cell-timeout", str(cell_timeout)]
    processes = max(_num_processes(cell) for cell in plan.cells)
    threads = max(cell.threads or 1 for cell in plan.cells)
    script = folder / "array.sbatch"
    text = array_script(f"testbed-{plan.name}", folder, command, plan.tasks, processes, threads)
    write_atomically(script, text.encode())
    if not go:
        print(shlex.join(["sbatch", str(script)]))
        return 0
    try:
        return subprocess.run(["sbatch", str(script)], check=False).returncode
    except FileNotFoundError as error:
        remedy = "go where Slurm's commands are, or leave out --go and submit the script there"
        raise Unavailable("launcher", "sbatch", "no sbatch on PATH", remedy) from error


def _finish(
    store: Store, runner: Runner, json_path: Path | None, share: int | None, *, quiet: bool
) -> int:
    """Run what is missing, then show what is there."""
    tuner = functools.partial(tuned_cell, store, runner)
    status = carry_out(store, runner, share=share, tuner=tuner, quiet=quiet)
    if status == INTERRUPTED:
        return status
    report = make_report(collect_cells([store.path]))
    print(f"{to_text(report)}\n{store.path}")
    if json_path is not None:
        write_atomically(json_path, encode_report(report))
    return status
