"""A comparative testbed for data-parallel training: which exchange of gradients wins, and why.

Adopt it in an existing PyTorch loop:

    session = testbed.distribute(model, optimizer, backend="mpi-ring")

or describe a workload of your own for the command line with `testbed.Workload`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.adopt import distribute
    from testbed.training.session import Session
    from testbed.workloads.workload import Workload

__all__ = ["Session", "Workload", "distribute"]

_HOME = {
    "Session": "testbed.training.session",
    "distribute": "testbed.adopt",
    "Workload": "testbed.workloads.workload",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `testbed report` needs no torch."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'testbed' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_HOME[name]), name)
