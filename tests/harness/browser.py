"""Headless Chromium, driven by playwright-core (npm) from scripts in `tests/tools/browser`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "tools" / "browser"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WITHIN_S = 180.0


def in_browser(script: str, *arguments: str) -> dict[str, Any]:
    """What a script prints, as JSON; the test is skipped where the means are missing.

    Args:
        script: a file of `tests/tools/browser`.
        arguments: given to it.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt-get install nodejs npm)")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM} (apt-get install chromium, or set CHROMIUM)")
    _install()
    done = subprocess.run(
        ["node", str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={**os.environ, "CHROMIUM": CHROMIUM},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _install() -> None:
    """The packages that `package-lock.json` names, once; several test processes may ask."""
    with (FOLDER / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = FOLDER / "node_modules" / ".package-lock.json"
        if made.exists() and made.stat().st_mtime >= (FOLDER / "package-lock.json").stat().st_mtime:
            return
        done = subprocess.run(
            ["npm", "ci", "--no-fund", "--no-audit"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        if done.returncode != 0:
            pytest.skip(f"npm ci in {FOLDER} failed: {done.stderr.strip()[-200:]}")
