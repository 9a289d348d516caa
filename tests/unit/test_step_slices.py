"""Large parameters are updated slice by slice, from means that are lists of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from testbed.backends.protocol import Backend, Group
from testbed.compression.sparse import pack_sparse
from testbed.compression.sparse_mean import SparseMerger
from testbed.memory.host import is_on_host, keep_state_on_host
from testbed.memory.planning.gradients import (
    SLICE_ELEMENTS,
    exchange_bytes,
    gradient_bytes,
    update_bytes,
)
from testbed.memory.planning.lifetimes import Costs, GradientReady, Lifetimes
from testbed.memory.recording.tracker import Tracker
from testbed.training.compressed.spec import compression_of
from testbed.training.exchange.step import DeferredStep
from testbed.training.session import Session
from tests.harness.mirror_runs import mirror
from tests.harness.two_ranks import on_ranks

SHAPES = ((31, 1003), (7,), (5001,), (64,))
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def trained(
    make: Optimizer,
    size: int | None,
    *,
    sparse: bool = False,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters after three steps, and what updated them."""
    draw = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in SHAPES]
    optimizer = make(parameters)
    prepare(nn.Module(), optimizer)
    for _ in range(3):
        gradients = []
        for p in parameters:
            few = torch.rand(p.shape, generator=draw) < 0.05
            gradient = torch.randn(p.shape, generator=draw).where(few, torch.zeros(())).to(dtype)
            gradients.append(gradient.view(-1).to_sparse() if sparse else gradient)
        DeferredStep(optimizer, size).take(parameters[:3], gradients[:3])
    return parameters, optimizer


