"""The layers of a recorded step: which are cheap, and how neighbours are merged to blocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from testbed.memory.planning.lifetimes import Lifetimes

MAX_UNITS: Final = 200
_CHEAP: Final = """
relu relu6 hardtanh leaky_relu elu celu selu gelu silu mish sigmoid tanh hardsigmoid hardswish
softplus threshold prelu log_sigmoid_forward softmax log_softmax softmax_backward_data
native_batch_norm native_batch_norm_legit native_batch_norm_legit_functional cudnn_batch_norm
batch_norm_with_update miopen_batch_norm native_layer_norm native_group_norm fused_rms_norm
max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d max_pool2d mkldnn_max_pool2d
upsample_nearest2d upsample_bilinear2d
add sub rsub mul div pow neg abs exp log log1p sqrt rsqrt sin cos square reciprocal clamp
clamp_min clamp_max maximum minimum where eq ne lt le gt ge masked_fill addcmul addcdiv sign erf
native_dropout bernoulli cat stack clone copy to_copy constant_pad_nd contiguous fill zero
zeros ones full empty_like zeros_like ones_like arange tril triu embedding mean sum var
"""


def is_cheap(op: str) -> bool:
    """Whether an operator takes little time for the bytes that it makes.

    Activations, normalisations, pooling, elementwise operators, softmax, dropout and copies do;
    convolutions, matrix products and attention do not, nor does what is not known.

    Args:
        op: as PyTorch's dispatcher calls it.

    Example:
        >>> [is_cheap(op) for op in ("aten.relu_.default", "aten.addmm.default", "aten.add.Tensor")]
        [True, False, True]
    """
    return re.sub(r"^\w+\.|\.\w+$", "", op).strip("_") in set(_CHEAP.split())


def values_by_unit(lifetimes: Lifetimes) -> list[list[int]]:
    """For each layer the values that its operators make."""
    found: list[list[int]] = [[] for _ in lifetimes.units]
    for number, value in enumerate(lifetimes.values):
        found[lifetimes.ops[value.op].unit].append(number)
    return found


def saved_bytes(lifetimes: Lifetimes, numbers: Sequence[int]) -> int:
    """Bytes of those values that are saved for the backward pass."""
    values = lifetimes.values
    return sum(values[number].num_bytes for number in numbers if values[number].uses)


def spread(lifetimes: Lifetimes, per_unit: str) -> str:
    """An action for each value from one for each layer.

    Example:
        >>> from testbed.memory.planning.lifetimes import ForwardOp, Value
        >>> ops = tuple(ForwardOp(name="f", unit=unit) for unit in (0, 1, 0))
        >>> values = tuple(Value(num_bytes=1, op=op, born=op, dies=9) for op in (0, 0, 1, 2))
        >>> spread(Lifetimes(units=("a", "b"), ops=ops, values=values, base=()), "kr")
        'kkrk'
    """
    return "".join(per_unit[lifetimes.ops[value.op].unit] for value in lifetimes.values)


def blocks(lifetimes: Lifetimes, at_most: int = MAX_UNITS) -> Lifetimes:
    """The same step with neighbouring layers merged, so that there are not more than `at_most`.

    What lies below one module is merged, from the deepest modules upwards and among these the one
    that saves least first, into a block of its costly layers and one of its cheap ones, which are
    worth different actions. A module that would leave less than half as many is passed over; if
    there are still too many, those neighbours of one kind are merged that save least.

    Args:
        lifetimes: of the step.
        at_most: number of layers and blocks.

    Example:
        >>> from testbed.memory.planning.lifetimes import ForwardOp
        >>> ops = tuple(ForwardOp(name="aten.mm.default", unit=unit) for unit in range(4))
        >>> step = Lifetimes(units=("in", "h.0.a", "h.0.b", "out"), ops=ops, values=(), base=())
        >>> blocks(step, at_most=3).units
        ('in', 'h.0.*', 'out')
    """
    names = list(lifetimes.units)
    if len(names) <= at_most:
        return lifetimes
    costly = {op.unit for op in lifetimes.ops if not is_cheap(op.name)}
    size = [saved_bytes(lifetimes, numbers) for numbers in values_by_unit(lifetimes)]
    block = dict(enumerate(names))  # by layer
    for module in _by_depth(names, size):
        count, below = len(set(block.values())), _below(module, names)
        left = count - len({block[unit] for unit in below}) + 2
        if count > at_most and left >= at_most // 2:
            for unit in below:
                block[unit] = f"{module}.*" if unit in costly else f"{module}.* (cheap)"
    for kinds in ([sorted(costly), sorted(set(block) - costly)], [list(block)]):
        _merge_neighbours(block, kinds, size, len(set(block.values())) - at_most)
    order: dict[str, int] = {}
    for op in lifetimes.ops:
        order.setdefault(block[op.unit], len(order))
    return msgspec.structs.replace(
        lifetimes,
        units=tuple(order),
        ops=tuple(msgspec.structs.replace(op, unit=order[block[op.unit]]) for op in lifetimes.ops),
    )


def _merge_neighbours(
    block: dict[int, str], kinds: Sequence[Sequence[int]], size: Sequence[int], times: int
) -> None:
    """Give two blocks of a kind that follow each other one name, those that save least first."""
    rows: list[list[list[int]]] = []
    for units in kinds:
        members: dict[str, list[int]] = {}
        for unit in units:
            members.setdefault(block[unit], []).append(unit)
        rows.append(list(members.values()))
    saves = [[sum(size[unit] for unit in group) for group in row] for row in rows]
    for _ in range(times):
        pairs = [(s[i] + s[i + 1], k, i) for k, s in enumerate(saves) for i in range(len(s) - 1)]
        if not pairs:
            break
        both, kind, at = min(pairs)
        saves[kind][at : at + 2] = [both]
        rows[kind][at : at + 2] = [rows[kind][at] + rows[kind][at + 1]]
    for group in (group for row in rows for group in row):
        first, last = block[group[0]].split(" .. ")[0], block[group[-1]].split(" .. ")[-1]
        for unit in group:
            block[unit] = first if first == last else f"{first} .. {last}"


def _below(module: str, names: Sequence[str]) -> list[int]:
    return [n for n, name in enumerate(names) if name == module or name.startswith(f"{module}.")]


def _by_depth(names: Sequence[str], size: Sequence[int]) -> list[str]:
    """Modules that hold more than one layer: the deepest first, then those that save least."""
    parents = {
        name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)
    }
    several = [name for name in parents if len(_below(name, names)) > 1]
    saves = {name: sum(size[unit] for unit in _below(name, names)) for name in several}
    return sorted(several, key=lambda name: (-name.count("."), saves[name], name))
