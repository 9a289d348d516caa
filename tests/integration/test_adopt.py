"""A script of one's own under torchrun, with every sort of scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import testbed
from testbed.base.errors import UsageError
from testbed.base.files import save_link, save_trace
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from tests.harness.runs import ROOT, WITHIN_S, forkable

SCRIPT = Path(__file__).parents[1] / "harness" / "own_script.py"


def by_hand() -> torch.nn.Module:
    """The same training in one process: the mean over two halves is the mean over all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    inputs = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    for step in range(6):
        optimizer.zero_grad()
        model(inputs[step]).square().mean().backward()
        optimizer.step()
    return model


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A trace of the script's model and a link, as `profile` and `comm --fit` would write them."""
    tensors = tuple(
        TraceTensor(name=name, num_elements=p.numel(), forward_s=1e-3, backward_s=1e-3)
        for name, p in by_hand().named_parameters()
    )
    trace, link = tmp_path / "trace.json", tmp_path / "link.json"
    save_trace(Trace(name="mine", device="cpu", batch_size=2, tensors=tensors), trace)
    save_link(Link(backend="gloo", num_workers=2, latency_s=2e-3, seconds_per_byte=1e-9), link)
    return trace, link


@pytest.mark.parametrize(
    ("scheduler", "memory"),
    [
        ("dear:mib=0.001", "checkpoint:segments=1+release"),
        ("bytescheduler:partition_kib=1", "none"),
        ("pace", "none"),
    ],
)
def test_a_script_trains_as_one_process(
    scheduler: str, memory: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    record = tmp_path / "state.pt"
    trace, link = files if scheduler == "pace" else ("", "")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    script = [str(SCRIPT)]
    if scheduler != "pace":
        module = (sys.executable, "-m", "tests.harness.own_script")
        script = ["--no-python", *forkable(module)]
    done = subprocess.run(
        [*torchrun, *script, scheduler, memory, str(trace), str(link), str(record)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(record)
    for name, expected in by_hand().state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)


UNEVEN = """
import torch, testbed
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = testbed.distribute(model, optimizer, {backend!r}, scheduler={scheduler!r})
for step in range(3 if session.backend.rank else 5):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
print("rank", session.backend.rank, "ended its loop", flush=True)
session.close()
"""


@pytest.mark.parametrize(("backend", "scheduler"), [("gloo", "wfbp"), ("zmq-ps", "dear")])
def test_a_rank_that_ends_its_loop_early_is_not_waited_for(
    backend: str, scheduler: str, tmp_path: Path
) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN.format(backend=backend, scheduler=scheduler))
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=WITHIN_S, cwd=ROOT
    )
    assert done.returncode != 0
    assert "rank 1 ended its loop" in done.stdout
    assert "rank 0 ended its loop" not in done.stdout
    assert "is lost: it ended its training loop after 3 steps" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"'mg-wfbp' plans from times .*testbed profile .*testbed comm --fit"),
        ({"trace": "t.json"}, "trace= was given without link="),
        ({"link": "l.json"}, "link= was given without trace="),
    ],
)
def test_a_scheduler_that_plans_from_times_says_so(given: dict[str, str], words: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=words):
        testbed.distribute(model, optimizer, "gloo", scheduler="mg-wfbp", **given)


def test_a_trace_of_another_model_is_refused(files: tuple[Path, Path]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"is for another model: tensor '0\.bias'"):
        testbed.distribute(
            model, optimizer, "gloo", scheduler="optimal", trace=files[0], link=files[1]
        )


def test_a_script_without_a_launcher_says_that_it_trains_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    testbed.distribute(model, optimizer, "gloo").close()
    assert "this process trains alone" in capsys.readouterr().err


@pytest.mark.mpi
def test_a_script_without_a_launcher_leaves_no_shared_memory(tmp_path: Path) -> None:
    words = (
        "import torch, testbed; m = torch.nn.Linear(2, 2); "
        "o = torch.optim.SGD(m.parameters(), lr=0.1); testbed.distribute(m, o, 'mpi-ring').close()"
    )
    there = {**os.environ, "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=there)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
