"""Makes a sweep's folder ready to be committed: no scratch, lock or log, no path of the machine.

    python -m tests.tools.clean_results DIR

Below DIR, and nowhere else, it removes `scratch/`, `lock`, `lock-K`, `array.sbatch`, `*.log` and
files that were not written to their end, and replaces absolute paths in its JSON files: what lies
below the directory that this runs in becomes relative to it, of others the last name stays. Links
are never followed. A folder in which a sweep is at work is left alone.

Settings of cells are not changed: the name of a cell's file is a digest of them, and so are keys
of forecasts. Files whose settings hold absolute paths, or that hold a digest of themselves, are
listed instead: run such a sweep with relative paths.

Exit status: 0 clean, 1 paths are left, 2 no sweep's folder, or one in use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.records.environment import without_machine_paths
from testbed.records.store import Store

SETTINGS = ("config", "cells")  # of a cell, of a sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.clean_results",
        description="Removes scratch, locks and logs of a sweep's folder, and paths of the machine",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    try:
        removed, changed, left = clean(parser.parse_args(arguments).folder)
    except UsageError as error:
        print(f"clean_results: {error}", file=sys.stderr)
        return 2
    print(f"removed {len(removed)}, replaced paths in {len(changed)} files")
    for name in left:
        print(f"left as it is, as its settings or its digest hold absolute paths: {name}")
    return 1 if left else 0


def clean(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Names below the folder: removed, changed, and left with a path in them.

    Raises:
        UsageError: no sweep was begun there, or one is at work in it.
    """
    store = Store(folder.resolve())
    store.read_plan()
    with store.locked():
        changed, left = [], []
        for path in _files(store.path):
            if path.suffix != ".json" or _is_leftover(path, store.path):
                continue
            name = str(path.relative_to(store.path))
            data = path.read_bytes()
            clean_data = without_paths(data, os.getcwd())
            if clean_data != data:
                write_atomically(path, clean_data)
                changed.append(name)
            if _with_paths(msgspec.json.decode(clean_data), os.getcwd()):
                left.append(name)
        removed = [str(p.relative_to(store.path)) for p in _remove(store.path)]
    return removed, changed, left


def without_paths(data: bytes, working_dir: str) -> bytes:
    """A JSON file with no absolute path in its strings, its layout and numbers as they were.

    Args:
        data: of the file.
        working_dir: that paths become relative to; what has a digest, and settings, stay.

    Example:
        >>> without_paths(b'{"a": [1.50, "/x/y/z.py"], "config": {"trace": "/x/t"}}', "/x")
        b'{"a": [1.50, "y/z.py"], "config": {"trace": "/x/t"}}'
    """
    value, kept = msgspec.json.decode(data), set[str]()
    if isinstance(value, dict):
        if value.get("digest"):
            return data
        kept = _with_paths([value.get(key) for key in SETTINGS], working_dir)
    for text in _with_paths(value, working_dir) - kept:
        replaced = without_machine_paths(text, working_dir)
        data = data.replace(msgspec.json.encode(text), msgspec.json.encode(replaced))
    return data


def _with_paths(value: Any, working_dir: str) -> set[str]:
    return {text for text in _strings(value) if without_machine_paths(text, working_dir) != text}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (path for name in sorted(names) if not (path := Path(place, name)).is_symlink())


def _is_leftover(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder)
    return (
        inside.parts[0] == "scratch"
        or inside.name in ("lock", "array.sbatch")
        or (inside.parent == Path() and inside.name.startswith("lock-"))
        or inside.suffix == ".log"
        or (inside.name.startswith(".") and inside.suffix == ".partial")
    )


def _remove(folder: Path) -> list[Path]:
    """The lock, which is held meanwhile, goes last."""
    leftovers = [path for path in _files(folder) if _is_leftover(path, folder)]
    scratch = folder / "scratch"
    if scratch.is_symlink():
        scratch.unlink()
    elif scratch.is_dir():
        shutil.rmtree(scratch)
    for path in sorted(leftovers, key=lambda path: path.name == "lock"):
        path.unlink(missing_ok=True)  # those of scratch are gone
    return leftovers


if __name__ == "__main__":
    sys.exit(main())
