"""`testbed profile` and `testbed comm --fit` as a user runs them."""

import pytest

from testbed.base.files import load_link, load_trace
from testbed.prediction.cross_iteration import forward_order
from tests.harness.runs import answer, testbed

SMALL = ("--batch", "4", "--threads", "1", "--warmup", "1", "--repeats", "3")


def test_a_workload_is_profiled(tmp_path):
    path = tmp_path / "trace.json"
    done = testbed("profile", "--workload", "resnet20", *SMALL, "-o", str(path))
    assert done.status == 0, done.err
    trace = load_trace(path)
    assert (trace.name, trace.device, trace.batch_size) == ("resnet20", "cpu", 4)
    assert sum(t.num_elements for t in trace.tensors) == 269_722
    assert trace.forward_s > 0 < trace.backward_s
    assert forward_order(trace) == list(range(len(trace.tensors)))
    assert trace.extra["recorded"]["threads"] == 1
    assert "# layers: a DAG, from torch.fx" in done.out
    assert "largest activations" in done.out


def test_mixed_precision_sends_gradients_of_the_parameters_type(tmp_path):
    path = tmp_path / "trace.json"
    options = (*SMALL, "--precision", "bf16", "-o", str(path))
    done = testbed("profile", "--workload", "digits-cnn", *options)
    assert done.status == 0, done.err
    assert {t.dtype for t in load_trace(path).tensors} == {"float32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "resnet21"], "did you mean"),
        (["--repeats", "0"], "--repeats 0"),
        (["--precision", "int8"], "--precision is 'int8'"),
        (["--batch", "0"], "--batch-size is 0"),
        (["-o", "no/such/folder/trace.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_profiled_is_a_usage_error(arguments, message):
    done = answer("profile", *arguments)
    assert done.status == 2
    assert message in done.err


def test_links_of_several_backends_are_fitted(tmp_path):
    path = tmp_path / "link.json"
    names = "gloo,zmq-ps"
    done = testbed("comm", "--fit", "--backend", names, "--max", "16K", "-o", str(path))
    assert done.status == 0, done.err
    for name in names.split(","):
        link = load_link(tmp_path / f"link-{name}.json")
        assert (link.backend, link.num_workers) == (name, 2)
        assert link.time_s(4096) > 0
        assert len(link.concurrency_slowdown) == 4
        assert min(link.submit_s, link.landing_s, link.thread_s) > 0
        assert f"# fit of {name}, 2 worker(s)" in done.out


def test_a_backend_of_one_channel_is_fitted_with_a_note(tmp_path):
    path = tmp_path / "link.json"
    done = testbed(
        "comm",
        "--fit",
        "--backend",
        "mpi:blocking=1",
        "--min",
        "1K",
        "--max",
        "2K",
        "-o",
        str(path),
    )
    assert done.status == 0, done.err
    assert load_link(path).concurrency_slowdown is None
    assert "# concurrent messages not measured: blocking=1" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fit", "--op", "gather"], "--fit measures sums of float32"),
        (["--fit", "--min", "64", "--max", "1K"], "expected 2K or more"),
        (["--fit", "-n", "200", "--min", "64K"], "leave out --min, --iters"),
        (["-o", "link.json"], "-o is given without --fit"),
    ],
)
def test_what_cannot_be_fitted_is_a_usage_error(arguments, message):
    done = answer("comm", "--backend", "gloo", *arguments)
    assert done.status == 2
    assert message in done.err
