"""Plans as buckets of DistributedDataParallel: what limits can do, and what DDP then builds."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import DDP
from testbed.backends.torch_groups.ddp_plan import MIB, assign_buckets, taken
from testbed.base.errors import UsageError
from testbed.base.files import encode_link, load_shipped_trace, shipped_traces
from testbed.base.link import Link
from testbed.base.plan import Message, Plan, TensorSlice, encode_plan
from testbed.base.trace import Trace
from testbed.control.inproc import InprocHub
from testbed.prediction.cross_iteration import predict
from testbed.scheduling.for_framework import fastest, framework_of, plans_for
from testbed.scheduling.protocol import make_plan
from tests.harness.runs import answer

LINK = Link(backend="gloo", num_workers=4, latency_s=2e-3, seconds_per_byte=1e-8)
BACKWARD_S = [1e-3, 2e-3, 3e-3, 1e-3, 4e-3, 1e-3, 6e-3, 2e-3]
WIDTHS = (300, 200, 100, 400, 500)


def layers() -> torch.nn.Sequential:
    """Four layers of different sizes, so that sizes of buckets tell what is in them."""
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def trace_of(model: torch.nn.Module) -> Trace:
    """Its tensors in the order in which its gradients really become ready."""
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    model(torch.ones(1, WIDTHS[0])).sum().backward()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    elements = [sizes[name] for name in ready]
    trace = Trace.from_backward(BACKWARD_S, elements, dtypes=["float32"] * len(elements))
    tensors = [
        msgspec.structs.replace(tensor, name=name)
        for tensor, name in zip(trace.tensors, reversed(ready), strict=True)
    ]
    return msgspec.structs.replace(trace, tensors=tuple(tensors))


def built(path: Path) -> list[set[str]]:
    """Names of the parameters in each bucket that DDP has built anew."""
    model = layers()
    backend = DDP.build(Group(0, 1, InprocHub(1).member(0)), DDP.options(plan=str(path)))
    assert isinstance(backend, ExternalFramework)
    try:
        wrapped = backend.wrap(model, timeout_s=30.0)
        for _ in range(4):
            wrapped(torch.ones(1, WIDTHS[0])).sum().backward()
            backend.count_step()  # refuses other buckets than the plan's
        told = wrapped._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    finally:
        backend.close()
    names = [name for name, _ in model.named_parameters()]
    return [{names[int(i)] for i in bucket.split()} for bucket in told.split(",")]


@pytest.mark.parametrize(
    "scheduler", ["wfbp", "bucket:mib=0.3,first_mib=0.1", "bucket", "mg-wfbp", "optimal"]
)
def test_ddp_builds_the_messages_of_a_plan(scheduler: str, tmp_path: Path):
    plan = make_plan(scheduler, trace_of(layers()), LINK)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    wanted = [{plan.names[part.tensor] for part in m.parts} for m in plan.messages]
    assert built(tmp_path / "plan.json") == wanted


def test_plans_differ():
    """Else the test above would compare one plan with itself."""
    trace = trace_of(layers())
    made = [len(make_plan(s, trace, LINK).messages) for s in ("wfbp", "bucket", "mg-wfbp")]
    assert len(set(made)) == 3


def test_another_order_of_gradients_is_noticed(tmp_path: Path):
    trace = trace_of(layers())
    turned = msgspec.structs.replace(trace, tensors=tuple(reversed(trace.tensors)))
    plan = make_plan("wfbp", turned, LINK)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    with pytest.raises(UsageError, match="another order"):
        built(tmp_path / "plan.json")


def test_a_plan_for_another_model_is_refused(tmp_path: Path):
    trace = Trace.from_backward([1e-3], num_elements=[5])
    (tmp_path / "plan.json").write_bytes(encode_plan(make_plan("wfbp", trace, LINK)))
    with pytest.raises(UsageError, match="another model"):
        built(tmp_path / "plan.json")
    trace = trace_of(layers())
    half = tuple(msgspec.structs.replace(t, dtype="float16") for t in trace.tensors)
    plan = make_plan("wfbp", msgspec.structs.replace(trace, tensors=half), LINK)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    with pytest.raises(UsageError, match="float16 in the plan and float32 in the model"):
        built(tmp_path / "plan.json")


def test_the_rule_is_torchs():
    draw = random.Random(1)
    for _ in range(200):
        dtypes = [draw.choice(["float32", "float64"]) for _ in range(draw.randint(1, 12))]
        tensors = [torch.empty(draw.randint(1, 9), dtype=getattr(torch, d)) for d in dtypes]
        limits = [draw.randint(1, 90) for _ in range(draw.randint(1, 4))]
        theirs, _ = dist._compute_bucket_assignment_by_size(
            tensors, limits, [False] * len(tensors), list(range(len(tensors)))
        )
        ours = assign_buckets([t.nbytes for t in tensors], dtypes, limits)
        assert sorted(map(tuple, theirs)) == sorted(map(tuple, ours))


def test_any_groups_of_one_dtype_are_exact():
    draw = random.Random(2)
    for _ in range(200):
        count = draw.randint(1, 12)
        trace = Trace.from_backward([1] * count, num_elements=draw.choices(range(1, 99), k=count))
        order = list(range(count - 1, -1, -1))
        stops = sorted({*draw.sample(range(1, count + 1), draw.randint(1, count)), count})
        groups = [order[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        plan = make_plan("wfbp", trace, LINK)
        sizes = plan.num_elements
        messages = [Message(parts=tuple(TensorSlice(i, 0, sizes[i]) for i in g)) for g in groups]
        plan = msgspec.structs.replace(plan, messages=tuple(messages))
        found = taken(plan)
        assert not found.differences
        assert found.plan.messages == plan.messages


def test_what_limits_cannot_do_is_called_nearest():
    plan = plan_of_dtypes([["a", "b"], ["c"]], {"a": "float64", "b": "float64", "c": "float64"})
    assert taken(plan).differences == ()
    # Of each dtype the first bucket has to close at another size, with one limit for both.
    dtypes = dict.fromkeys("adef", "float32") | dict.fromkeys("bc", "float64")
    plan = plan_of_dtypes([["b"], ["c"], ["a", "d", "f"], ["e"]], dtypes)
    found = taken(plan)
    assert "4 buckets in place of 4 messages, 2 of them equal" in found.differences[0]
    buckets = [{plan.names[part.tensor] for part in m.parts} for m in found.plan.messages]
    assert buckets == [{"b"}, {"c"}, {"a", "d"}, {"f", "e"}]


def plan_of_dtypes(groups: list[list[str]], dtypes: dict[str, str]) -> Plan:
    """Tensors of ten elements; names in groups are in backward order."""
    names = list(reversed([name for group in groups for name in group]))
    parts = [tuple(TensorSlice(names.index(name), 0, 10) for name in group) for group in groups]
    return Plan(
        scheduler="by hand",
        names=tuple(names),
        num_elements=(10,) * len(names),
        dtypes=tuple(dtypes[name] for name in names),
        messages=tuple(Message(parts=each) for each in parts),
    )


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ("dear", "two halves"),
        ("p3", "next forward pass"),
        ("pace", "next forward pass"),
        ("bytescheduler", "next forward pass"),
    ],
)
def test_what_ddp_cannot_do_is_refused(scheduler: str, why: str):
    plan = make_plan(scheduler, Trace.from_backward([1, 1], num_elements=[9, 9]), LINK)
    with pytest.raises(UsageError, match=why):
        taken(plan)


def test_what_waits_for_the_end_of_the_backward_pass():
    trace = Trace.from_backward([1, 1], num_elements=[9, 9])
    assert taken(make_plan("sequential", trace, LINK)).differences == ()  # one bucket
    plan = msgspec.structs.replace(make_plan("wfbp", trace, LINK), after_backward=True)
    with pytest.raises(UsageError, match="nothing before the backward pass has ended"):
        taken(plan)


def test_a_cut_tensor_is_refused():
    plan = make_plan("wfbp", Trace.from_backward([1], num_elements=[9]), LINK)
    halves = tuple(Message(parts=(TensorSlice(0, *cut),)) for cut in ((0, 4), (4, 9)))
    with pytest.raises(UsageError, match="whole gradients"):
        taken(msgspec.structs.replace(plan, messages=halves))


@pytest.mark.parametrize("name", shipped_traces())
def test_the_chosen_plan_is_simulated_no_slower_than_stock_ddp(name: str):
    trace, own = load_shipped_trace(name), framework_of("ddp")
    for gbit in (1, 10):
        link = Link(backend="ddp", num_workers=4, latency_s=1e-4, seconds_per_byte=12 / gbit * 1e-9)
        plan = make_plan("wfbp", trace, link)
        # Torch's own limits by torch's rule, whatever the candidates say that stock DDP does.
        order = list(range(len(plan.names) - 1, -1, -1))
        sizes = [trace.tensors[i].num_bytes for i in order]
        buckets = assign_buckets(sizes, [plan.dtypes[i] for i in order], [MIB, 25 * MIB])
        messages = tuple(
            Message(parts=tuple(TensorSlice(order[p], 0, plan.num_elements[order[p]]) for p in b))
            for b in buckets
        )
        stock = msgspec.structs.replace(plan, messages=messages)
        chosen = fastest(plans_for(own, trace, link, (own.like, "mg-wfbp", "optimal")))
        assert chosen.iteration_s is not None
        assert chosen.iteration_s <= predict(stock, trace, link).iteration_s * (1 + 1e-12)


def test_command_prints_and_saves_what_ddp_takes(tmp_path: Path):
    link, out = tmp_path / "link.json", tmp_path / "ddp.json"
    link.write_bytes(encode_link(LINK))
    wanted = ("--trace", "resnet50-v100", "--link", str(link))
    said = answer("plan", "--for", "ddp", *wanted, "--plan-out", str(out))
    assert said.status == 0, said.err
    assert "ddp itself" in said.out
    assert "bucket_cap_mb_list=[" in said.out
    again = answer("plan", str(out), "--for", "ddp")
    assert again.out.splitlines()[-1] == said.out.splitlines()[-1]
    refused = answer("plan", "--for", "ddp", *wanted, "--scheduler", "dear")
    assert (refused.status, "two halves" in refused.err) == (2, True)
    elsewhere = answer("plan", str(out), "--for", "ddp", "--trace", "vgg16-h100")
    assert (elsewhere.status, "expected the same model" in elsewhere.err) == (2, True)
    unused = answer("plan", str(out), "--for", "ddp", "--link", str(link))
    assert (unused.status, "--link given without --trace" in unused.err) == (2, True)
    other = answer("plan", "--for", "gloo", *wanted)
    assert (other.status, "expected one of ddp" in other.err) == (2, True)


def test_command_tells_whose_rule_it_is_and_how_its_settings_were_chosen(tmp_path: Path):
    link = tmp_path / "link.json"
    link.write_bytes(encode_link(LINK))
    wanted = ("plan", "--for", "ddp", "--trace", "resnet50-v100", "--link", str(link))

    def rows(*more: str) -> dict[str, list[str]]:
        table = answer(*wanted, *more).out.partition("\n\n")[0].splitlines()
        cells = [re.split(r"  +", line.strip()) for line in table]
        assert cells[0][:3] == ["plan", "rule", "tuning"]
        return {row[0]: row[1:3] for row in cells[1:]}

    given = rows("--scheduler", "optimal,osf,mg-wfbp,bucket:mib=8")
    assert given["optimal"] == ["ours", "untuned"]
    assert given["osf"] == ["reconstruction", "untuned"]
    assert given["mg-wfbp"] == ["published rule", "-"]
    assert given["bucket:mib=8"] == ["published rule", "set by hand"]
    tried = rows()
    assert ["published rule", "one that auto tries"] in tried.values()
    assert ["ddp's", "untuned"] in tried.values()
    assert "set by hand" not in {tuning for _, tuning in tried.values()}
