"""Headless Chromium, driven by playwright-core in Node; scripts: tests/tools/browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools" / "browser"


def installed() -> Path:
    """The folder of the scripts, what they import installed as the lock file says.

    Skips the test, with the reason, where there is no Chromium, no Node or no registry.
    """
    if shutil.which("chromium") is None:
        pytest.skip("no chromium; apt-get install chromium")
    for needed in ("node", "npm"):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed}; apt-get install nodejs npm")
    done = TOOLS / "node_modules" / ".package-lock.json"
    lock = TOOLS / "package-lock.json"
    if not done.exists() or done.stat().st_mtime_ns < lock.stat().st_mtime_ns:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        tried = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, timeout=300)
        if tried.returncode != 0:
            pytest.skip(f"npm ci failed: {tried.stderr.strip()[-300:]}")
    return TOOLS


def drive(script: str, *arguments: str | Path, timeout: float = 110) -> dict[str, Any]:
    """What a script printed as JSON."""
    command = ["node", str(installed() / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
