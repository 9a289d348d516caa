"""The lifetimes of a step's storages, and how much memory a choice of actions takes. No I/O.

A recording (`recording.capture`) runs one step on fake tensors in which nothing is saved for the
backward pass: it tells how long each storage lives without autograd, when autograd saves a tensor,
unpacks it and lets it go. `planning.simulator` puts the saved tensors back as actions say:

- `keep`: a value lives until its last saved use has ended, as in PyTorch;
- `offload`: it leaves when its copy on the host is written and returns before its use; or, in step
  with the computation (`offload_sync`), it is gone at once and comes back at its use, not before;
- `recompute`: it is dropped after the forward pass and made again where it is used, by running
  the operators again from the nearest values that are there.

Positions number the events of the recording (an operator begins or ends, a tensor is saved,
unpacked or let go, a storage dies): exact order, no times.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

import msgspec


class Action(enum.Enum):
    """What becomes of a value after its last use in the forward pass."""

    KEEP = "k"
    RECOMPUTE = "r"
    OFFLOAD = "o"
    OFFLOAD_SYNC = "s"


KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_SYNC = (action.value for action in Action)
MOVED: Final = OFFLOAD + OFFLOAD_SYNC
OFFLOAD_WINDOW: Final = 1
"""Copies to the host, and from it ahead of use, that may be under way at once, of `offload`."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One saved tensor: positions at which it is packed, unpacked (-1: never) and let go."""

    packed: int
    unpacked: int
    released: int


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """What one storage holds from one operator on that wrote it.

    Attributes:
        num_bytes: of the storage.
        op: number of the operator that makes it, in the order of the forward pass.
        output: which of the operator's outputs it is.
        inputs: values that the operator reads.
        born: position at which it is there.
        dies: position at which nothing holds it any more, were nothing saved.
        uses: saved tensors that lie in it.
        replaces: the value in the same storage that the operator overwrote; that ends here.
        is_fixed: the operator cannot be run again.
        stays: it is not moved either: an operator writes to it after it was saved.
    """

    num_bytes: int
    op: int
    output: int = 0
    inputs: tuple[int, ...] = ()
    born: int
    dies: int
    uses: tuple[Use, ...] = ()
    replaces: int | None = None
    is_fixed: bool = False
    stays: bool = False


class ForwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """An operator of the forward pass.

    Attributes:
        name: as PyTorch's dispatcher calls it.
        unit: number of the layer that runs it.
        time_s: what running it again takes.
        workspace_bytes: that it holds meanwhile, beside what it reads and makes.
    """

    name: str
    unit: int
    time_s: float = 0.0
    workspace_bytes: int = 0


class GradientReady(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient of a parameter is final at a position of the recording."""

    name: str
    num_bytes: int
    position: int


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step.

    Attributes:
        units: names of the layers, in the order of their first operator.
        ops: of the forward pass.
        values: made by it, in the order of their operators.
        base: [positions], bytes of all storages that are no values (temporary ones of the backward
            pass), without weights, gradients of parameters and optimizer state.
        time_s: [positions], when the event happens if nothing is saved in another way.
        gradients: of parameters, in the order in which they are ready.
        workspace: [positions], bytes that the operator which ends there held beside its arguments
            and results; no storages, and nobody but the allocator sees them. Empty: not measured.
        layers: [positions], the layer that is at work.
        relus: layers that are `torch.nn.ReLU`.
        accumulates: it is the last of several micro-batches, to whose gradients it adds.
        weight_bytes: parameters and buffers.
        sample_bytes: of the step's samples, which stay until the optimizer's step.
        optimizer_bytes: what the optimizer keeps between steps.
        update_bytes: what the optimizer's step over all parameters needs beside them at most.
        update_share: the same for the step of one parameter, over the parameter's bytes.
        update_slice_bytes: parameters of more bytes than that are updated in slices of so many;
            0: as a whole.
        least_moved_bytes: smaller values are not moved to the host: they take a page there.
        estimated: names of operators that could not be measured alone, though others were.
    """

    units: tuple[str, ...]
    ops: tuple[ForwardOp, ...]
    values: tuple[Value, ...]
    base: tuple[int, ...]
    time_s: tuple[float, ...] = ()
    gradients: tuple[GradientReady, ...] = ()
    workspace: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    relus: tuple[str, ...] = ()
    accumulates: bool = False
    weight_bytes: int = 0
    sample_bytes: int = 0
    optimizer_bytes: int = 0
    update_bytes: int = 0
    update_share: float = 0.0
    update_slice_bytes: int = 0
    least_moved_bytes: int = 0
    estimated: tuple[str, ...] = ()

    @property
    def num_positions(self) -> int:
        """Number of recorded events."""
        return len(self.base)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What moving takes, and what becomes of gradients.

    Attributes:
        host_bytes_per_s: between the device and the host; both ways share it.
        copy_share: share of a copy's time that the computing thread loses to it (cores and
            memory bandwidth), overlapped or not.
        in_flight: gradients of parameters are freed as they get ready, but for so many that are
            on their way; None: all stay until the optimizer's step.
        row: look-ahead: gradients on their way are ended early enough that they and the next `row`
            ones fit into the largest sum of so many in a row; 0: they are not.
        held_bytes: gradients that do not travel are freed together, as soon as they have so many
            bytes; 0: as `in_flight` says.
        exchange_bytes: what exchanging each gradient needs while it is on its way (scratch and
            payloads of a compressor, a mean with memory of its own); empty: nothing.
        exchanges_at_once: gradients for which that is needed at once.
        with_workspace: count what operators hold beside storages, where it was measured.
    """

    host_bytes_per_s: float = 4e9
    copy_share: float = 0.3
    in_flight: int | None = None
    row: int = 0
    held_bytes: int = 0
    exchange_bytes: tuple[int, ...] = ()
    exchanges_at_once: int = 2
    with_workspace: bool = False


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice of actions takes.

    Attributes:
        peak_bytes: largest number of bytes alive at once, weights and all.
        position: at which.
        activation_bytes: of values alive at the peak, those made again included.
        gradient_bytes: of parameters alive at the peak.
        temporary_bytes: of the recording's other storages at the peak.
        exchange_bytes: for gradients on their way at the peak.
        extra_s: how much longer a step takes than if all is kept.
        recomputed_s: part of it: running operators again.
        moved_bytes: written to the host in a step; as many are read back.
        ready_s: when each gradient is ready, from the beginning of the step.
    """

    peak_bytes: int
    position: int
    activation_bytes: int
    gradient_bytes: int
    temporary_bytes: int
    exchange_bytes: int
    extra_s: float
    recomputed_s: float
    moved_bytes: int
    ready_s: tuple[float, ...]


