"""A built wheel carries workloads and recipes as parts of the package, and works elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_but_the_package_lands_in_site_packages(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"testbed"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"testbed/models/resnet.py", "testbed/recipes/quick.py", "testbed/py.typed"} <= names
    assert "testbed/forking/stub.c" in names
    assert {f"testbed/reporting/page/page.{kind}" for kind in ("css", "js")} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_runs_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies of this environment, but the package from the wheel alone.
    libraries = sysconfig.get_paths()["purelib"]
    environment = {**os.environ, "PYTHONPATH": f"{site}:{libraries}", "PYTHONSAFEPATH": "1"}
    where = subprocess.run(
        [sys.executable, "-S", "-c", "import testbed; print(testbed.__file__)"],
        capture_output=True,
        text=True,
        cwd=empty,
        env=environment,
    )
    assert where.stdout.startswith(str(site))
    done = subprocess.run(
        [sys.executable, "-m", "testbed", "sweep", "quick", "--backend", "gloo", "--repeats", "1"],
        capture_output=True,
        text=True,
        cwd=empty,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (empty / "runs" / "results").iterdir()
    (cell,) = [json.loads(p.read_text()) for p in (folder / "cells").glob("*.json")]
    assert cell["status"] == "ok"
    assert cell["identical_work"] is True
