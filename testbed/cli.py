"""The `testbed` command: one verb per file, and one place where errors become words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from testbed.base.errors import TestbedError, UsageError
from testbed.commands.cluster import cluster
from testbed.commands.comm import comm
from testbed.commands.diff import diff
from testbed.commands.forecast import forecast
from testbed.commands.list import list_parts
from testbed.commands.pack import pack
from testbed.commands.plan import plan
from testbed.commands.profile import profile
from testbed.commands.report import report
from testbed.commands.rerun import rerun
from testbed.commands.run import run
from testbed.commands.simulate import simulate
from testbed.commands.sweep import sweep
from testbed.commands.why import why
from testbed.launch.allocation import allocation
from testbed.launch.join import who_am_i


class _Verb(TyperCommand):
    """A verb that tells where an option of one value is given twice: the last one counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of any command."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        given = [p for p in order if isinstance(p, TyperOption)]
        twice = [p for p in given if given.count(p) > 1 and not (p.multiple or p.is_flag)]
        if twice and who_am_i().rank == 0:
            for each in dict.fromkeys(twice):
                name, count = max(each.opts, key=len), given.count(each)
                listed = f"; a list is written {name} A,B" * (each.metavar == "LIST")
                told = f"{name} is given {count} times; the last one counts{listed}"
                sys.stderr.write(f"testbed: {told}\n")
        return super().parse_args(ctx, args)


def make_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(
        name="testbed",
        help="Which way of exchanging gradients is fastest for your model, and why.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    app.callback()(_whole)
    app.command(cls=_Verb)(run)
    app.command(cls=_Verb)(sweep)
    app.command(cls=_Verb)(forecast)
    app.command(cls=_Verb)(report)
    app.command(cls=_Verb)(diff)
    app.command(cls=_Verb)(rerun)
    app.command(cls=_Verb)(pack)
    app.command(cls=_Verb)(why)
    app.command(name="list", cls=_Verb)(list_parts)
    app.command(cls=_Verb)(comm)
    app.command(cls=_Verb)(cluster)
    app.command(cls=_Verb)(profile)
    app.command(cls=_Verb)(plan)
    app.command(cls=_Verb)(simulate)
    return app


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"testbed {version('testbed')}")
        raise typer.Exit


def _whole(
    wanted: Annotated[
        bool,
        typer.Option("--version", help="tell it and end", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """What the command line tells without a verb."""


def _conduct(given: list[str]) -> None:
    """Run a sweep on rank 0 of whatever launcher started it; returns on no launcher."""
    identity = who_am_i()
    if identity.launcher == "alone":
        return
    with allocation(identity, _interface(given)) as allocated:
        if allocated.conducts:
            context = {"hosts": allocated.hosts, "environment": allocated.environment}
            make_app()(given, obj=context)
    sys.exit(0)


def _interface(given: Sequence[str]) -> str | None:
    """The network on which the ranks of a sweep's launcher meet, before anything is parsed.

    Example:
        >>> _interface(["sweep", "--interface", "ib0"]), _interface(["sweep", "--interface=ib0"])
        ('ib0', 'ib0')
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--interface", nargs="?")
    found: str | None = parser.parse_known_args(given)[0].interface
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb; exit status 0 = done, 1 = a run failed, 2 = it was asked for wrongly."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Large tensors on huge pages, for every backend alike: copies between processes of one host are
    # otherwise bound by the kernel's work per 4 KiB page. Torch reads this when it first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        if given[:1] == ["sweep"]:
            _conduct(given)
        make_app()(given)
    except TestbedError as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        sys.stderr.write(f"testbed: {type(error).__name__}: {error}{notes}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.filename is None or isinstance(error.filename, int):
            raise
        sys.stderr.write(f"testbed: {_file_trouble(error)}\n")
        sys.exit(2)


def _file_trouble(error: OSError) -> str:
    """A file or folder that cannot be used, and why, in words."""
    named = os.fsdecode(error.filename)
    return (
        f"{type(error).__name__}: {named!r} cannot be used ({error.strerror}); name another, or "
        "change what stands in its way"
    )
