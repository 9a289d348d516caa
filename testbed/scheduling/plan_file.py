"""Plans as JSON files, checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from testbed.errors import UsageError
from testbed.prediction.ticks import is_period
from testbed.prediction.trace import ELEMENT_BYTES
from testbed.scheduling.plan import PLAN_SCHEMA, Plan, to_builtins


def encode_plan(plan: Plan) -> bytes:
    """The plan as indented JSON."""
    raw: dict[str, Any] = {"schema": PLAN_SCHEMA, **to_builtins(plan)}
    return msgspec.json.format(msgspec.json.encode(raw), indent=1) + b"\n"


def decode_plan(data: bytes, where: str = "plan") -> Plan:
    """A plan from JSON; the inverse of `encode_plan`.

    Raises:
        UsageError: no JSON, a wrong key, or a plan that cannot be executed; names the place.
    """
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where} is no JSON ({error}); expected a {PLAN_SCHEMA} file") from error
    schema = raw.pop("schema", None) if isinstance(raw, dict) else type(raw).__name__
    if schema != PLAN_SCHEMA:
        raise UsageError(f"{where}: key 'schema' is {schema!r}; expected {PLAN_SCHEMA!r}")
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error} ($ is the whole file)") from error
    problem = plan_problem(plan)
    if problem:
        raise UsageError(f"{where}: {problem}")
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a `testbed.plan/1` file."""
    Path(path).write_bytes(encode_plan(plan))


def load_plan(path: str | Path) -> Plan:
    """A plan from a `testbed.plan/1` file.

    Raises:
        UsageError: no such file, or see `decode_plan`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); give an existing file"
        ) from None
    return decode_plan(data, str(path))


def plan_problem(plan: Plan) -> str | None:
    """Why a plan cannot be executed, None if it can: every element in exactly one part."""
    count = len(plan.names)
    if not count == len(plan.num_elements) == len(plan.dtypes):
        return "keys 'names', 'num_elements' and 'dtypes' differ in length; expected one per tensor"
    if unknown := set(plan.dtypes) - set(ELEMENT_BYTES):
        return f"dtypes {sorted(unknown)} are unknown; expected some of {', '.join(ELEMENT_BYTES)}"
    if plan.num_channels < 1:
        return f"key 'num_channels' is {plan.num_channels}; expected 1 or more"
    if plan.credit_bytes is not None and plan.credit_bytes < 1:
        return f"key 'credit_bytes' is {plan.credit_bytes}; expected 1 or more, or null for none"
    if plan.tick_s is not None and not is_period(plan.tick_s):
        return f"key 'tick_s' is {plan.tick_s:g}; expected 0, or 1e-6 or more, or null for none"
    slices: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for index, message in enumerate(plan.messages):
        if not 0 <= message.channel < plan.num_channels:
            return (
                f"message {index} is on channel {message.channel}; "
                f"expected 0 .. {plan.num_channels - 1}"
            )
        if message.ratio is not None and not 0 < message.ratio <= 1:
            return f"message {index} has ratio {message.ratio:g}; expected 0 < ratio <= 1"
        for part in message.parts:
            if not 0 <= part.tensor < count:
                return f"message {index} has tensor {part.tensor}; expected 0 .. {count - 1}"
            slices[part.tensor].append((part.start, part.stop))
        if len({plan.dtypes[part.tensor] for part in message.parts}) > 1:
            return f"message {index} mixes dtypes; expected one dtype per message"
    for tensor, found in enumerate(slices):
        if problem := _cover_problem(sorted(found), plan.num_elements[tensor]):
            return f"tensor {tensor} ({plan.names[tensor]!r}): {problem}"
    return None


def _cover_problem(slices: list[tuple[int, int]], num_elements: int) -> str | None:
    at = 0
    for start, stop in slices:
        if start != at or stop < start:
            return f"slice {start}:{stop} follows element {at}; expected a slice that starts there"
        at = stop
    if at != num_elements or not slices:
        return (
            f"slices end at {at if slices else 'none'}; expected to cover {num_elements} elements"
        )
    return None
