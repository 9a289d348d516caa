"""What this process holds that could outlive a test: threads, children, descriptors."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from testbed.forking import SERVER
from tests.harness.family import descendants
from tests.harness.rank_pool import RankPool


@dataclass(frozen=True)
class Owned:
    """What belongs to ranks that live on between tests; whatever a child of theirs starts, too."""

    threads: frozenset[int] = frozenset()
    pids: frozenset[int] = frozenset()
    descriptors: frozenset[int] = frozenset()

    @classmethod
    def by(cls, pools: Iterable[RankPool]) -> Owned:
        """Everything of these pools."""
        ranks = [pool.ranks for pool in pools]
        return cls(
            frozenset(t.ident for r in ranks for t in r.threads() if t.ident is not None),
            frozenset(pid for r in ranks for pid in r.children()),
            frozenset(d for r in ranks for d in r.descriptors()),
        )


@dataclass(frozen=True)
class Held:
    """What a process holds, each with a word that names it."""

    threads: dict[int, str]
    children: dict[int, str]
    descriptors: dict[int, str]

    def new_to(self, before: Held) -> list[str]:
        """What came since."""
        found = [f"thread {name}" for i, name in self.threads.items() if i not in before.threads]
        found += [
            f"process {line}" for i, line in self.children.items() if i not in before.children
        ]
        found += [
            f"descriptor {number} -> {target}"
            for number, target in self.descriptors.items()
            if before.descriptors.get(number) != target
        ]
        return found


def held(owned: Owned) -> Held:
    """What this process holds now, without what is owned."""
    threads = {
        t.ident: t.name
        for t in threading.enumerate()
        if t.ident is not None and t.ident not in owned.threads
    }
    return Held(threads, _children(owned.pids), _descriptors(owned.descriptors))


def wait_for_no_leaks(
    live: Callable[[], Iterable[RankPool]], before: Held, within_s: float
) -> list[str]:
    """What came since `before`, belongs to no live pool and does not end by itself in time."""
    end_s = time.monotonic() + within_s
    owned = Owned.by(live())
    leaks = held(owned).new_to(before)
    while leaks and time.monotonic() < end_s:
        gc.collect()  # an object in a cycle closes what it holds only here
        _join_what_ends(before, owned, 0.2)
        owned = Owned.by(live())
        leaks = held(owned).new_to(before)
    return leaks


def _join_what_ends(before: Held, owned: Owned, limit_s: float) -> None:
    known = set(before.threads) | owned.threads
    strangers = [t for t in threading.enumerate() if t.ident not in known]
    for thread in strangers:
        thread.join(limit_s)
    strange = []
    for pid in _children(owned.pids).keys() - before.children.keys():
        with contextlib.suppress(psutil.NoSuchProcess):
            strange.append(psutil.Process(pid))
    psutil.wait_procs(strange, timeout=limit_s)


def _children(owned: frozenset[int]) -> dict[int, str]:
    # The standard library starts a process of its own that ends with this one, as the fork servers
    # do that the session shares.
    shared = ("resource_tracker", f"testbed.forking.server {os.environ[SERVER]}")
    return {
        pid: f"{pid} {line[:200]}"
        for pid, line in descendants(owned).items()
        if line and not any(word in line for word in shared)
    }


def _descriptors(owned: frozenset[int]) -> dict[int, str]:
    """Sockets, pipes and event descriptors; libraries keep devices and files of their own open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if int(name) not in owned and target.startswith(("socket:", "pipe:", "anon_inode:")):
            found[int(name)] = target
    return found
