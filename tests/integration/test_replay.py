"""Recorded workloads through the real trainer: same work as one process, under any scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean

import pytest

from testbed.base.files import save_link, save_trace
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.cluster.relay import TUN
from testbed.cluster.system import lacking
from testbed.launch.held_out import Known, forecast_cells
from testbed.noise.rehearsal import FEW_COUNTED, LEAST_COUNTED
from testbed.prediction.rehearsal_fit import agreed
from testbed.records.cell import Cell, decode_cell
from tests.harness.runs import answer, testbed

SIZES = (300, 40, 70_000, 1_000, 40_000, 1, 20_000, 600)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    tensors = tuple(
        TraceTensor(
            name=f"layer{i // 2}.{'weight' if i % 2 == 0 else 'bias'}",
            num_elements=size,
            forward_s=1e-3,
            backward_s=2e-3,
        )
        for i, size in enumerate(SIZES)
    )
    place = tmp_path / "toy.json"
    save_trace(Trace(name="toy", device="V100", batch_size=8, tensors=tensors), place)
    return place


def run(folder: Path, trace: Path, *arguments: str) -> Cell:
    cell = folder / "cell.json"
    done = testbed(
        *("run", "--workload", f"replay:{trace}", "--workers", "2", "--steps", "12"),
        *("--warmup", "2", "--json", str(cell), *arguments),
    )
    assert done.status == 0, done.err
    return decode_cell(cell.read_bytes())


@pytest.mark.parametrize(
    ("backend", "scheduler", "more"),
    [
        ("mpi-ring", "mg-wfbp", ()),
        ("gloo", "dear:mib=0.1", ("--accumulate", "2", "--predict")),
        (
            "zmq-ps",
            "bytescheduler:partition_kib=64,credit_kib=128",
            ("--clip-norm", "50", "--predict"),
        ),
        ("mpi-ring", "asc-wfbp", ("--optimizer", "adam")),
    ],
)
def test_a_replay_trains_as_one_process_does(
    tmp_path: Path, trace: Path, backend: str, scheduler: str, more: tuple[str, ...]
) -> None:
    cell = run(tmp_path, trace, "--backend", backend, "--scheduler", scheduler, *more)
    assert cell.identical_work is True, cell.identical_work_note
    assert cell.batch_size == 8 * cell.config.accumulate
    assert cell.step_time_s is not None
    assert cell.predicted_step_time_s is not None
    computed_s = cell.config.accumulate * 24e-3
    # Of all steps: where a rank is late in one it is the sooner through the next.
    assert fmean(cell.samples.step_time_s) >= 0.9 * computed_s
    assert cell.predicted_step_time_s >= computed_s
    assert cell.cores_busy is not None
    assert 0 < cell.cores_busy <= 1


@pytest.mark.parametrize(
    ("backend", "scheduler", "more"),
    [
        ("mpi-ring", "p3", ("--accumulate", "2")),
        ("zmq-ps", "p3", ()),
        ("gloo", "dear:mib=0.1", ()),
    ],
)
def test_the_link_of_a_plan_by_priority_or_in_halves_is_fitted_to_rehearsed_steps(
    tmp_path: Path, trace: Path, backend: str, scheduler: str, more: tuple[str, ...]
) -> None:
    given = ("--backend", backend, "--predict", *more)
    rehearsed = run(tmp_path, trace, "--scheduler", scheduler, *given, "--rehearse")
    in_a_row = run(tmp_path, trace, "--scheduler", "wfbp", *given)
    assert rehearsed.link is not None
    assert in_a_row.link is not None
    assert len(rehearsed.link["missing_s"]) >= 1
    assert "missing_s" not in in_a_row.link
    assert (rehearsed.prediction, in_a_row.prediction) == ("calibrated", "calibrated")
    assert rehearsed.predicted_step_time_s is not None
    assert rehearsed.identical_work  # what was rehearsed left nothing behind in what is trained


def test_steps_that_await_what_they_would_have_left_to_the_next_are_told(
    tmp_path: Path, trace: Path
) -> None:
    given = ("--backend", "gloo", "--verify-steps", "5", "--scheduler")
    crossing = run(tmp_path, trace, *given, "dear:mib=0.1")
    # Two steps warm up; the parameters are looked at after the fifth and after the last.
    assert crossing.samples.unsteady == [False] * 2 + [True] * 2 + [False] * 5 + [True]
    # A plan that ends with the step has nothing to wait for, but the step after the look is marked.
    ending = run(tmp_path, trace, *given, "wfbp")
    assert ending.samples.unsteady == [False] * 3 + [True] + [False] * 6
    # The first step learns the order of what is read, and so must wait.
    cold = run(tmp_path, trace, *given, "dear:mib=0.1", "--warmup", "0")
    assert cold.samples.unsteady == [True] * 2 + crossing.samples.unsteady


def test_a_plan_that_the_link_decides_is_rehearsed_once_it_is_known(
    tmp_path: Path, trace: Path
) -> None:
    given = ("--backend", "mpi-ring", "--predict", "--rehearse", "--scheduler")
    decided = run(tmp_path, trace, *given, "pace")
    given_at_once = run(tmp_path, trace, *given, "p3")
    assert decided.link is not None
    assert given_at_once.link is not None
    assert len(decided.link["missing_s"]) == len(given_at_once.link["missing_s"]) > FEW_COUNTED
    assert decided.identical_work


def test_a_plan_in_its_order_that_the_link_decides_stretches_the_link_by_what_its_steps_took(
    tmp_path: Path, trace: Path
) -> None:
    given = ("--backend", "mpi-ring", "--predict", "--scheduler")
    decided = run(tmp_path, trace, *given, "bucket:mib=0.1,timeout_ms=1000", "--rehearse")
    guessed = run(tmp_path, trace, *given, "bucket:mib=0.1,timeout_ms=1000")
    assert decided.link is not None
    assert guessed.link is not None
    assert decided.num_messages > 1
    assert len(decided.link["in_steps"]) >= LEAST_COUNTED
    assert min(decided.link["in_steps"]) > 0
    factor = agreed(decided.link["in_steps"])
    assert decided.link.get("stretched") == factor
    assert "in_steps" not in guessed.link
    assert "missing_s" not in decided.link
    assert decided.predicted_step_time_s is not None
    assert decided.identical_work


def test_a_peer_framework_is_a_row_of_the_same_table(tmp_path: Path, trace: Path) -> None:
    more = ("--accumulate", "2", "--predict")
    cell = run(tmp_path, trace, "--backend", "peer:ddp,bucket_mib=0.1", *more)
    assert cell.identical_work is True, cell.identical_work_note
    assert cell.scheduler == "ddp"
    assert cell.backend == "ddp:bucket_mib=0.1"  # it was called so once
    assert cell.wire_bytes_per_step == pytest.approx(4 * sum(SIZES), rel=1e-3)
    assert cell.exposed_comm_s is not None
    assert cell.step_time_s is not None
    assert 0 < cell.exposed_comm_s < cell.step_time_s
    assert cell.predicted_step_time_s is not None


def test_a_peer_trains_what_really_computes_too(tmp_path: Path) -> None:
    cell_path = tmp_path / "cell.json"
    done = testbed(
        *("run", "--workload", "digits-cnn", "--backend", "ddp", "--workers", "2"),
        *("--steps", "8", "--json", str(cell_path)),
    )
    assert done.status == 0, done.err
    assert decode_cell(cell_path.read_bytes()).identical_work is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "ddp", "--scheduler", "mg-wfbp"), "schedules by itself"),
        (("--backend", "ddp:bucket_mib=0"), "expected a size above 0"),
        (("--backend", "gloo", "--batch-size", "3"), "recorded with 8 samples"),
    ],
)
def test_what_cannot_be_replayed_so_is_refused_by_name(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    ask = answer if message == "expected one of ddp" else testbed  # the others are asked of ranks
    done = ask("run", "--workload", f"replay:{trace}", "--workers", "2", *arguments)
    assert done.status == 2
    assert message in done.err


def test_a_trace_that_is_not_there_is_refused_before_anything_starts() -> None:
    done = answer("run", "--workload", "replay:nowhere", "--workers", "2")
    assert done.status == 2
    assert "nowhere" in done.err
    assert "resnet50-v100" in done.err


with_cards = pytest.mark.skipif(
    not os.access(TUN, os.R_OK | os.W_OK), reason=f"{TUN} cannot be opened"
)
in_cluster = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


@in_cluster
def test_in_a_dilated_cluster_compute_is_stretched(tmp_path: Path, trace: Path) -> None:
    cell = run(
        tmp_path,
        trace,
        *("--backend", "mpi-ring", "--scheduler", "mg-wfbp", "--slow", "rank=1,delay=10ms"),
        *("--cluster", "nodes=2,rate=1gbit,dilation=5"),
    )
    assert cell.identical_work is True, cell.identical_work_note
    assert cell.dilation == 5
    assert cell.compute_s is not None
    assert cell.step_time_s is not None
    # Real seconds: recorded compute and the slow rank's delay, five times as long.
    assert cell.compute_s >= 0.9 * 5 * 24e-3
    assert cell.step_time_s >= 0.9 * 5 * (24e-3 + 10e-3)
    assert cell.predicted_step_time_s is not None
    assert cell.predicted_step_time_s >= 5 * 24e-3
    # The link is told in the time of the cluster, 8 ns for each byte that crosses 1 Gbit/s: nearer
    # to that than to five times as much or as little, whatever else the machine was doing.
    assert cell.link is not None
    largest = (cell.link["pieces"] or [cell.link])[-1]
    assert 8e-9 / 5**0.5 < largest["seconds_per_byte"] < 8e-9 * 5**0.5


@in_cluster
def test_what_really_computes_cannot_be_stretched(tmp_path: Path) -> None:
    done = answer(
        *("run", "--workload", "digits-cnn", "--backend", "gloo", "--steps", "4"),
        *("--cluster", "nodes=2,rate=1gbit,dilation=5"),
    )
    assert done.status == 2
    assert "replay a recorded trace" in done.err


@in_cluster
@with_cards
@pytest.mark.parametrize(
    "backend", ["ddp", *(pytest.param(b, marks=pytest.mark.slow) for b in ("mpi-ring", "zmq-ps"))]
)
def test_packets_of_every_backend_are_delayed(tmp_path: Path, trace: Path, backend: str) -> None:
    """A sum crosses the network once at least (by doubling), and its latency is the packets'."""
    relayed = "nodes=2,rate=10gbit,dilation=40,latency=1ms,latency_by=relay"
    if backend == "zmq-ps":  # of more nodes, since one of two workers has its server beside it
        relayed = relayed.replace("nodes=2", "nodes=3")
    cell = run(tmp_path, trace, "--backend", backend, "--workers", relayed[6], "--cluster", relayed)
    assert cell.cluster is not None
    assert (cell.cluster["latency"], cell.cluster["shaper"]) == ("relay", "relay")
    assert cell.cluster["relay"]["num_frames"] > 12
    assert cell.cluster["relay"]["processor_s"] > 0
    assert min(cell.samples.step_time_s) >= 40 * (24e-3 + 1e-3)
    assert min(cell.samples.exposed_comm_s) >= 40 * 1e-3


