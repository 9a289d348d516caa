"""What the tests of launchers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.slurm import Slurm, absent, missing_programs, running_slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm cluster of one node."""
    if missing := missing_programs():
        absent(f"Slurm is not installed: no {', '.join(missing)} (Debian: slurm-wlm munge)")
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
