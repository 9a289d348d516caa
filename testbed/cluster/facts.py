"""What processes inside a cluster can read of it: a file whose path is in their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json

VARIABLE: Final = "TESTBED_CLUSTER"
RELAY_STATE: Final = "relay.json"  # beside the facts


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that is up.

    Attributes:
        spec: what was asked for, as `parse_cluster` reads it.
        dilation: how many times slower than the emulated cluster everything happens.
        places: processes that the nodes take together.
        hostfile: Open MPI's.
        latency_s: real seconds that the testbed itself waits before each exchange, where that was
            asked for by name (`latency_by=injected`); 0 = none.
        jitter_s: largest deviation from them.
        record: for the results: rates asked and set, how latency is made, the host's kernel; where
            a relay makes it, `relay`: what it did until now (`relay.RelayState`).
        failure: which change of links could not be made, and why; empty while all were made.
    """

    spec: str
    dilation: float
    places: int
    hostfile: str
    latency_s: float = 0.0
    jitter_s: float = 0.0
    record: dict[str, Any] = {}
    failure: str = ""


def find_facts(environment: Mapping[str, str] = os.environ) -> Facts | None:
    """The cluster that this process is in; None outside."""
    path = environment.get(VARIABLE)
    if path is None:
        return None
    try:
        facts = msgspec.json.decode(Path(path).read_bytes(), type=Facts)
        if facts.record.get("latency") == "relay":
            state = msgspec.json.decode(Path(path).with_name(RELAY_STATE).read_bytes())
            facts = msgspec.structs.replace(facts, record={**facts.record, "relay": state})
        return facts
    except OSError as error:
        raise UsageError(
            f"{VARIABLE} is {path!r}, which cannot be read ({error.strerror}): the cluster is "
            f"gone; unset {VARIABLE}"
        ) from error


def write_facts(path: Path, facts: Facts) -> None:
    """Replace the file at once, so that a reader finds the old facts or the new ones."""
    draft = path.with_suffix(".new")
    draft.write_bytes(to_json(facts))
    draft.replace(path)
