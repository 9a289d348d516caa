"""How many files of the project one gradient enters between its hook and the optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.trace_gradient import trace

ROOT = Path(__file__).parent.parent.parent
BOUNDS = {"mpi-ring": 16, "zmq-ps": 19}


@pytest.mark.mpi
def test_a_gradient_enters_few_files() -> None:
    ways = trace(list(BOUNDS), ROOT)
    for backend, way in ways.items():
        assert len(way.files) <= BOUNDS[backend], f"{backend}:\n{way.text()}"
        assert next(iter(way.files)).startswith("training/"), "the hook is the first call"
    on_server = {p for v in ways["zmq-ps"].files.values() for p, _ in v.threads}
    assert len(on_server) == 2, "calls of rank 0 and of its server"
