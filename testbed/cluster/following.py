"""Carries out, at their times, the changes of links that a cluster's description asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec

from testbed.cluster import system
from testbed.cluster.changes import Change
from testbed.cluster.emulate import Cluster
from testbed.cluster.facts import Facts, write_facts


@contextlib.contextmanager
def changing(cluster: Cluster) -> Iterator[None]:
    """Carries out the changes of the specification while the block runs, and notes each as done."""
    ended = threading.Event()
    spec = cluster.topology.spec

    def follow() -> None:
        passed_s = 0.0
        for change in spec.changes:
            if ended.wait((change.at_s - passed_s) * spec.dilation):
                return
            passed_s = change.at_s
            cluster.apply(change)
            _note(cluster, change)

    thread = threading.Thread(target=follow, name="links", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(system.COMMAND_S)


def _note(cluster: Cluster, change: Change) -> None:
    facts = msgspec.json.decode(cluster.facts_path.read_bytes(), type=Facts)
    done = {
        "at_s": change.at_s,
        "node": change.node,
        "direction": change.direction,
        "rate": change.rate,
        "kernel_bps": change.rate_bps / facts.dilation,
    }
    record = {**facts.record, "changes": [*facts.record["changes"], done]}
    write_facts(cluster.facts_path, msgspec.structs.replace(facts, record=record))
