"""The mirror weight update trains what error feedback in units of updates trains."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import MEMORY, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.compression.protocol import Compressor, Context, Conversation, State
from testbed.compression.sparse import unpack_sparse
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.wrappers import ErrorFeedback, FeedbackOptions
from testbed.launch.plan_options import parts_of
from testbed.memory.host import is_on_host, zeros_on_host
from testbed.memory.strategy import KEEP_ALL, Mirror, Release, Strategy, combined
from testbed.training.compressed.mirror import through_weights
from testbed.training.compressed.spec import Compression, compression_of
from testbed.training.session import Session
from tests.harness.compressors import resolve_compressor
from tests.harness.two_ranks import TwoBranches, on_ranks, plan_of

CPU = torch.device("cpu")
TOPK = "topk:ratio=0.05"


def mirror(**options: Any) -> Strategy:
    strategy: Strategy = MEMORY.resolve("mirror").part.build(Mirror(**options))
    return strategy


@dataclass(frozen=True)
class Spied:
    """A compressor whose first payload's indices are noted."""

    inner: Compressor
    seen: dict[tuple[int, int, str], torch.Tensor] = field(compare=False, hash=False)

    @property
    def claims(self):
        return self.inner.claims

    def payload_bytes(self, *args: Any):
        return self.inner.payload_bytes(*args)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        talk = self.inner.exchange(values, state, context)
        given = next(talk)
        if isinstance(given.merger, SparseMerger):
            indices, _ = unpack_sparse(given.parts[0], values)
            self.seen[context.step, context.rank, context.key] = indices
        while True:
            try:
                given = talk.send((yield given))
            except StopIteration as stop:
                return stop.value


@dataclass
class Trained:
    """How a run ended: by rank, weights and residuals times the learning rate; what was sent."""

    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    kept: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def train(
    strategy: Strategy,
    start: nn.Module,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor],
    *,
    steps: int,
    size: int = 1,
    rate: float = 0.05,
    gamma: float = 1.0,
    momentum: float = 0.0,
    scheduler: str = "wfbp",
    inner: str = TOPK,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    after_backward: Callable[[], None] = lambda: None,
) -> Trained:
    """Train on ranks that are threads; the rate is multiplied by `gamma` every 40 steps."""
    trained = Trained()
    spied = Spied(resolve_compressor(inner), trained.sent)
    compression = Compression(inner, ErrorFeedback(spied, FeedbackOptions("update")))

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer is not None:
            return optimizer(model.parameters(), lr=rate)
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    def loop(rank: int, model: nn.Module, session: Session, optimizer: torch.optim.Optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma)
        if strategy.prepare is not None:
            strategy.prepare(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(accumulate - 1):
                with session.accumulating():
                    loss_of(model, rank, step * accumulate + part).backward()
            loss = loss_of(model, rank, step * accumulate + accumulate - 1)
            loss.backward()
            after_backward()
            last = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            if rank == 0:
                trained.losses.append(loss.item())
        session.flush()
        trained.weights[rank] = [p.detach().clone() for p in model.parameters()]
        assert session.engine is not None
        states = session.engine.driver.states
        trained.kept[rank] = {key: state["residual"] * last for key, state in states.items()}
        trained.notes.append(session.engine.result(1).note)

    plan = plan_of(scheduler, start)

    def rank(backend: Backend, group: Group) -> None:
        model = copy.deepcopy(start)
        optimizer = optimizer_of(model)
        options: dict[str, Any] = {"compression": compression, "strategy": strategy}
        with Session(model, optimizer, backend, group.control, plan=plan, **options) as session:
            loop(group.rank, model, session, optimizer)

    on_ranks(rank, size, plan.order)
    return trained


def difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """|one - other| / |other| over all tensors."""
    ours, theirs = (
        torch.cat([t.double().reshape(-1) for t in tensors]) for tensors in (one, other)
    )
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))


def agree(one: Trained, other: Trained) -> None:
    """Equal indices at every step, weights to 1e-12, residuals to 1e-9."""
    assert one.sent.keys() == other.sent.keys()
    assert all(torch.equal(indices, other.sent[key]) for key, indices in one.sent.items())
    for rank, weights in one.weights.items():
        assert difference(weights, other.weights[rank]) < 1e-12
        kept, expected = one.kept[rank], other.kept[rank]
        assert difference(list(kept.values()), [expected[key] for key in kept]) < 1e-9


# Small models, in float64, with samples that depend on rank and step alone.