def same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        assert list(state) == list(theirs["state"][number])
        for name, value in state.items():
            assert torch.equal(value, theirs["state"][number][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_get_what_the_whole_gets(name: str, sparse: bool, dtype: torch.dtype) -> None:
    """Parameters, momentum and the count of steps, of optimizers that are not cut as well."""
    whole, first = trained(OPTIMIZERS[name], None, dtype=dtype)
    for size in (1000, 4096):
        cut, other = trained(OPTIMIZERS[name], size, sparse=sparse, dtype=dtype)
        assert all(map(torch.equal, whole, cut))
        same_state(first, other)


def test_state_on_the_host_is_cut_there() -> None:
    whole, first = trained(OPTIMIZERS["adam"], None)
    cut, other = trained(OPTIMIZERS["adam"], 2000, sparse=True, prepare=keep_state_on_host)
    assert all(map(torch.equal, whole, cut))
    same_state(first, other)
    assert is_on_host(other.state[cut[0]]["exp_avg"], cut[0].device)


def test_what_is_no_row_of_elements_is_updated_as_a_whole() -> None:
    """Its memory has no order in which slices would lie."""
    start = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    gradient = torch.randn(8, 4, 3, 3)
    ends = []
    for size in (None, 10):
        parameter = nn.Parameter(start.clone())
        step = DeferredStep(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), size)
        step.take([parameter], [gradient])
        ends.append(parameter.detach())
    assert torch.equal(*ends)


# Means as lists of elements.


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_listed_mean_is_the_dense_one(num_ranks: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    like, payloads = torch.zeros(3000, dtype=dtype), []
    for _ in range(num_ranks):
        indices = torch.randperm(3000, generator=draw)[:120].sort().values
        values = torch.randn(120, generator=draw).to(dtype)
        values[:2] = torch.tensor([-0.0, 0.0])
        payloads.append(pack_sparse(indices, values, 3000))
    listed = SparseMerger().list_mean(tuple(payloads), like)
    dense = SparseMerger().combine(tuple(payloads), like)
    assert listed is not None
    assert torch.equal(listed.to_dense(), dense)
    assert bool((listed._indices()[0].diff() > 0).all())
    assert not bool(torch.signbit(listed._values()[listed._values() == 0]).any())
    packed = SparseMerger().list_packed(SparseMerger().pack_mean(dense), like)
    assert packed is not None
    assert torch.equal(packed.to_dense(), dense)


def test_a_mean_of_many_elements_is_not_listed() -> None:
    values = torch.ones(900)
    payload = pack_sparse(torch.arange(900), values, 1000)
    assert SparseMerger().list_mean((payload,), torch.zeros(1000)) is None


# Memory.


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_large_layer_takes_its_gradient_and_little_else(where: str) -> None:
    """No dense mean, and with the host no copy of what is kept; both took a layer's size."""
    found: dict[str, int] = {}

    def rank(backend: Backend, group: Group) -> None:
        torch.manual_seed(2)
        model = nn.Linear(2000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)
        compression = compression_of("ef:units=update+topk:ratio=0.01", 1)
        options: dict[str, Any] = {"compression": compression, "strategy": mirror(where=where)}
        with Session(model, optimizer, backend, group.control, **options) as session:
            for step in range(3):
                tracker = Tracker(model, optimizer, session.held_tensors())
                if step == 2:
                    session.watch_threads(tracker.elsewhere)
                    tracker.__enter__()
                model(torch.randn(1, 2000)).square().sum().backward()
                optimizer.step()
                if step == 2:
                    tracker.__exit__(None, None, None)
            found["peak"] = tracker.peak_bytes

    on_ranks(rank, 1)
    layer = 4 * 2000 * 1000
    kept = layer if where == "device" else 0
    slices = 3 * 4 * SLICE_ELEMENTS  # a mean, and what weight decay and backward make beside it
    assert 2 * layer + kept < found["peak"] < 2 * layer + kept + slices


def test_gradients_that_make_room_for_the_next_ones() -> None:
    """4, 1, 8, 1, 2: two in a row take 9 at most; each of the first three leaves at once."""
    sizes = (4, 1, 8, 1, 2)
    gradients = tuple(
        GradientReady(name=str(n), num_bytes=size, position=2 * n) for n, size in enumerate(sizes)
    )
    step = Lifetimes(
        units=(), ops=(), values=(), base=(0,) * 11, gradients=gradients,
        update_share=1.0, update_slice_bytes=3,
    )  # fmt: skip
    costs = Costs(in_flight=2, row=2, exchange_bytes=(40, 10, 80, 10, 20))
    assert gradient_bytes(step, costs).tolist() == [4, 0, 1, 0, 8, 0, 1, 1, 3, 3, 3]
    assert exchange_bytes(step, costs).tolist() == [40, 0, 10, 0, 80, 0, 0, 10, 10, 30, 30]
    assert update_bytes(step, 2).tolist() == [3, 0, 1, 0, 3, 0, 1, 0, 2, 0, 0]


def test_gradients_that_do_not_travel_are_used_together() -> None:
    """4, 1, 8, 1, 2 with 5 held at most: two are used at the second, one at the third."""
    sizes = (4, 1, 8, 1, 2)
    gradients = tuple(
        GradientReady(name=str(n), num_bytes=size, position=2 * n) for n, size in enumerate(sizes)
    )
    step = Lifetimes(units=(), ops=(), values=(), base=(0,) * 11, gradients=gradients)
    costs = Costs(in_flight=0, held_bytes=5)
    assert gradient_bytes(step, costs).tolist() == [4, 4, 5, 0, 8, 0, 1, 1, 3, 3, 3]


def test_only_the_given_parameters_take_a_step_with_the_settings_of_their_groups() -> None:
    """In the order of the groups, whatever the order of the gradients; a stranger is left alone."""
    first, second, other, stranger = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    groups = [{"params": [first, other]}, {"params": [second], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    step = DeferredStep(optimizer)
    step.take([second, stranger, first], [torch.ones(2)] * 3)
    assert [p[0].item() for p in (first, second, other, stranger)] == [-0.25, -0.5, 0.0, 0.0]
    assert [group["params"] for group in optimizer.param_groups] == [[first, other], [second]]
