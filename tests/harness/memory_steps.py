"""Lifetimes of made-up steps, with the events that a recorded step has."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from testbed.memory.planning.lifetimes import ForwardOp, GradientReady, Lifetimes, Use, Value


@dataclass
class _Run:
    """An operator of the forward pass."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saves: tuple[int, ...]
    time_s: float
    parameter_bytes: int


@dataclass
class Tape:
    """Operators in the order of the forward pass; `step` makes the backward pass from them."""

    names: list[str] = field(default_factory=list)
    ops: list[ForwardOp] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    replaces: dict[int, int] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)

    def op(
        self,
        unit: str,
        name: str,
        inputs: tuple[int, ...] = (),
        sizes: tuple[int, ...] = (0,),
        saves: tuple[int, ...] = (),
        time_s: float = 1.0,
        parameter_bytes: int = 0,
        in_place: bool = False,
        fixed: bool = False,
    ) -> int:
        """Append one; returns its first output.

        `saves` are values, or -1, -2, ... for its first, second, ... output. In place, the output
        lies in the storage of the first input.
        """
        if unit not in self.names:
            self.names.append(unit)
        first = len(self.sizes)
        sizes = (self.sizes[inputs[0]],) if in_place else sizes
        outputs = tuple(range(first, first + len(sizes)))
        self.sizes += sizes
        if in_place:
            self.replaces[first] = inputs[0]
        if fixed:
            self.fixed.update(outputs)
        saved = tuple(outputs[-1 - s] if s < 0 else s for s in saves)
        self.ops.append(ForwardOp(name=name, unit=self.names.index(unit), time_s=time_s))
        self.runs.append(_Run(inputs, outputs, saved, time_s, parameter_bytes))
        return first

    def step(self, weight_bytes: int = 0) -> Lifetimes:
        """One step: each value dies after its last reader, the backward pass runs in reverse."""
        return _Recorder(self).step(weight_bytes)


class _Recorder:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.base: list[int] = []
        self.time_s: list[float] = []
        self.level, self.now_s = 0, 0.0
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self.packed: list[list[tuple[int, int]]] = []
        self.uses: dict[int, list[Use]] = {n: [] for n in range(len(tape.sizes))}
        self.gradients: list[GradientReady] = []

    def tick(self) -> int:
        self.base.append(self.level)
        self.time_s.append(self.now_s)
        return len(self.base) - 1

    def step(self, weight_bytes: int) -> Lifetimes:
        tape = self.tape
        self._forward()
        self._backward()
        last = self.tick()
        owner = {n: (op, i) for op, r in enumerate(tape.runs) for i, n in enumerate(r.outputs)}
        values = tuple(
            Value(
                num_bytes=size,
                op=owner[number][0],
                output=owner[number][1],
                inputs=tuple(sorted(set(tape.runs[owner[number][0]].inputs))),
                born=self.born[number],
                dies=self.dies.get(number, last),
                uses=tuple(self.uses[number]),
                replaces=tape.replaces.get(number),
                is_fixed=number in tape.fixed,
            )
            for number, size in enumerate(tape.sizes)
        )
        return Lifetimes(
            units=tuple(tape.names),
            ops=tuple(tape.ops),
            values=values,
            base=tuple(self.base),
            time_s=tuple(self.time_s),
            gradients=tuple(self.gradients),
            weight_bytes=weight_bytes,
        )

    def _forward(self) -> None:
        tape = self.tape
        overwritten = set(tape.replaces.values())
        readers = Counter(n for run in tape.runs for n in set(run.inputs))
        for run in tape.runs:
            self.tick()
            self.now_s += run.time_s
            for number in run.outputs:
                if number in tape.replaces:
                    self.dies[tape.replaces[number]] = self.tick()
                self.born[number] = self.tick()
            self.packed.append([(number, self.tick()) for number in run.saves])
            self.tick()
            for number in sorted(set(run.inputs)):
                readers[number] -= 1
                if not readers[number] and number not in overwritten:
                    self.dies[number] = self.tick()
            for number in run.outputs[1:]:  # what only the backward pass reads
                if not readers[number]:
                    self.dies[number] = self.tick()

    def _backward(self) -> None:
        tape = self.tape
        gradient_of: set[int] = set()
        for op in range(len(tape.runs) - 1, -1, -1):
            run = tape.runs[op]
            self.tick()
            unpacked = [(number, packed, self.tick()) for number, packed in self.packed[op]]
            self.level += run.parameter_bytes
            for number in set(run.inputs) - gradient_of:
                gradient_of.add(number)
                self.level += tape.sizes[number]
            self.now_s += 2 * run.time_s
            self.tick()
            if run.parameter_bytes:
                self.level -= run.parameter_bytes
                at = self.tick()
                self.gradients.append(
                    GradientReady(name=f"p{op}", num_bytes=run.parameter_bytes, position=at)
                )
            for number, packed, position in unpacked:
                use = Use(packed=packed, unpacked=position, released=self.tick())
                self.uses[number].append(use)
            self.level -= sum(tape.sizes[n] for n in run.outputs if n in gradient_of)
            self.tick()


