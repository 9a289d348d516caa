"""The `testbed` command: one verb per file, and one place where errors become words."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from testbed.commands.comm import comm
from testbed.commands.list import list_parts
from testbed.commands.report import report
from testbed.commands.run import run
from testbed.commands.sweep import sweep
from testbed.errors import TestbedError, UsageError


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
    app.command()(run)
    app.command()(sweep)
    app.command()(report)
    app.command(name="list")(list_parts)
    app.command()(comm)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb; exit status 0 = done, 1 = a run failed, 2 = it was asked for wrongly."""
    try:
        make_app()(arguments)
    except TestbedError as error:
        sys.stderr.write(f"testbed: {type(error).__name__}: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)