def cnn() -> nn.Module:
    first, last = nn.Conv2d(1, 4, 3, bias=False), nn.Linear(144, 10, bias=False)
    layers = (first, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), last)
    return nn.Sequential(*layers).double()


def images(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(10, (4,), generator=draw)
    return nn.functional.cross_entropy(model(inputs), targets)


def tokens(name: str) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    sizes = "hidden_size=8,num_layers=1,num_heads=2,vocabulary_size=128,max_sequence_length=8"
    part = WORKLOADS.resolve(f"{name}:{sizes},sequence_length=8,num_samples=64,dropout=0")
    workload = part.build(data_dir=None, seed=3)
    model = workload.model.double()

    def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        first = (2 * step + 32 * rank) % 64
        return workload.loss(model, workload.train.batch(torch.arange(first, first + 2).numpy()))

    return model, loss_of


STEPPED = {"gamma": 0.3}
LONG = [
    pytest.param("cnn", {"size": 3, "momentum": 0.9, **STEPPED}, id="cnn-3"),
    pytest.param("cnn", {"size": 1}, id="cnn-1"),
    pytest.param("bert-base", {"momentum": 0.9, **STEPPED, "scheduler": "bucket"}, id="bert"),
    pytest.param("gpt2", {"size": 3, **STEPPED, "scheduler": "bucket"}, id="gpt2-3"),
    pytest.param("gpt2", {"momentum": 0.9}, id="gpt2"),
]


@pytest.mark.parametrize(("model", "options"), LONG)
def test_200_steps_are_those_of_error_feedback(model: str, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    start, loss_of = (cnn(), images) if model == "cnn" else tokens(model)
    runs = [train(s, start, loss_of, steps=200, **options) for s in (mirror(), KEEP_ALL)]
    agree(*runs)


def linear() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10)).double()


def squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(6, 30, generator=draw).to(dtype)).square().mean()