def random_chain(seed: int, num_units: int) -> Lifetimes:
    """Layers one after the other: each saves its input, its output, both or something beside."""
    chance = random.Random(seed)
    tape = Tape()
    value = tape.op("u0", "aten.first.default", sizes=(chance.randint(1, 40),))
    for number in range(num_units):
        value = _random_layer(tape, chance, f"u{number}", (value,))
    tape.op("loss", "aten.sum.default", (value,), (1,), (value,), 0.1)
    return _merge_ends(tape, num_units)


def random_dag(seed: int, num_units: int) -> Lifetimes:
    """Layers with sums and concatenations of earlier outputs."""
    chance = random.Random(seed)
    tape = Tape()
    there = [tape.op("u0", "aten.first.default", sizes=(chance.randint(1, 40),))]
    for number in range(num_units):
        kind = chance.random()
        if kind < 0.35 and len(there) > 1:
            other = chance.choice(there[:-1])
            sizes = (tape.sizes[there[-1]] + tape.sizes[other],)
            name = "aten.cat.default" if kind < 0.15 else "aten.add.Tensor"
            there.append(tape.op(f"u{number}", name, (there[-1], other), sizes, (), 0.3))
        there.append(_random_layer(tape, chance, f"u{number}", (there[-1],)))
        if len(there) > 2 and chance.random() < 0.5:
            there.pop(0)
    tape.op("loss", "aten.sum.default", (there[-1],), (1,), (there[-1],), 0.1)
    return _merge_ends(tape, num_units)


def _random_layer(tape: Tape, chance: random.Random, unit: str, inputs: tuple[int, ...]) -> int:
    size, time_s = chance.randint(1, 40), round(chance.uniform(0.2, 4.0), 2)
    parameters = chance.choice((0, chance.randint(1, 30), chance.randint(1, 30)))
    kind = chance.randrange(5)
    if kind == 0:
        return tape.op(unit, "aten.mm.default", inputs, (size,), inputs, time_s, parameters)
    if kind == 1:
        return tape.op(unit, "aten.tanh.default", inputs, (size,), (-1,), time_s, parameters)
    if kind == 2:
        sizes = (size, chance.randint(1, 5), chance.randint(1, 30))
        saves = (*inputs, -2, -3)
        return tape.op(unit, "aten.norm.default", inputs, sizes, saves, time_s, parameters)
    if kind == 3:
        made = tape.op(
            unit, "aten.norm.default", inputs, (size, 2), (*inputs, -2), time_s, parameters
        )
        return tape.op(unit, "aten.relu_.default", (made,), (), (-1,), time_s / 4, in_place=True)
    made = tape.op(
        unit, "aten.rand.default", inputs, (size, size), (-2,), time_s, fixed=chance.random() < 0.3
    )
    return tape.op(unit, "aten.mul.Tensor", (made, made + 1), (size,), (made,), time_s / 3)


def _merge_ends(tape: Tape, num_units: int) -> Lifetimes:
    """The loss belongs to the last layer."""
    last = num_units - 1
    tape.ops = [
        op if op.unit <= last else ForwardOp(name=op.name, unit=last, time_s=op.time_s)
        for op in tape.ops
    ]
    tape.names = tape.names[:num_units]
    return tape.step(weight_bytes=7)


