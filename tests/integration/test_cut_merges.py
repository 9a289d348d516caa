"""Large sparse messages are merged in ranges, one on each server; nothing else changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.base.files import save_trace
from testbed.base.trace import Trace, TraceTensor
from testbed.base.types import CUT_BYTES
from testbed.records.cell import Cell, decode_cell
from tests.harness.runs import testbed

NUM_ELEMENTS = CUT_BYTES // 4 + 1_001


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    tensors = (
        TraceTensor(name="one.weight", num_elements=500, forward_s=1e-3, backward_s=1e-3),
        TraceTensor(name="two.weight", num_elements=NUM_ELEMENTS, forward_s=1e-3, backward_s=1e-3),
    )
    place = tmp_path / "large.json"
    save_trace(Trace(name="large", device="V100", batch_size=8, tensors=tensors), place)
    return place


def run(trace: Path, backend: str, compressor: str) -> Cell:
    cell = trace.with_name("cell.json")
    done = testbed(
        *("run", "--workload", f"replay:{trace}", "--workers", "3", "--steps", "3"),
        *("--warmup", "1", "--json", str(cell), "--backend", backend, "--threads", "1"),
        *("--compressor", compressor, "--scheduler", "wfbp"),
    )
    assert done.status == 0, done.err
    return decode_cell(cell.read_bytes())


@pytest.mark.parametrize(
    "compressor", ["ef+topk:ratio=0.01", "topk:ratio=0.4", "qsgd", "ef+threshold:value=0.004"]
)
def test_servers_that_share_a_message_give_what_a_gather_gives(
    trace: Path, compressor: str
) -> None:
    shared = run(trace, "zmq-ps:servers=colocated:3", compressor)
    gathered = run(trace, "gloo", compressor)
    assert shared.final_digest == gathered.final_digest != shared.initial_digest


def test_no_server_sends_much_more_than_its_share(trace: Path) -> None:
    """With one owner its host sends n - 1 merged payloads, and every worker one: here a third."""
    shared = run(trace, "zmq-ps:servers=colocated:3", "topk:ratio=0.01")
    alone = run(trace, "zmq-ps:servers=colocated:1", "topk:ratio=0.01")
    assert wire_bytes(shared) < 0.6 * wire_bytes(alone)
    for cell in (shared, alone):
        assert cell.compression is not None
        # Each of them selects a hundredth: 4 bytes and at most as many for its place.
        assert (
            4 * 0.01 * NUM_ELEMENTS < cell.compression.sent_bytes <= 8 * 0.01 * NUM_ELEMENTS + 100
        )


def wire_bytes(cell: Cell) -> float:
    assert cell.wire_bytes_per_step is not None
    return cell.wire_bytes_per_step
