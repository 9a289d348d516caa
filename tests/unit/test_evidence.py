"""Samples that hold other values, and buffers that went another way: the proof of same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.records.cell import Cell
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.make import make_report
from testbed.training import trainer
from testbed.training.evidence import content_of, sketch_error, sketch_of
from testbed.training.protocol import Run
from testbed.training.sampling import SampleOrder
from testbed.training.summary import Outcome, judge, make_cell
from testbed.workloads.workload import Workload
from tests.harness.two_ranks import on_ranks

STEPS = 4
PLAN = Plan(scheduler="wfbp", names=(), num_elements=(), dtypes=(), messages=())


class Rows:
    """64 samples of 8 values; of the one that is `odd`, the third value is another."""

    def __init__(self, odd: int | None = None) -> None:
        self.values = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
        if odd is not None:
            self.values[odd, 2] += 1e-3

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        rows = self.values[torch.as_tensor(indices)]
        return rows, rows[:, :1]


def build() -> Workload:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
    )

    draw = torch.Generator().manual_seed(1)  # ranks are threads, which share torch's own
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)

    def loss(called: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found: torch.Tensor = (called(batch[0]) - batch[1]).square().mean()
        return found

    return Workload(model=model, train=Rows(), loss=loss, batch_size=8)


def trained(other: Callable[[], Workload] = build, memory: str = "none") -> Cell:
    """The record of two ranks on loopback, rank 1 with a workload of its own."""
    config = RunConfig(
        backend="loopback",
        memory=memory,
        steps=STEPS,
        warmup=2,
        verify_steps=2,
    )

    def rank(backend: Backend, group: Group) -> Outcome:
        run = Run(config, backend, group.control, build)
        return trainer.train(run, other() if group.rank else build())

    outcomes = on_ranks(rank, 2)
    is_same, note = judge(config, outcomes, "bsp")
    cell = make_cell(
        *(config, outcomes),
        plan=PLAN,
        predicted_s=None,
        link=None,
        data="",
        consistency="bsp",
        num_servers=0,
        num_machines=1,
        environment={},
    )
    assert (cell.identical_work, cell.identical_work_note) == (is_same, note)
    return cell


def test_the_same_samples_and_buffers_are_the_same_work() -> None:
    cell = trained()
    assert cell.identical_work is True, cell.identical_work_note
    assert cell.content_digest
    assert cell.content_digest == trained().content_digest
    assert cell.buffer_digest == trained().buffer_digest


def test_another_value_in_one_sample_of_one_rank_is_other_work() -> None:
    order = SampleOrder(64, num_workers=2, batch_size=8, seed=1)
    met = [int(order.indices(step, rank=1)[3]) for step in range(STEPS)]
    found = [trained(lambda odd=odd: replace(build(), train=Rows(odd))) for odd in met]
    notes = [cell.identical_work_note for cell in found]
    words = (
        "sample contents differ: rank 1's in the first 2 steps are not those of a single process"
    )
    assert [words in note for note in notes] == [True, True, False, False]  # 2 steps are verified
    assert len({cell.content_digest for cell in (*found, trained())}) == STEPS + 1


def test_buffers_that_no_gradient_depends_on_are_compared_too() -> None:
    def forgetful() -> Workload:
        made = build()
        made.model[1].momentum = 0.3  # type: ignore[index, union-attr]
        return made

    cell = trained(forgetful)
    assert cell.identical_work is False
    assert "buffers differ: rank 1's '1.running_" in cell.identical_work_note
    assert "of a single process" in cell.identical_work_note


def test_cells_are_told_apart_by_what_their_samples_held() -> None:
    cells = [trained() for _ in range(3)]
    other = msgspec.structs.replace(cells[2], content_digest="f" * 64)
    old = msgspec.structs.replace(cells[2], content_digest="")
    found = [Found("here", str(i), c) for i, c in enumerate((*cells[:2], other, old))]
    notes = [c.comparable_note for c in make_report(Collected(tuple(found), ())).cells]
    assert sum("sample contents differ from those of the other cells" in n for n in notes) == 1
    assert sum("same initial parameters and samples as 3 other" in n for n in notes) == 3


def test_a_large_batch_is_digested_by_some_of_its_elements() -> None:
    large = torch.zeros(8, 3, 64, 64)
    digests = {content_of([large])}
    for sample in range(8):
        changed = large.clone()
        changed[sample, :, 20:40] = 1.0
        digests.add(content_of([changed]))
    assert len(digests) == 9
    assert content_of([large.view(8, -1)]) not in digests
    assert content_of([torch.empty(0)]) != content_of([])


def test_a_sketch_sees_an_exchange_of_values_and_nan() -> None:
    one, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    one.running_mean, other.running_mean = torch.tensor([[1.0, 2, 3, 4], [2.0, 1, 3, 4]])
    error, name = sketch_error(sketch_of(one), sketch_of(other))
    assert name == "running_mean"
    assert error > 0.01
    other.running_var[2] = float("nan")  # type: ignore[index]
    assert sketch_error(sketch_of(one), sketch_of(other)) == (float("inf"), "running_var")
    assert sketch_error(sketch_of(one), []) == (float("inf"), "names of buffers")


@pytest.mark.parametrize("memory", ["checkpoint", "release"])
def test_memory_strategies_leave_buffers_as_they_would_be(memory: str) -> None:
    cell = trained(memory=memory)
    assert cell.identical_work is True, cell.identical_work_note
    assert cell.buffer_digest == trained().buffer_digest