@in_cluster
@with_cards
@pytest.mark.parametrize("backend", ["mpi-ring", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_link_measured_without_latency_serves_where_packets_are_delayed_as_forecast(
    tmp_path: Path, trace: Path, backend: str
) -> None:
    near = run(tmp_path, trace, "--backend", "gloo", "--cluster", "nodes=2,rate=1gbit,dilation=4")
    assert near.cluster is not None
    name = "mpi-ring" if backend == "mpi-ring" else "gloo"
    link = Link(
        backend=name,
        num_workers=2,
        latency_s=1e-3,
        seconds_per_byte=9e-9,
        submit_s=1e-4,
        extra={"cluster": near.cluster},
    )
    save_link(link, tmp_path / "link.json")
    far = run(
        tmp_path,
        trace,
        *("--backend", backend, "--predict", "--link", str(tmp_path / "link.json")),
        *("--cluster", "nodes=2,rate=10gbit,dilation=40,latency=1ms,latency_by=relay"),
    )
    (foreseen,) = forecast_cells([far.config], Known())
    assert foreseen.why_not == ""
    assert far.predicted_step_time_s is not None
    assert far.predicted_step_time_s == pytest.approx(foreseen.held_out_s)
    assert far.predicted_step_time_s > 40 * (24e-3 + 2e-3)  # a ring of two waits twice


@in_cluster
def test_a_peer_is_refused_where_latency_cannot_reach_it(trace: Path) -> None:
    done = testbed(
        *("run", "--workload", f"replay:{trace}", "--backend", "ddp"),
        *("--cluster", "nodes=2,rate=1gbit,latency=1ms,latency_by=injected"),
    )
    assert done.status == 2
    assert "cannot be held up" in done.err
