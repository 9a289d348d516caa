"""PyTorch's DistributedDataParallel on GPUs, over Gloo and over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed.records.cell import decode_cell
from tests.contracts.specs import most_nccl_ranks
from tests.harness.runs import testbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.mark.parametrize("backend", ["ddp", "ddp:over=nccl", "ddp:over=nccl,hook=fp16"])
def test_ddp_trains_as_one_process_and_its_wait_is_the_device_s(
    backend: str, tmp_path: Path
) -> None:
    if "nccl" in backend and most_nccl_ranks() < 2:
        pytest.skip("two ranks of NCCL need two GPUs, or one that they may share")
    record = tmp_path / "cell.json"
    run = ("run", "--workload", "digits-cnn", "--backend", backend, "--workers", "2")
    done = testbed(*run, "--device", "cuda", "--steps", "20", "--json", str(record))
    assert done.status == 0, done.err
    cell = decode_cell(record.read_bytes())
    assert cell.identical_work or "hook" in backend, cell.identical_work_note
    assert cell.step_time_s is not None
    assert cell.exposed_comm_s is not None
    assert 0 <= cell.exposed_comm_s < cell.step_time_s
    assert cell.wire_bytes_per_step


def test_what_it_does_on_a_gpu_is_not_recorded(tmp_path: Path) -> None:
    run = ("run", "--workload", "digits-mlp", "--backend", "ddp", "--workers", "2")
    timeline = ("--timeline", str(tmp_path / "timeline.json"))
    done = testbed(*run, "--device", "cuda", "--steps", "5", *timeline)
    assert done.status == 2
    assert "--timeline cannot stand beside ddp on a GPU" in done.err