def residual_network(num_blocks: int, scale: int = 1 << 20) -> Lifetimes:
    """Bottleneck blocks of convolution, normalisation and overwriting activation, as in ResNet."""
    tape = Tape()

    def conv(unit: str, source: int, size: int) -> int:
        made = tape.op(unit, CONV, (source,), (size,), (source,), 3e-3, size // 8)
        return tape.op(
            unit.replace("conv", "bn"), NORM, (made,), (size, 256, 256), (made, -2, -3), 4e-4, 512
        )

    def relu(unit: str, source: int) -> int:
        return tape.op(unit, "aten.relu_.default", (source,), (), (-1,), 1e-4, in_place=True)

    value = relu("relu", conv("conv1", tape.op("conv1", "aten.x.default", (), (scale,)), scale * 4))
    for number in range(num_blocks):
        block = f"layer{1 + number * 4 // num_blocks}.{number}"
        size = scale * 4 >> (number * 4 // num_blocks)
        inner = relu(f"{block}.relu", conv(f"{block}.conv1", value, size // 4))
        inner = relu(f"{block}.relu", conv(f"{block}.conv2", inner, size // 4))
        inner = conv(f"{block}.conv3", inner, size)
        if size != tape.sizes[value]:
            value = conv(f"{block}.downsample.conv", value, size)
        summed = tape.op(block, "aten.add_.Tensor", (inner, value), (), (), 2e-4, in_place=True)
        value = relu(f"{block}.relu", summed)
    tape.op("fc", "aten.addmm.default", (value,), (1000,), (value,), 1e-3, scale)
    return tape.step(weight_bytes=num_blocks * scale)


CONV, NORM = "aten.convolution.default", "aten.native_batch_norm.default"


def transformer(num_blocks: int, scale: int = 1 << 18) -> Lifetimes:
    """Blocks of attention and of two matrix products, as in GPT-2."""
    tape = Tape()
    wide = 4 * scale
    value = tape.op("wte", "aten.embedding.default", (), (scale,), (), 1e-4, scale)

    def plain(unit: str, name: str, source: int, size: int, saves: tuple[int, ...] = ()) -> int:
        return tape.op(unit, f"aten.{name}.default", (source,), (size,), saves, 2e-4)

    def product(unit: str, source: int, size: int) -> int:
        return tape.op(unit, "aten.addmm.default", (source,), (size,), (source,), 4e-3, size)

    def norm(unit: str, source: int) -> int:
        sizes, saves = (scale, 64, 64), (source, -2, -3)
        return tape.op(unit, "aten.native_layer_norm.default", (source,), sizes, saves, 3e-4, 64)

    def added(unit: str, one: int, other: int) -> int:
        made = tape.op(
            f"{unit}.dropout",
            "aten.native_dropout.default",
            (one,),
            (scale, scale // 4),
            (-2,),
            3e-4,
        )
        return tape.op(unit, "aten.add.Tensor", (made, other), (scale,), (), 2e-4)

    for number in range(num_blocks):
        block = f"h.{number}"
        mixed = product(f"{block}.attn.c_attn", norm(f"{block}.ln_1", value), 3 * scale)
        seen = tape.op(
            f"{block}.attn",
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            (mixed,),
            (scale, 512),
            (mixed, -1, -2),
            3e-3,
        )
        value = added(f"{block}.attn", product(f"{block}.attn.c_proj", seen, scale), value)
        inner = product(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", value), wide)
        act = f"{block}.mlp.act"
        cubed = plain(act, "pow", inner, wide, (inner,))
        bent = plain(act, "tanh", plain(act, "mul", cubed, wide), wide, (-1,))
        half = plain(act, "mul", inner, wide)
        inner = tape.op(act, "aten.mul.Tensor", (half, bent), (wide,), (half, bent), 2e-4)
        value = added(f"{block}.mlp", product(f"{block}.mlp.c_proj", inner, scale), value)
    tape.op("lm_head", "aten.mm.default", (value,), (8 * scale,), (value,), 1e-2, wide)
    return tape.step(weight_bytes=num_blocks * scale * 12)