@pytest.mark.parametrize("scheduler", ["sequential", "bucket", "p3", "dear", "bytescheduler"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_whatever_the_messages_and_wherever_it_is_kept(scheduler: str, where: str) -> None:
    """Fused, cut, across the iteration; with Adam, over steps of two micro-batches."""
    options: dict[str, Any] = {
        "size": 2,
        "steps": 12,
        "scheduler": scheduler,
        "optimizer": torch.optim.Adam,
        "accumulate": 2,
    }
    agree(*(train(s, linear(), squares, **options) for s in (mirror(where=where), KEEP_ALL)))


@pytest.mark.parametrize(
    "inner",
    [
        "topk-sampled",
        "randomk:ratio=0.1",
        "gtopk:ratio=0.1",
        "oktopk:ratio=0.1,every=4",
        "threshold:value=0.01",
        "warmup:stage_steps=4+topk",
        "qsgd",
        "powersgd:rank=2,feedback=0",
        "by-size:min_elements=100+topk",
    ],
)
def test_any_compressor_within(inner: str) -> None:
    """Also those that go by magnitudes or keep something themselves, while the rate changes."""
    rates = {"steps": 60, "size": 2, "gamma": 0.3}
    runs = [train(s, linear(), squares, inner=inner, **rates) for s in (mirror(), KEEP_ALL)]
    for rank, weights in runs[0].weights.items():
        assert difference(weights, runs[1].weights[rank]) < 1e-12


def test_what_no_rank_uses_is_left_alone() -> None:
    """Weight decay does not touch it, and what another rank uses is not its."""

    def decaying(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, weight_decay=0.5)

    def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model.a.sum() * (1.0 + rank)

    options: dict[str, Any] = {"size": 2, "steps": 3, "optimizer": decaying}
    runs = [train(s, TwoBranches(), loss_of, **options) for s in (mirror(), KEEP_ALL)]
    agree(*runs)
    assert runs[0].weights[0][1].item() == 1.0
    assert runs[0].weights[0][0].item() < 1.0


# The trap: an update that is small beside the weights.


def tiny_steps(strategy: Strategy) -> Trained:
    return train(strategy, linear().float(), squares, steps=60, rate=2e-5)


def test_a_difference_keeps_updates_that_are_small_beside_the_weights() -> None:
    exact = train(KEEP_ALL, linear(), squares, steps=60, rate=2e-5)
    stored = tiny_steps(mirror())
    as_weights = tiny_steps(mirror(form="weights"))

    def off(trained: Trained) -> float:
        kept, expected = trained.kept[0], exact.kept[0]
        return difference([kept[key].double() for key in expected], list(expected.values()))

    def same(trained: Trained) -> float:
        return sum(torch.equal(i, exact.sent[k]) for k, i in trained.sent.items()) / len(exact.sent)

    assert off(stored) < 1e-5
    assert same(stored) == 1.0
    assert stored.notes == [""]
    assert off(as_weights) > 100 * off(stored)
    assert same(as_weights) < 0.9
    assert "lost" in as_weights.notes[0]
    for ours, theirs in zip(stored.losses, exact.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)


def test_what_goes_through_weights_loses_exactly_what_is_told() -> None:
    draw = torch.Generator().manual_seed(1)
    weights, kept, given = (torch.randn(5000, generator=draw) for _ in range(3))
    kept, given = kept * 1e-5, given * 1e-5
    before = kept.double()
    added, lost = through_weights(kept, given, weights, 0.5, 0.25)
    wanted = given.double() * 0.25 + before * 0.125
    assert float(added) == pytest.approx(float(given.double().abs().sum()) * 0.25, rel=1e-6)
    missing = (kept.double() * 0.25 - wanted).abs().sum()
    assert float(lost) == pytest.approx(float(missing), rel=1e-4)
    assert float(lost) > 1e-3 * float(added)


def test_in_float64_the_form_does_not_matter() -> None:
    runs = [train(mirror(form=f), linear(), squares, steps=40) for f in ("weights", "difference")]
    assert difference(runs[0].weights[0], runs[1].weights[0]) < 1e-9


# Memory.


def test_gradients_are_gone_when_backward_ends() -> None:
    """Those of fused messages, too: they are copied nowhere."""
    made: list[StorageWeakRef] = []
    gone: list[bool] = []

    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        given = list(parameters)
        for parameter in given:
            parameter.register_post_accumulate_grad_hook(
                lambda p: made.append(StorageWeakRef(p.grad.untyped_storage()))
            )
        return torch.optim.SGD(given, lr=lr)

    def look() -> None:
        gone.extend(ref.expired() for ref in made)
        made.clear()

    options: dict[str, Any] = {"optimizer": optimizer, "after_backward": look}
    for strategy in (mirror(), KEEP_ALL):
        train(strategy, linear(), squares, steps=3, scheduler="bucket", **options)
    assert gone == [True] * 12 + [False] * 12


def test_state_on_the_host_is_no_memory_of_the_process() -> None:
    """What is kept and Adam's moments lie in mapped files; with and without, they are the same."""
    kept: dict[str, list[torch.Tensor]] = {}

    def loop(where: str) -> Callable[[Backend, Group], None]:
        def rank(backend: Backend, group: Group) -> None:
            torch.manual_seed(2)
            model = nn.Linear(100, 80)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            strategy = mirror(where=where)
            if strategy.prepare is not None:
                strategy.prepare(model, optimizer)
            compression = compression_of("ef:units=update+topk", 1)
            options: dict[str, Any] = {"compression": compression, "strategy": strategy}
            with Session(model, optimizer, backend, group.control, **options) as session:
                for _ in range(3):
                    model(torch.ones(1, 100)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert session.engine is not None
                state = optimizer.state[model.weight]
                residual = session.engine.driver.states["weight"]["residual"]
                kept[where] = [residual, state["exp_avg"], state["exp_avg_sq"], *model.parameters()]

        return rank

    for where in ("device", "host"):
        on_ranks(loop(where), 1)
    assert [is_on_host(t, CPU) for t in kept["host"][:3]] == [True] * 3
    assert not any(is_on_host(t, CPU) for t in kept["device"][:3])
    assert all(map(torch.equal, kept["device"], kept["host"]))


def test_host_memory_is_not_anonymous_has_no_name_and_must_fit() -> None:
    code = (
        "import os, torch\n"
        "from testbed.memory.host import zeros_on_host\n"
        "def anonymous():\n"
        "    return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])\n"
        "before, files = anonymous(), len(os.listdir('/dev/shm'))\n"
        "kept = zeros_on_host(1 << 24, torch.float32, torch.device('cpu')).fill_(1)\n"
        "print(anonymous() - before, len(os.listdir('/dev/shm')) - files)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    grown_kib, new_files = map(int, done.stdout.split())
    assert grown_kib < 1 << 13  # of the 65,536 that were written
    assert new_files == 0
    with pytest.raises(UsageError, match="there is no room"):
        zeros_on_host(1 << 50, torch.float32, CPU)


# Checkpoints, and what is refused.


def part_of_a_run(
    start: nn.Module, strategy: Strategy, scheduler: str, first: int, saved: dict[int, Any]
) -> list[torch.Tensor]:
    """Weights after 8 steps on two ranks, which go on from what was saved unless they begin."""
    ends: dict[int, list[torch.Tensor]] = {}

    def rank(backend: Backend, group: Group) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)
        if strategy.prepare is not None:
            strategy.prepare(model, optimizer)
        with Session(
            *(model, optimizer, backend, group.control),
            plan=plan_of(scheduler, model),
            compression=compression_of("ef:units=update+" + TOPK, 1),
            strategy=strategy,
        ) as session:
            parts = (model, optimizer, schedule, session)
            if first:
                states = torch.load(io.BytesIO(saved[group.rank]))
                for part, state in zip(parts, states, strict=True):
                    part.load_state_dict(state)
            for step in range(first, first + 8):
                optimizer.zero_grad()
                squares(model, group.rank, step).backward()
                optimizer.step()
                schedule.step()
            file = io.BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            saved[group.rank] = file.getvalue()
            ends[group.rank] = [p.detach().clone() for p in model.parameters()]

    on_ranks(rank, 2)
    return ends[0]


def resumed(start: nn.Module, strategies: Sequence[Strategy]) -> list[torch.Tensor]:
    """Weights after a run of two parts, the second by another plan."""
    saved: dict[int, Any] = {}
    part_of_a_run(start, strategies[0], "wfbp", 0, saved)
    return part_of_a_run(start, strategies[1], "bucket", 8, saved)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("mirrored", [(True, True), (False, True), (True, False)])
def test_training_goes_on_from_a_checkpoint_of_either(
    mirrored: tuple[bool, bool], where: str
) -> None:
    start = linear()
    strategies = [mirror(where=where) if each else KEEP_ALL for each in mirrored]
    ours, theirs = resumed(start, strategies), resumed(start, [KEEP_ALL, KEEP_ALL])
    assert difference(ours, theirs) < 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compressor": "none"}, "compressor 'none' keeps no residual.* ef:units=update"),
        ({"compressor": "ef+topk"}, r"'ef\+topk' keeps it in units of gradients"),
        ({"compressor": "dgc"}, "'dgc' keeps no residual of this kind"),
        ({"compressor": "warmup+ef:units=update+topk"}, "keeps no residual of this kind"),
        ({"backend": "ddp"}, "'ddp' exchanges gradients by itself"),
        ({"clip_norm": 1.0}, "--clip-norm needs all mean gradients at once"),
        ({"memory": "mirror:form=bits"}, "form is 'bits'; expected one of difference, weights"),
    ],
)
def test_what_has_no_mirror_is_refused(given: dict[str, Any], message: str) -> None:
    settings = {"compressor": "ef:units=update+topk", "memory": "mirror", **given}
    with pytest.raises(UsageError, match=message):
        parts_of(RunConfig(**settings))


@pytest.mark.parametrize(
    ("compressor", "options", "dtype", "message"),
    [
        ("none", {}, torch.float32, "compressor 'none' keeps no residual"),
        ("topk", {}, torch.float32, "compressor 'topk' keeps no residual"),
        ("ef:units=update+topk", {"form": "weights"}, torch.bfloat16, "'weight' is torch.bfloat16"),
    ],
)
def test_a_session_refuses_the_same(
    compressor: str, options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    def rank(backend: Backend, group: Group) -> None:
        model = nn.Linear(2, 2, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given: dict[str, Any] = {"compression": compression_of(compressor, 1)}
        Session(*(model, optimizer, backend, group.control), strategy=mirror(**options), **given)

    with pytest.raises(UsageError, match=message):
        on_ranks(rank, 1)


@pytest.mark.parametrize(("rate", "words"), [(0.0, "this step's is 0"), (None, "have several")])
def test_a_rate_that_updates_nothing_or_is_none_is_refused(rate: float | None, words: str) -> None:
    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        rates = (n if rate is None else rate for n in range(4))
        groups = [{"params": [p], "lr": r} for p, r in zip(parameters, rates, strict=True)]
        return torch.optim.SGD(groups, lr=lr)

    with pytest.raises(UsageError, match=words):
        train(mirror(), linear(), squares, steps=1, optimizer=optimizer)


def test_a_release_that_is_asked_for_takes_the_place_of_the_implied_one() -> None:
    both = [("mirror", mirror(where="host")), ("release", Strategy(release=Release(7)))]
    for chain in (both, both[::-1]):
        assert combined(chain).release == Release(7)
    assert combined(both[:1]).release == Release()
