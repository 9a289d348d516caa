"""Traces of torch's profiler: real exports on the CPU, and kernels as a GPU's exports have them."""

import copy
import gzip
import json
import subprocess
import sys
from itertools import pairwise
from statistics import median

import pytest
import torch
from torch import nn

from testbed.base.errors import UsageError
from testbed.base.files import load_trace
from testbed.cli import main
from testbed.profiling.kineto import read_kineto
from tests.harness.runs import answer
from tests.harness.source_tree import ROOT

SIZES = [4 * 9, 4, 144 * 32, 32, 32 * 10, 10]


def model():
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32), nn.Linear(32, 10)
    return nn.Sequential(*layers)


# In a process of its own: torch's profiler starts threads and tracers that others here do without.
LOOP = """
import sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from tests.unit.test_profiling_kineto import model

path, steps, shapes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
net = model()
samples, labels = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=shapes,
    schedule=schedule(wait=0, warmup=1, active=steps),
    on_trace_ready=lambda done: done.export_chrome_trace(path),
) as recording:
    for _ in range(steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(samples), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        recording.step()
"""


def export(path, steps=3, shapes=True):
    """What a user's training loop leaves, in which the loss is read after each step."""
    command = [sys.executable, "-c", LOOP, str(path), str(steps), str(shapes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(tmp_path_factory.mktemp("kineto") / "profiler.json")


def events_of(path):
    found = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    return sorted(found, key=lambda e: e["ts"])


def test_sizes_passes_and_batch_are_those_of_the_training_loop(exported):
    trace = read_kineto(exported.read_bytes(), exported.name)
    assert sorted(t.num_elements for t in trace.tensors) == sorted(SIZES)
    assert trace.extra["imported"]["repeats"] == 3
    assert (trace.device, trace.batch_size, trace.name) == ("cpu", 8, "profiler")
    layers = [t.name.partition(".")[2] for t in trace.tensors]
    assert layers == ["aten::conv2d"] * 2 + ["aten::linear"] * 4
    assert all(t.forward_s > 0 for t in trace.tensors)
    assert all(t.backward_s > 0 for t in trace.tensors)


def test_times_are_medians_over_the_passes_of_those_between_gradients(exported):
    """Taken from the events in another way: by name alone."""
    trace = read_kineto(exported.read_bytes(), exported.name)
    layers, nodes = [], []
    for event in events_of(exported):
        if event["name"] == "aten::conv2d":
            layers.append([])
            nodes.append([])
        if event["name"] in ("aten::conv2d", "aten::linear"):
            layers[-1].append(event["ts"])
        if event["name"].startswith("autograd::engine::evaluate_function"):
            nodes[-1].append(event)
    forward = [[*begins, own[0]["ts"]] for begins, own in zip(layers, nodes, strict=True)]
    backward = []
    for own in nodes:
        ready = [e["ts"] + e["dur"] for e in own if e["name"].endswith("AccumulateGrad")]
        backward.append([own[0]["ts"], *ready[:-1], own[-1]["ts"] + own[-1]["dur"]])
    # A layer's forward time is shared by its weight and its bias.
    halves = [f / 2 for f in medians_between(forward) for _ in range(2)]
    # A file's times are microseconds since 1970 as doubles: steps of 0.00024.
    assert [t.forward_s * 1e6 for t in trace.tensors] == pytest.approx(halves, abs=2e-3)
    last_first = [t.backward_s * 1e6 for t in reversed(trace.tensors)]
    assert last_first == pytest.approx(medians_between(backward), abs=2e-3)


def medians_between(passes):
    """Of each interval between two moments, the median over the passes."""
    between = [[b - a for a, b in pairwise(one)] for one in passes]
    return [median(column) for column in zip(*between, strict=True)]


def test_one_pass_sums_to_the_whole(tmp_path):
    path = export(tmp_path / "one.json", steps=1)
    trace = read_kineto(path.read_bytes(), "one")
    events = events_of(path)
    nodes = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    (first,) = [e for e in events if e["name"] == "aten::conv2d"]
    # Steps of 0.00024 as above.
    assert trace.forward_s * 1e6 == pytest.approx(nodes[0]["ts"] - first["ts"], abs=2e-3)
    end = max(e["ts"] + e["dur"] for e in nodes)
    assert trace.backward_s * 1e6 == pytest.approx(end - nodes[0]["ts"], abs=2e-3)


def test_a_model_names_the_tensors_and_stands_in_for_shapes(tmp_path, exported):
    named = [(n, p.numel()) for n, p in model().named_parameters()]
    trace = read_kineto(exported.read_bytes(), "x", named)
    assert {t.name: t.num_elements for t in trace.tensors} == dict(named)
    bare = export(tmp_path / "bare.json", steps=1, shapes=False)
    with pytest.raises(UsageError, match=r"no shapes of gradients; record with record_shapes=True"):
        read_kineto(bare.read_bytes(), "bare.json")
    trace = read_kineto(bare.read_bytes(), "bare.json", named)
    assert sorted(t.num_elements for t in trace.tensors) == sorted(SIZES)
    with pytest.raises(UsageError, match="6 gradients and the model of --workload has 5"):
        read_kineto(bare.read_bytes(), "bare.json", named[1:])
    other = [(n, size + 1) for n, size in named]
    with pytest.raises(UsageError, match="which no parameter of the model"):
        read_kineto(exported.read_bytes(), "x", other)


def test_a_recording_that_begins_within_a_step_leaves_that_step_out(exported):
    whole = json.loads(exported.read_text())
    nodes = [e for e in events_of(exported) if "evaluate_function" in e["name"]]
    cut = nodes[3]["ts"]
    late = [e for e in whole["traceEvents"] if e.get("ts", 0) >= cut]
    trace = read_kineto(gzip.compress(json.dumps({"traceEvents": late}).encode()), "late.json.gz")
    assert trace.extra["imported"]["repeats"] == 2
    assert len(trace.tensors) == len(SIZES)


@pytest.mark.parametrize("content", [b"{}", b"no json", b'{"traceEvents": []}', b"\x1f\x8bno"])
def test_other_files_are_refused(content):
    with pytest.raises(UsageError, match=r"docs/importing-traces\.md"):
        read_kineto(content, "x.json")


def with_kernels(path, kernel_us, external=False):
    """The same steps as on a GPU: each operator without others inside launches one kernel.

    The host only launches, so that its operators are squeezed; kernels queue up and all take
    `kernel_us`. As Kineto has it, a `cuda_runtime` call on the operator's thread holds the
    correlation id of the kernel, which is on the stream's row.
    """
    events = events_of(path)
    first, start = events[0]["ts"], 0.0
    host = []
    for event in events:
        squeezed = copy.deepcopy(event)
        squeezed["ts"] = (event["ts"] - first) * 1e-6
        squeezed["dur"] = event["dur"] * 1e-6
        host.append(squeezed)
    operators = [e for e in host if e.get("cat") == "cpu_op"]
    inside = [e for e in operators if e["name"] in ("aten::mkldnn_convolution", "aten::addmm")]
    inside += [e for e in operators if e["name"].endswith("Backward0") and ":" not in e["name"]]
    made, free = [], start
    for number, operator in enumerate(sorted(inside, key=lambda e: e["ts"]), 100):
        at = operator["ts"] + operator["dur"] / 2
        begin = max(at, free)
        free = begin + kernel_us
        ids = {"External id": operator["args"].get("External id"), "correlation": number}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 0}
        call |= {"pid": operator["pid"], "tid": operator["tid"], "args": ids}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": begin, "dur": kernel_us}
        kernel |= {"pid": 0, "tid": 7, "args": {"stream": 7, "device": 0, **ids}}
        made += [kernel] if external else [call, kernel]
    reduced = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": start}
    reduced |= {"dur": 1e9, "pid": 0, "tid": 20, "args": {"correlation": 100}}
    return json.dumps({"traceEvents": [*host, *made, reduced]}).encode()


@pytest.mark.parametrize("external", [False, True])
def test_kernels_count_for_the_operators_that_launched_them(tmp_path, external):
    path = export(tmp_path / "gpu.json", steps=1)
    trace = read_kineto(with_kernels(path, 1000.0, external), "gpu.json")
    assert trace.device == "cuda"
    names = [t.name.partition(".")[2] for t in trace.tensors]
    forward = dict.fromkeys(names, 0.0)
    for name, tensor in zip(names, trace.tensors, strict=True):
        forward[name] += tensor.forward_s
    # One kernel for the convolution, one for each linear layer.
    assert forward["aten::conv2d"] == pytest.approx(1e-3, rel=1e-3)
    assert forward["aten::linear"] == pytest.approx(2e-3, rel=1e-3)
    # NllLoss, LogSoftmax and Addmm before the first gradient, then T, and so on to Convolution.
    backward = [t.backward_s for t in reversed(trace.tensors)]
    assert backward[0] == pytest.approx(3e-3, rel=1e-3)
    assert backward[1] == pytest.approx(1e-3, rel=1e-3)  # TBackward0
    assert backward[2] == pytest.approx(1e-3, rel=1e-3)  # AddmmBackward0
    assert backward[4] == pytest.approx(3e-3, rel=1e-3)  # View, Relu, Convolution


def test_kernels_that_nobody_launched_are_told(tmp_path):
    path = export(tmp_path / "gpu.json", steps=1)
    data = json.loads(with_kernels(path, 1000.0))
    lost = [e for e in data["traceEvents"] if e["cat"] != "cuda_runtime"]
    for event in lost:
        if event["cat"] == "kernel":
            event["args"] = {"correlation": event["args"]["correlation"]}
    with pytest.raises(UsageError, match="kernels and no call that launched them"):
        read_kineto(json.dumps({"traceEvents": lost}).encode(), "x")


def test_the_command_writes_a_trace_that_replays(tmp_path, exported, capsys):
    out = tmp_path / "trace.json"
    main_quietly("profile", "--from-kineto", str(exported), "-o", str(out))
    assert "6 tensors" in capsys.readouterr().out
    assert [t.num_elements for t in load_trace(out).tensors].count(144 * 32) == 1
    run = ("run", "--workload", f"replay:{out}", "--backend", "loopback", "--workers", "2")
    main_quietly(*run, "--steps", "4", "--warmup", "1", "--quiet")
    assert "replayed profiler of cpu" in capsys.readouterr().out


def test_what_a_recorded_step_has_no_use_for_is_refused(tmp_path):
    given = ("--from-kineto", str(tmp_path / "profiler.json"), "--warmup", "3", "--device", "cuda")
    done = answer("profile", *given)
    assert done.status == 2
    assert "--device and --warmup given with --from-kineto, which has no use for it" in done.err
    assert "--device is 'gpu'; expected cpu or cuda" in answer("profile", "--device", "gpu").err


def main_quietly(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def test_a_damaged_archive_is_refused_by_name():
    data = bytearray(gzip.compress(b"{}" * 1000))
    data[12] ^= 0xFF
    with pytest.raises(UsageError, match=r"t\.json\.gz is no trace of torch's profiler"):
        read_kineto(bytes(data), "t.json.gz")
