"""Runs `testbed` commands of one checkout in one process, and keeps what each printed and wrote.

Started by `compare_with` with the Python of the checkout in question, so it imports nothing of the
project but what a user calls: `testbed.cli.main`, and the reader of plan files for their digests.

    OLD/.venv/bin/python -P call_cli.py OLD commands.json results/
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

PLAN_READERS = ("testbed.base.plan", "testbed.scheduling.plan_file", "testbed.scheduling.plan")
"""Modules in which `load_plan` stands or stood, the newest first."""
PLANS = "plan*.json"
CRASHED = 70


def main(checkout: Path, commands: Path, results: Path) -> None:
    """Run every command of the file, each in a folder of its own below `results`.

    Args:
        checkout: that the imported `testbed` must be part of.
        commands: JSON list of objects: `name` of the folder, `arguments`, and `inputs`, folders
            and files that are copied into it before (path of the copy -> path of the original).
        results: must not exist; each folder then holds `stdout.txt`, `status.txt` with the exit
            status and what went to stderr, the files that the command wrote, and `digests.json`
            with the digest of each plan file among them.

    Raises:
        SystemExit: `testbed` is imported from somewhere else.
    """
    found = Path(next(iter(import_module("testbed").__path__))).resolve()
    if found.parent != checkout.resolve():
        sys.exit(f"testbed is imported from {found}; expected it in {checkout}: use its own Python")
    cli = import_module("testbed.cli")
    for command in json.loads(commands.read_text()):
        folder = results / command["name"]
        folder.mkdir(parents=True)
        for copy, original in command["inputs"].items():
            (folder / copy).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if os.path.isdir(original) else shutil.copy)(original, folder / copy)
        _run(cli, command["arguments"], folder)


def _run(cli: Any, arguments: list[str], folder: Path) -> None:
    printed, complaints = io.StringIO(), io.StringIO()
    sys.argv = ["testbed", *arguments]
    status: object = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complaints),
    ):
        try:
            cli.main(arguments)
        except SystemExit as ended:
            status = ended.code or 0
        except Exception:
            traceback.print_exc()
            status = CRASHED
    (folder / "stdout.txt").write_text(printed.getvalue())
    (folder / "status.txt").write_text(f"exit status {status}\n{complaints.getvalue()}")
    plans = sorted(folder.glob(PLANS))
    if plans:
        load_plan = _plan_reader()
        digests = {path.name: load_plan(path).digest() for path in plans}
        (folder / "digests.json").write_text(json.dumps(digests))


def _plan_reader() -> Any:
    """The checkout's function `load_plan`, wherever it stands.

    Raises:
        SystemExit: in none of the known modules.
    """
    for name in PLAN_READERS:
        try:
            return import_module(name).load_plan
        except (ModuleNotFoundError, AttributeError):
            continue
    sys.exit(f"load_plan is in none of {', '.join(PLAN_READERS)}; add its module to PLAN_READERS")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
