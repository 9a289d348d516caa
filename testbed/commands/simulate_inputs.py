"""What `testbed simulate` is asked for, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import UsageError

if TYPE_CHECKING:
    from testbed.prediction.algorithms import Algorithm
    from testbed.prediction.codec import CodecCost
    from testbed.prediction.extrapolate import HeldOut, Node
    from testbed.prediction.link import Link
    from testbed.prediction.trace import Trace


def parse_workers(text: str) -> tuple[int, ...]:
    """Numbers of workers: `2:2048` = powers of two times 2, or a list.

    Raises:
        UsageError: it is neither, or a number is below 1.

    Example:
        >>> parse_workers("2:16"), parse_workers("4,16")
        ((2, 4, 8, 16), (4, 16))
    """
    first, colon, last = text.partition(":")
    try:
        counts = (
            _doubled(int(first), int(last)) if colon else tuple(int(c) for c in text.split(","))
        )
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(
            f"--workers is {text!r}; expected different numbers from 1 on, as 2:2048 (doubled each "
            "time) or 4,16,64"
        )
    return counts


def _doubled(first: int, last: int) -> tuple[int, ...]:
    counts = []
    while 1 <= first <= last:
        counts.append(first)
        first *= 2
    return tuple(counts)


@dataclass(frozen=True)
class Wanted:
    """The inputs, read and checked.

    Attributes:
        trace: as recorded.
        slowest: of the slowest worker, which all wait for.
        specs: schedulers.
        algorithm_text: as given or taken from the link's backend.
        algorithm: that the links are extrapolated by.
        node: where several ranks share a machine.
        links: one for each number of workers, with the slowest interface's bandwidth.
        extrapolated: whether the numbers of workers were asked for.
        held_out: predictions of links that were measured too.
        break_even: whether to look for it.
        factors: whether to tell them.
        overlap_slowdown: see `testbed.prediction.factors.factors`.
        codecs: what each compressor costs, for each number of workers of the links.
        codecs_note: what these costs are, for the reader of the table.
    """

    trace: Trace
    slowest: Trace
    specs: tuple[str, ...]
    algorithm_text: str
    algorithm: Algorithm
    links: tuple[Link, ...]
    extrapolated: bool
    held_out: tuple[HeldOut, ...]
    break_even: bool
    factors: bool
    overlap_slowdown: float
    node: Node | None = None
    codecs: tuple[CodecCost, ...] = ()
    codecs_note: str = ""

    @classmethod
    def of(
        cls,
        trace: str | Path,
        link: Path,
        specs: tuple[str, ...],
        workers: tuple[int, ...] | None,
        algorithm: str | None,
        *,
        node_link: Path | None,
        check_links: Sequence[Path],
        slowest_worker: float,
        slowest_link: float,
        break_even: bool,
        factors: bool,
        overlap_slowdown: float,
    ) -> Wanted:
        """Read the files and derive the links.

        Raises:
            UsageError: a file, name or number cannot be used.
        """
        from testbed.prediction.algorithms import algorithm_of, parse_algorithm
        from testbed.prediction.extrapolate import (
            Node,
            at_bandwidth,
            extrapolate,
            hold_out,
            slowed,
        )
        from testbed.prediction.files import load_link
        from testbed.prediction.shipped import find_trace

        if not 0 <= overlap_slowdown < float("inf"):
            raise UsageError(
                f"--overlap-slowdown is {overlap_slowdown:g}; expected a finite number, 0 or more"
            )
        recorded, measured = find_trace(trace), load_link(link)
        text = algorithm or algorithm_of(measured.backend)
        parsed = parse_algorithm(text)
        node = None if node_link is None else Node(load_link(node_link))
        others = [load_link(path) for path in check_links]
        links = (
            [measured]
            if workers is None
            else [extrapolate(measured, parsed, count, node) for count in workers]
        )
        return cls(
            trace=recorded,
            slowest=slowed(recorded, slowest_worker),
            specs=specs,
            algorithm_text=text if node is None else f"{text}, nodes of {node.num_ranks} ranks",
            algorithm=parsed,
            links=tuple(at_bandwidth(each, slowest_link, node) for each in links),
            extrapolated=workers is not None,
            held_out=tuple(hold_out(measured, parsed, others, node)),
            break_even=break_even,
            factors=factors,
            overlap_slowdown=overlap_slowdown,
            node=node,
        )
