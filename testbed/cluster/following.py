"""Carries out, at their times, the changes of links that a cluster's description asks for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from testbed.cluster import system
from testbed.cluster.changes import Change
from testbed.cluster.emulate import Cluster
from testbed.cluster.facts import Facts, write_facts
from testbed.errors import RunFailed


@contextlib.contextmanager
def changing(cluster: Cluster) -> Iterator[Callable[[], RunFailed | None]]:
    """Carries out the changes of the specification while the block runs, and notes each as done.

    Yields what tells which change could not be made, if one could not: no other is tried then, and
    what is measured from there on was not measured on the cluster that was asked for.
    """
    ended = threading.Event()
    spec = cluster.topology.spec
    failures: list[RunFailed] = []

    def follow() -> None:
        passed_s = 0.0
        for change in spec.changes:
            if ended.wait((change.at_s - passed_s) * spec.dilation):
                return
            passed_s = change.at_s
            try:
                cluster.apply(change)
                _note(cluster, change)
            except Exception as error:  # whatever it is, the run has to hear of it
                told = f"cluster: the change of links at {change.at_s:g} s was not made: {error}"
                failures.append(RunFailed(told))
                _tell(cluster, told)
                return

    thread = threading.Thread(target=follow, name="links", daemon=True)
    thread.start()
    try:
        yield lambda: failures[0] if failures else None
    finally:
        ended.set()
        thread.join(system.COMMAND_S)


def _tell(cluster: Cluster, failure: str) -> None:
    """Those who are about to write their results hear of it, too."""
    facts = msgspec.json.decode(cluster.facts_path.read_bytes(), type=Facts)
    write_facts(cluster.facts_path, msgspec.structs.replace(facts, failure=failure))


def _note(cluster: Cluster, change: Change) -> None:
    facts = msgspec.json.decode(cluster.facts_path.read_bytes(), type=Facts)
    done = {
        "at_s": change.at_s,
        "done_unix_s": time.time(),
        "node": change.node,
        "direction": change.direction,
        "rate": change.rate,
        "kernel_bps": change.rate_bps / facts.dilation,
    }
    record = {**facts.record, "changes": [*facts.record["changes"], done]}
    write_facts(cluster.facts_path, msgspec.structs.replace(facts, record=record))