def settled(lifetimes: Lifetimes, actions: str) -> str:
    """The actions that can be carried out: what cannot be made again is kept.

    A value is made again only from values that nothing overwrites later, or that are made again
    themselves; what nobody saves, on the way to something that is saved alone. On the host there is
    a place for what is saved and not too small.

    Args:
        lifetimes: of the step.
        actions: one letter for each value.
    """
    values = lifetimes.values
    overwritten = {v.replaces for v in values if v.replaces is not None}
    found: list[str] = []
    for value, action in zip(values, actions, strict=True):
        if action == RECOMPUTE:
            blocked = any(u in overwritten and found[u] != RECOMPUTE for u in value.inputs)
            action = KEEP if value.is_fixed or blocked else RECOMPUTE
        elif action in MOVED:
            is_large = value.num_bytes >= lifetimes.least_moved_bytes
            action = action if value.uses and is_large and not value.stays else KEEP
        found.append(action)
    needed: set[int] = set()
    for number in range(len(values) - 1, -1, -1):
        if found[number] == RECOMPUTE:
            if values[number].uses or number in needed:
                needed.update(values[number].inputs)
            else:
                found[number] = KEEP
    return "".join(found)


def fetch_order(lifetimes: Lifetimes, actions: str) -> tuple[int, ...]:
    """Values on the host in the order in which the backward pass first wants them."""
    wanted = {
        number: min(use.unpacked for use in value.uses if use.unpacked >= 0)
        for number, value in enumerate(lifetimes.values)
        if actions[number] in MOVED and any(use.unpacked >= 0 for use in value.uses)
    }
    return tuple(sorted(wanted, key=wanted.__getitem__))


def ends(lifetimes: Lifetimes, actions: str) -> list[int]:
    """For each value the position at which nothing needs it any more.

    What is to be made again holds what it is made from until its own end.
    """
    found = [max([v.dies, *(use.released for use in v.uses)]) for v in lifetimes.values]
    for number in range(len(found) - 1, -1, -1):
        if actions[number] == RECOMPUTE:
            for source in lifetimes.values[number].inputs:
                found[source] = max(found[source], found[number])
    return found


def at_batch(
    small: Lifetimes, large: Lifetimes, small_batch: int, large_batch: int, batch: int
) -> Lifetimes | None:
    """The same step at another batch size, from recordings at two: sizes and times are linear.

    Args:
        small: recorded with `small_batch` samples.
        large: recorded with `large_batch`, more than that.
        small_batch: see `small`.
        large_batch: see `large`.
        batch: wanted.

    Returns:
        None where the two recordings are not the same but for sizes.

    Example:
        >>> def step(size):
        ...     return Lifetimes(units=("a",), ops=(), values=(), base=(0, size))
        >>> at_batch(step(3), step(5), 1, 2, 10).base
        (0, 21)
    """
    alike = (
        len(small.base) == len(large.base)
        and [op.name for op in small.ops] == [op.name for op in large.ops]
        and [v.inputs for v in small.values] == [v.inputs for v in large.values]
    )
    if not alike:
        return None
    share = (batch - small_batch) / (large_batch - small_batch)

    def bytes_of(a: int, b: int) -> int:
        return round(a + (b - a) * share)

    def seconds_of(a: float, b: float) -> float:
        return max(0.0, a + (b - a) * share)

    replace = msgspec.structs.replace
    pairs = zip(small.values, large.values, strict=True)
    return replace(
        small,
        values=tuple(replace(a, num_bytes=bytes_of(a.num_bytes, b.num_bytes)) for a, b in pairs),
        ops=tuple(
            replace(a, time_s=seconds_of(a.time_s, b.time_s))
            for a, b in zip(small.ops, large.ops, strict=True)
        ),
        base=tuple(map(bytes_of, small.base, large.base)),
        workspace=tuple(map(bytes_of, small.workspace, large.workspace)),
        time_s=tuple(map(seconds_of, small.time_s, large.time_s)),
        sample_bytes=bytes_of(small.sample_bytes, large.sample_bytes),
    )


def overwritten(lifetimes: Lifetimes, layers: Collection[str]) -> Lifetimes:
    """The step in which these layers overwrite what they read.

    Args:
        lifetimes: of the step as it was recorded.
        layers: each of whose operators reads one value that nobody else reads or saves.
    """
    values = list(lifetimes.values)
    for number, value in enumerate(lifetimes.values):
        if lifetimes.units[lifetimes.ops[value.op].unit] in layers:
            (read,) = value.inputs
            values[read] = msgspec.structs.replace(values[read], dies=value.born)
            values[number] = msgspec.structs.replace(value, replaces=read)
    return msgspec.structs.replace(lifetimes, values=tuple(values))
