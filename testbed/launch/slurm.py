"""Slurm: what its variables tell the task of a step, and the script of an array of tasks."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.base.errors import UsageError

# Below the ports that Linux hands to outgoing connections (32768 and above).
FIRST_PORT, NUM_PORTS = 20000, 12000


def is_own_step(environment: Mapping[str, str]) -> bool:
    """Whether Slurm made the step by itself, for a batch script or an interactive shell.

    Such steps have the largest numbers that there are.
    """
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) >= 0xFFFFFFF0


def control_port(environment: Mapping[str, str]) -> int:
    """The port that rank 0 listens on: tasks have no channel to tell one another."""
    return FIRST_PORT + int.from_bytes(_digest(environment)[0:2], "big") % NUM_PORTS


def token(environment: Mapping[str, str]) -> bytes:
    """The word that opens the control port.

    srun gives tasks no channel of their own: without an exported TESTBED_TOKEN (hexadecimal) the
    token is derived from what all tasks know, which keeps jobs apart but is no secret from others
    who can list the queue.
    """
    return bytes.fromhex(environment.get("TESTBED_TOKEN", "")) or _digest(environment)[2:18]


def _digest(environment: Mapping[str, str]) -> bytes:
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}.{os.getuid()}"
    return hashlib.sha256(step.encode()).digest()


def hosts_of_ranks(environment: Mapping[str, str], size: int) -> list[str]:
    """The node of each task of the step.

    Slurm tells how many tasks a node has; which they are is known for the two usual
    distributions, `block` and `cyclic`. For any other each task is "one of" the nodes.

    Raises:
        UsageError: the variables name no nodes.

    Example:
        >>> hosts_of_ranks({"SLURM_STEP_NODELIST": "n[1-2]",
        ...                 "SLURM_STEP_TASKS_PER_NODE": "2,1"}, 3)
        ['n1', 'n1', 'n2']
    """
    nodes = nodes_of(environment)
    counts = tasks_per_node(environment)
    distribution = environment.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    placed: list[str] = []
    if distribution == "block":
        placed = [node for node, count in zip(nodes, counts, strict=False) for _ in range(count)]
    elif distribution == "cyclic":
        rounds = range(max(counts, default=0))
        placed = [n for k in rounds for n, c in zip(nodes, counts, strict=False) if k < c]
    unknown = nodes[0] if len(nodes) == 1 else f"one of {', '.join(nodes)}"
    return placed if len(placed) == size else [unknown] * size


def nodes_of(environment: Mapping[str, str]) -> list[str]:
    """The nodes of the step.

    Raises:
        UsageError: the variables name none.
    """
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if text is None:
        raise UsageError("SLURM_STEP_ID is set but neither SLURM_STEP_NODELIST nor _JOB_NODELIST")
    return expand_node_list(text)


def tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """How many tasks of the step each of its nodes has; empty where Slurm does not tell.

    Example:
        >>> tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1"})
        [4, 4, 1]
    """
    counts: list[int] = []
    for piece in filter(None, environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        count, _, times = piece.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def expand_node_list(text: str) -> list[str]:
    """Host names of a Slurm node list.

    Example:
        >>> expand_node_list("gpu[01-03,7],login")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    names: list[str] = []
    depth, start = 0, 0
    for i, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            names += _expand_group(text[start:i])
            start = i + 1
    return names


def _expand_group(text: str) -> list[str]:
    prefix, bracket, rest = text.partition("[")
    if not bracket:
        return [text]
    ranges, _, suffix = rest.partition("]")
    numbers: list[str] = []
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        last = int(high) if dash else int(low)
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), last + 1)]
    return [prefix + number + tail for number in numbers for tail in _expand_group(suffix or "")]


def array_script(
    name: str, folder: Path, command: Sequence[str], tasks: int, processes: int, threads: int
) -> str:
    """A script for sbatch, whose task K runs the command with `--share K` at its end.

    Args:
        name: of the job.
        folder: absolute; task K's output is appended to `task-K.log` there.
        command: program and arguments.
        tasks: of the array.
        processes: that a task starts at a time, at most.
        threads: of each of them.
    """
    log = shlex.quote(str(folder / "task-").replace("%", "%%") + "%a.log")
    return f"""#!/bin/sh
# Each task measures its share of a sweep's runs. Submitted once more, it goes on with what is not
# finished: all tasks, or one of them by `sbatch --array=K`.
#SBATCH --job-name={shlex.quote(name)}
#SBATCH --array=0-{tasks - 1}
#SBATCH --nodes=1
#SBATCH --ntasks={processes}
#SBATCH --cpus-per-task={threads}
#SBATCH --chdir={shlex.quote(os.getcwd())}
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
exec {shlex.join(command)} --share "$SLURM_ARRAY_TASK_ID"
"""
