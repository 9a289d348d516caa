"""`testbed comm`: the micro-benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer

from testbed.backends.protocol import Group
from testbed.base.errors import UsageError
from testbed.base.files import to_json, write_atomically
from testbed.base.spec import split_specs
from testbed.base.units import parse_bytes, parse_seconds
from testbed.cluster.facts import find_facts
from testbed.commands.checks import (
    check_files,
    check_one_place,
    check_output,
    check_places,
    cluster_text,
)
from testbed.commands.comm_fit import check_fit, fit_arguments, fit_member
from testbed.launch import processes
from testbed.launch.allocation import run_in_cluster
from testbed.launch.host import threads_of
from testbed.launch.job import Job, run_job
from testbed.launch.join import Role, assign_role, who_am_i
from testbed.microbench.config import reproduce, to_arguments
from testbed.microbench.contestants import Contestant, bus_factor_of, comparable, resolve, together
from testbed.records.comm import CommConfig, CommRecord, CommResult
from testbed.records.environment import describe_environment


class Format(StrEnum):
    """Whose columns the results are printed in."""

    TABLE = "table"
    OSU = "osu"


def comm(
    backend: Annotated[
        str | None,
        typer.Option(
            help="name[:key=value,...],name,...; see testbed list",
            show_default="all that add up between processes on CPUs",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="processes that exchange (alone: 2; under a launcher: what it started; in a "
            "cluster: its places)",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="emulate a cluster: nodes=4,rate=10gbit,dilation=10; see testbed cluster",
            show_default="none",
        ),
    ] = None,
    min_bytes: Annotated[
        str, typer.Option("--min", "--minbytes", "-b", help="smallest size, as 4K")
    ] = "4K",
    max_bytes: Annotated[
        str,
        typer.Option(
            "--max",
            "--maxbytes",
            "-e",
            help="largest size, as 64M (torchrun takes --max for its own)",
        ),
    ] = "64M",
    factor: Annotated[
        int, typer.Option("--factor", "-f", help="each size over the one before it")
    ] = 4,
    iters: Annotated[
        int, typer.Option("--iters", "-n", help="timed exchanges per size and backend")
    ] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup", "-w", help="exchanges before them that are not timed")
    ] = 5,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, float16, bfloat16, int64, int32 or uint8")
    ] = "float32",
    op: Annotated[
        str, typer.Option(help="sum (all-reduce), fold-spread (its halves), gather or broadcast")
    ] = "sum",
    check: Annotated[
        int,
        typer.Option("--check", "-c", help="timed exchanges whose result is compared; 0 = none"),
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    deadline: Annotated[str, typer.Option(help="an exchange must end within this time")] = "10",
    seed: Annotated[int, typer.Option(help="of the order in which backends take turns")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="torch threads per rank", show_default="cores / ranks")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Open MPI hostfile: start the ranks on these hosts")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="network interface or address to use", show_default="decided")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", "-J", help="write the results (schema testbed.comm/1) here"),
    ] = None,
    per_iteration: Annotated[
        bool,
        typer.Option(
            "--per-iteration", "-I", help="add columns: min, max, p99, cv of the timed exchanges"
        ),
    ] = False,
    format: Annotated[
        Format,
        typer.Option(help="table: a row as each size is done; osu: OSU's columns at the end"),
    ] = Format.TABLE,
    fit: Annotated[
        bool, typer.Option("--fit", help="fit start-up and per-byte time instead; up to --max")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="--fit: write the link (schema testbed.link/1) here"),
    ] = None,
) -> None:
    """Time one exchange at many sizes over several backends, and check what arrived.

    All backends are open in the same job and take turns, one exchange each, in random order, so
    that whatever slows the machine slows all of them. algbw = size / time. busbw = algbw x
    2 (n - 1) / n for a sum over n workers: the bytes that the busiest link carries in one direction
    over the time (for a parameter server what its busiest link really carries).

    Exit status: 0 fine, 1 wrong results or a failure, 2 asked for wrongly.

    Examples:
        testbed comm --backend mpi-ring,mpi,gloo,zmq-ps --workers 2 --max 16M

        testbed comm --backend mpi,mpi:blocking=1 --json comm.json

        testbed comm --backend gloo -b 64 -e 4M -f 2 -n 50 -w 10 -c 1 -I -J comm.json

        testbed comm --backend mpi-ring,mpi --format osu

        testbed comm --fit --backend gloo --workers 2 -o link.json

        mpirun --oversubscribe --allow-run-as-root -n 4 testbed comm --backend mpi-ring,gloo
    """
    here = find_facts(os.environ)
    contestants = resolve(split_specs(backend) if backend else comparable())
    whole = together(contestants)
    inside = cluster_text(cluster, here)
    if inside is not None:
        workers = check_places(inside, whole, workers)
        check_one_place(here, hostfile)
    config = make_config(
        {
            "backend": tuple(each.text for each in contestants),
            "cluster": inside,
            "min_bytes": parse_bytes(min_bytes),
            "max_bytes": parse_bytes(max_bytes),
            "factor": factor,
            "iters": iters,
            "warmup": warmup,
            "dtype": dtype,
            "op": op,
            "check": check,
            "device": device,
            "deadline": parse_seconds(deadline),
            "seed": seed,
            "threads": threads,
        },
        workers,
    )
    check_fit(config, output, fit)
    if fit and (per_iteration or format is not Format.TABLE):
        raise UsageError("--fit prints a fit, not exchanges; leave out -I and --format")
    identity = who_am_i()
    if identity.rank == 0:  # which writes
        _check_outputs(json, output, hostfile, fit=fit)
    as_member = (
        partial(fit_member, output=output)
        if fit
        else partial(_as_member, json=json, per_iteration=per_iteration, format=format)
    )
    more = fit_arguments(output) if fit else ["--format", format, *["-I"] * per_iteration]
    if inside is not None and here is None:
        again = _arguments(config, interface, json, more)
        raise typer.Exit(run_in_cluster(inside, processes.own_command(*again), config.deadline))
    if identity.launcher != "alone":
        role = assign_role(identity, whole, workers)
        config = with_workers(config, role.num_workers)
        raise typer.Exit(as_member(config, contestants, role, interface))
    role = Role(identity, whole, config.workers, whole.facts.num_servers)
    for contestant in contestants:
        bus_factor_of(contestant, config)  # its options must fit before any process is started
    if config.workers + role.num_servers == 1 and not (whole.facts.needs_mpi or hostfile):
        raise typer.Exit(as_member(config, contestants, role, interface))
    if here is not None:
        hostfile = hostfile or Path(here.hostfile)
    raise typer.Exit(_start(config, role, hostfile, interface, json, more))


def _check_outputs(
    json: Path | None, output: Path | None, hostfile: Path | None, *, fit: bool
) -> None:
    """Refuse files that cannot be read or written, before any process is started.

    Raises:
        UsageError: names the option and the path; or --json with --fit, which times no exchanges.
    """
    if fit and json is not None:
        raise UsageError(
            f"--json is {str(json)!r}, but --fit measures a link, no exchanges; write the link "
            "with -o, or leave out --fit"
        )
    check_files(json, hostfile)
    if output is not None:
        check_output("-o", output)


def make_config(given: dict[str, Any], workers: int | None) -> CommConfig:
    """A checked configuration.

    Raises:
        UsageError: a value is not allowed; says which are.
    """
    for name, hint in get_type_hints(CommConfig).items():
        allowed = get_args(hint) if get_origin(hint) is Literal else ()
        if allowed and given[name] not in allowed:
            raise UsageError(f"--{name} is {given[name]!r}; expected one of {', '.join(allowed)}")
    try:
        return msgspec.convert(
            given | ({} if workers is None else {"workers": workers}), CommConfig
        )
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, UsageError) else UsageError(str(error)) from error


def with_workers(config: CommConfig, workers: int) -> CommConfig:
    """The configuration for as many workers as the launcher started, checked again."""
    return msgspec.structs.replace(config, workers=workers)


def _as_member(
    config: CommConfig,
    contestants: tuple[Contestant, ...],
    role: Role,
    interface: str | None,
    json: Path | None,
    per_iteration: bool,
    format: Format,
) -> int:
    from testbed.microbench.measure import SizeSamples
    from testbed.microbench.member import Hear, run_member
    from testbed.microbench.results import results_of, total_wrong
    from testbed.microbench.table import emulation_of, footer, header, osu, row

    emulation = emulation_of(find_facts(os.environ))
    results: list[CommResult] = []
    hosts: list[str] = []

    def begin(group: Group) -> Hear:
        hosts.extend(group.hosts)
        if format is Format.TABLE:
            launcher = role.identity.launcher
            _say(header(config, group.hosts, launcher, emulation, per_iteration=per_iteration))
        return hear

    def hear(samples: SizeSamples) -> None:
        rows = results_of(config, contestants, samples, emulation.line_bps if emulation else None)
        results.extend(rows)
        if format is Format.TABLE:
            each = (row(config, r, emulation, per_iteration=per_iteration) for r in rows)
            _say("".join(each))

    if not run_member(config, contestants, role, interface, begin):
        return 0
    shown = osu if format is Format.OSU else footer
    _say(shown(config, results, emulation))
    if json is not None:
        _write(json, config, results, role, hosts)
    return 1 if total_wrong(results) else 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write(
    path: Path, config: CommConfig, results: list[CommResult], role: Role, hosts: list[str]
) -> None:
    environment = describe_environment(
        launcher=role.identity.launcher,
        launcher_variables=dict(role.identity.variables),
        hosts=hosts,
        num_servers=role.num_servers,
        device=config.device,
        seed=config.seed,
    )
    facts = find_facts(os.environ)
    record = CommRecord(
        results=results,
        config=config,
        dilation=facts.dilation if facts else 1.0,
        cluster=facts.record if facts else None,
        environment=environment,
        command=reproduce(config),
    )
    write_atomically(path, to_json(record))


def _arguments(
    config: CommConfig, interface: str | None, json: Path | None, more: Sequence[str]
) -> list[str]:
    """The command line that starts this measurement again."""
    arguments = ["comm", *to_arguments(config), *more]
    arguments += ["--interface", interface] if interface else []
    return arguments + (["--json", str(json.absolute())] if json else [])


def _start(
    config: CommConfig,
    role: Role,
    hostfile: Path | None,
    interface: str | None,
    json: Path | None,
    more: Sequence[str],
) -> int:
    """Start the ranks and wait for them."""
    size = config.workers + role.num_servers
    threads = config.threads or threads_of(size, find_facts(os.environ))
    job = Job(
        processes.own_command(*_arguments(config, interface, json, more)),
        size,
        threads,
        role.backend.facts.needs_mpi,
        hostfile,
        one_machine=config.cluster is not None,
        modules=("testbed.cli", "testbed.microbench.member"),
    )
    over = run_job(job, config.deadline)
    if over.words:
        sys.stderr.write(f"testbed: the measurement failed: {over.words}\n")
    return over.status
