"""Packages of third parties, installed as `pip install` does, into a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def install(package: Path, scratch: Path) -> Path:
    """The folder with the installed package, built from a copy: builds write beside sources."""
    source, into = scratch / "source" / package.name, scratch / "site"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(into)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return into


def for_children(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here find what is installed there."""
    paths = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
