"""The simulator of memory against a plain one that goes from event to event, and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from testbed.memory.planning.lifetimes import (
    KEEP,
    MOVED,
    OFFLOAD,
    OFFLOAD_SYNC,
    OFFLOAD_WINDOW,
    RECOMPUTE,
    Costs,
    ForwardOp,
    GradientReady,
    Lifetimes,
    Use,
    Value,
    ends,
    settled,
)
from testbed.memory.planning.simulator import Simulator, simulate
from tests.harness.memory_steps import (
    Tape,
    random_chain,
    random_dag,
    residual_network,
    transformer,
)


class EventByEvent:
    """Plays a step event by event, with a list of what is there; slow and plain."""

    def __init__(self, step: Lifetimes, actions: str, costs: Costs) -> None:
        self.step, self.costs = step, costs
        self.actions = settled(step, actions)
        self.needed_until = ends(step, self.actions)
        self.there: list[list[int]] = []  # value, until
        self.on_host: list[tuple[int, float]] = []  # value, when its copy is written
        self.back: dict[int, float] = {}
        self.late: list[tuple[int, float]] = []
        self.host_free = 0.0
        self.peak = self.moved = 0
        self.recomputed = 0.0
        self.queue = sorted(
            (n for n, a in enumerate(self.actions) if a in MOVED and self.uses(n)),
            key=lambda n: min(use.unpacked for use in self.uses(n)),
        )
        unpacked = [use.unpacked for n in range(len(step.values)) for use in self.uses(n)]
        self.turn = min(unpacked, default=step.num_positions - 1)

    def uses(self, number: int) -> list[Use]:
        return [use for use in self.step.values[number].uses if use.unpacked >= 0]

    def released(self, number: int) -> int:
        return max((use.released for use in self.step.values[number].uses), default=-1)

    def now(self, position: int) -> float:
        return self.step.time_s[position] + sum(by for _, by in self.late)

    def wait(self, position: int, until: float) -> None:
        self.late.append((position, max(0.0, until - self.now(position))))

    def copy(self, number: int, position: int) -> float:
        takes = self.step.values[number].num_bytes / self.costs.host_bytes_per_s
        self.late.append((position, takes * self.costs.copy_share))
        self.host_free = max(self.host_free, self.now(position)) + takes
        return self.host_free

    def bytes_there(self) -> int:
        return sum(self.step.values[number].num_bytes for number, _ in self.there)

    def add(self, number: int, until: int, position: int) -> None:
        if until > position:
            self.there.append([number, until])

    def is_made(self, number: int, position: int) -> bool:
        return any(n == number and until > position for n, until in self.made)

    def run(self) -> EventByEvent:
        self.made: list[tuple[int, int]] = []
        for position in range(self.step.num_positions):
            other = self.step.base[position] + self.gradients(position) + self.beside(position)
            self.other = other
            self.held_before = self.bytes_there()
            self.there = [there for there in self.there if there[1] > position]
            for number, value in enumerate(self.step.values):
                if value.born == position:
                    self.birth(number)
                if self.actions[number] in MOVED and position == min(
                    use.packed for use in value.uses
                ):
                    self.leave(number, position)
            if position == self.turn:
                self.begin_backward()
            for number in range(len(self.step.values)):
                for use in self.uses(number):
                    if use.unpacked == position:
                        self.want(number, position)
            self.peak = max(self.peak, other + self.bytes_there())
        return self

    def birth(self, number: int) -> None:
        value, action = self.step.values[number], self.actions[number]
        until = self.needed_until[number] if action == KEEP else value.dies
        if action in MOVED:
            until = 10**9  # until its copy is written
        self.add(number, until, value.born)

    def leave(self, number: int, position: int) -> None:
        while len(self.on_host) >= OFFLOAD_WINDOW:
            self.copied(position)
        self.moved += self.step.values[number].num_bytes
        self.on_host.append((number, self.copy(number, position)))
        if self.actions[number] == OFFLOAD_SYNC:
            while self.on_host:
                self.copied(position)

    def copied(self, position: int) -> None:
        number, written = self.on_host.pop(0)
        self.wait(position, written)
        for there in self.there:
            if there[0] == number and there[1] == 10**9:
                there[1] = self.step.values[number].dies
        self.there = [there for there in self.there if there[1] > position]

    def begin_backward(self) -> None:
        while self.on_host:
            self.copied(self.turn)

    def want(self, number: int, position: int) -> None:
        if self.actions[number] in MOVED:
            self.bring(number, position)
        elif self.actions[number] == RECOMPUTE and not self.is_made(number, position):
            self.make(number, position)

    def bring(self, number: int, position: int) -> None:
        self.send_for(number, position)
        self.wait(position, self.back[number])
        if number in self.queue:
            place = self.queue.index(number)
            for following in self.queue[place + 1 : place + 1 + OFFLOAD_WINDOW]:
                if self.actions[following] == OFFLOAD:
                    self.send_for(following, position)

    def send_for(self, number: int, position: int) -> None:
        if number not in self.back:
            self.add(number, self.needed_until[number], position)
            self.back[number] = self.copy(number, position)

    def make(self, wanted: int, position: int) -> None:
        values = self.step.values
        again: set[int] = set()

        def trace(number: int) -> None:
            again.add(values[number].op)
            for source in values[number].inputs:
                if self.actions[source] == RECOMPUTE and not self.is_made(source, position):
                    trace(source)

        trace(wanted)
        read = {s for n, v in enumerate(values) if v.op in again for s in v.inputs}
        before = self.bytes_there()
        for source in sorted(read):
            if self.actions[source] in MOVED:
                self.bring(source, position)
        brought = self.bytes_there() - before
        held: dict[int, int] = {}  # made on the way, by value
        stay: list[int] = []
        for op in sorted(again):
            outputs = [n for n, v in enumerate(values) if v.op == op]
            for number in outputs:
                held.pop(values[number].replaces, None)
                held[number] = values[number].num_bytes
            total = sum(held.values()) + sum(values[n].num_bytes for n in stay)
            self.peak = max(self.peak, self.other + self.held_before + brought + total)
            for number in outputs:
                wanted_later = self.released(number) > position
                if (
                    self.actions[number] == RECOMPUTE
                    and (wanted_later or number == wanted)
                    and not self.is_made(number, position)
                ):
                    stay.append(number)
                    del held[number]
            for number in list(held):
                readers = [n for n, v in enumerate(values) if number in v.inputs]
                later = [n for n in readers if values[n].op in again and values[n].op > op]
                if not later or self.actions[number] != RECOMPUTE or number in stay:
                    del held[number]
            again_s = self.step.ops[op].time_s
            self.recomputed += again_s
        self.late.append((position, sum(self.step.ops[op].time_s for op in sorted(again))))
        for number in stay:
            self.made.append((number, self.released(number)))
            self.add(number, self.released(number), position)

    def gradients(self, position: int) -> int:
        """All that are ready; of those that leave, the last `in_flight` ones."""
        ready = [g for g in self.step.gradients if g.position <= position]
        if self.costs.in_flight is None:
            return sum(g.num_bytes for g in ready)
        there = ready[len(ready) - self.costs.in_flight :] if self.costs.in_flight else []
        if ready and ready[-1].position == position and not there:
            there = ready[-1:]
        return sum(g.num_bytes for g in there)

    def beside(self, position: int) -> int:
        """What the optimizer and the exchange need beside the gradients, and the samples."""
        step, in_flight = self.step, self.costs.in_flight
        ready = [g for g in step.gradients if g.position <= position]
        if in_flight is None:
            update = step.update_bytes if position == step.num_positions - 1 else 0
        else:
            now = [g for g in ready if g.position == position]
            update = sum(round(g.num_bytes * step.update_share) for g in now)
        left = [g for g in ready if g.position < position]
        on_their_way = left[-self.costs.exchanges_at_once :]
        needs = dict(zip(step.gradients, self.costs.exchange_bytes, strict=False))
        samples = 0 if position == step.num_positions - 1 else step.sample_bytes
        return samples + update + sum(needs.get(g, 0) for g in on_their_way)


COSTS = (
    Costs(host_bytes_per_s=20.0, copy_share=0.3),
    Costs(host_bytes_per_s=2.0, copy_share=0.0, in_flight=1),
    Costs(host_bytes_per_s=100.0, copy_share=1.0, in_flight=2),
    Costs(exchanges_at_once=1, in_flight=0),
)


def assert_as_event_by_event(step: Lifetimes, actions: str, costs: Costs) -> None:
    found, plain = simulate(step, actions, costs), EventByEvent(step, actions, costs).run()
    resting = step.weight_bytes + step.optimizer_bytes
    assert found.peak_bytes == plain.peak + resting
    assert found.extra_s == pytest.approx(sum(by for _, by in plain.late))
    assert (found.moved_bytes, found.recomputed_s) == (
        plain.moved,
        pytest.approx(plain.recomputed),
    )
    ready = [
        step.time_s[g.position] + sum(by for at, by in plain.late if at <= g.position)
        for g in step.gradients
    ]
    assert found.ready_s == pytest.approx(ready)
    parts = found.activation_bytes + found.gradient_bytes + found.temporary_bytes
    parts += found.exchange_bytes + step.weight_bytes + step.optimizer_bytes
    assert parts == found.peak_bytes
    times, levels = Simulator(step, costs).curve(actions)
    sums = [sum(each) for each in zip(*levels.values(), strict=True)]
    assert (max(sums), sums.index(max(sums))) == (found.peak_bytes, found.position)
    assert levels["gradients"][found.position] == found.gradient_bytes
    assert times[-1] == pytest.approx(step.time_s[-1] + found.extra_s)


@pytest.mark.parametrize("make", [random_chain, random_dag])
@pytest.mark.parametrize("costs", COSTS)
def test_values_that_are_kept_made_again_and_moved(
    make: Callable[[int, int], Lifetimes], costs: Costs
) -> None:
    chance = random.Random(1)
    for seed in range(60):
        step = msgspec.structs.replace(
            make(seed, 1 + seed % 8),
            sample_bytes=5,
            optimizer_bytes=11,
            update_bytes=seed,
            update_share=0.25 * (seed % 3),
            least_moved_bytes=10 * (seed % 2),
        )
        for letters in ("kros", "ro", "r", "kr", "k", "o", "s", "os"):
            actions = "".join(chance.choice(letters) for _ in step.values)
            sizes = [gradient.num_bytes for gradient in step.gradients]
            needs = tuple(size * (seed % 3) // 2 for size in sizes)
            given = msgspec.structs.replace(costs, exchange_bytes=needs)
            assert_as_event_by_event(step, actions, given)


@pytest.mark.parametrize("step", [residual_network(2, 64), transformer(2, 64)])
def test_real_layers(step: Lifetimes) -> None:
    chance = random.Random(2)
    for letters in ("k", "r", "o", "s", "kros", "kkkr", "rro"):
        per_unit = [chance.choice(letters) for _ in step.units]
        actions = "".join(per_unit[step.ops[value.op].unit] for value in step.values)
        assert_as_event_by_event(step, actions, Costs(host_bytes_per_s=1e4))


@pytest.mark.parametrize("make", [random_chain, random_dag])
def test_the_prepared_rules_are_the_plain_ones(make: Callable[[int, int], Lifetimes]) -> None:
    chance = random.Random(3)
    changed = 0
    for seed in range(100):
        step = msgspec.structs.replace(make(seed, 6), least_moved_bytes=10 * (seed % 2))
        actions = "".join(chance.choice("kros") for _ in step.values)
        found = Simulator(step).settled(actions)
        assert found == settled(step, actions)
        assert Simulator(step).ends(found) == ends(step, found)
        changed += found != actions
    assert changed > 50


def test_layers_of_the_worked_example() -> None:
    """x = dx = 10, 6, 2, w = g = 4, 8, 2 and workspaces 1, 3, 0 by the reference schedule.

    Without weights and their gradients the levels are 11, 19, 18, 26, 29, 11. The base is dx and
    the workspaces.
    """
    x, g = (10, 6, 2), (4, 8, 2)
    gone = (5, 4, 4)  # x_l is there at moments l to 2 L - l, x_L at L and L + 1
    step = Lifetimes(
        units=("1", "2", "3"),
        ops=tuple(ForwardOp(name="f", unit=layer) for layer in range(3)),
        values=tuple(
            Value(
                num_bytes=size,
                op=layer,
                born=layer,
                dies=layer + 1,
                uses=(Use(packed=layer, unpacked=gone[layer] - 1, released=gone[layer]),),
            )
            for layer, size in enumerate(x)
        ),
        base=(1, 3, 0, 2 + 6, 6 + 10 + 3, 10 + 1),
        gradients=tuple(
            GradientReady(name=f"w{layer}", num_bytes=g[layer], position=5 - layer)
            for layer in (2, 1, 0)
        ),
        weight_bytes=14,
    )
    all_stay, one_in_flight = (simulate(step, "kkk", Costs(in_flight=n)) for n in (None, 1))
    assert (all_stay.position, all_stay.activation_bytes, all_stay.temporary_bytes) == (4, 10, 19)
    assert all_stay.peak_bytes == 14 + 29 + (2 + 8)
    assert one_in_flight.peak_bytes == 14 + 29 + 8
    no_gradients = msgspec.structs.replace(step, gradients=(), weight_bytes=0)
    levels = [
        simulate(msgspec.structs.replace(no_gradients, base=base), "kkk").peak_bytes
        for base in (
            tuple(b if at == p else -99 for at, b in enumerate(step.base)) for p in range(6)
        )
    ]
    assert levels == [11, 19, 18, 26, 29, 11]


def test_what_another_layer_overwrites_is_made_again_only_with_it() -> None:
    tape = Tape()
    first = tape.op("a", "x", (), (8,))
    made = tape.op("b", "norm", (first,), (8,), (first,))
    tape.op("c", "relu_", (made,), saves=(-1,), in_place=True)
    step = tape.step()
    assert settled(step, "krr") == "krr"
    assert settled(step, "kkr") == "kkk"  # relu_ cannot run without what it overwrote
    assert settled(step, "krk") == "kkk"  # nobody wants the sum itself
    assert settled(step, "ooo") == "oko"
    assert settled(msgspec.structs.replace(step, least_moved_bytes=9), "ooo") == "kkk"


def test_a_value_that_was_dropped_between_two_readers_is_made_twice() -> None:
    """`b` is saved by a later operator alone and let go before `c` is made from it."""
    tape = Tape()
    a = tape.op("a", "x", (), (4,))
    b = tape.op("b", "f", (a,), (4,), time_s=5.0)
    c = tape.op("c", "f", (b,), (4,))
    d = tape.op("d", "f", (c,), (4,), (c,))
    tape.op("e", "f", (d, b), (4,), (b,))
    step = tape.step()
    assert simulate(step, "krrkk").recomputed_s == 5.0 + 5.0 + 1.0
    assert simulate(step, "kkrkk").recomputed_s == 1.0
    assert simulate(step, "krkkk").recomputed_s == 5.0


def test_all_outputs_of_an_operator_are_made_by_one_run() -> None:
    tape = Tape()
    a = tape.op("a", "x", (), (4,))
    out = tape.op("b", "norm", (a,), (4, 1, 1), (a, -2, -3), time_s=5.0)
    tape.op("c", "f", (out,), (4,), (out,))
    step = tape.step()
    assert simulate(step, "krrrk").recomputed_s == 5.0


def test_the_host_link_is_waited_for_and_copies_are_read_ahead() -> None:
    tape = Tape()
    a = tape.op("a", "x", (), (100,))
    b = tape.op("b", "f", (a,), (100,), (a,))
    tape.op("c", "f", (b,), (100,), (b,))
    step = tape.step()
    free = simulate(step, "ook", Costs(host_bytes_per_s=1e9, copy_share=0.0))
    assert (free.extra_s, free.moved_bytes) == (pytest.approx(0.0, abs=1e-6), 200)
    slow = simulate(step, "ook", Costs(host_bytes_per_s=100.0, copy_share=0.0))
    # a leaves while c is computed; b leaves at the end of the forward pass and comes back at once,
    # 1 s each; a comes back while the backward pass of c takes 2 s
    assert slow.extra_s == pytest.approx(2.0)
