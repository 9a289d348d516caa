"""Links that change while the cluster runs: `TIME:NODE:RATE`, joined by `+`; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from testbed.base.errors import UsageError
from testbed.base.units import parse_rate, parse_seconds

DOWN = "down"


@dataclass(frozen=True)
class Change:
    """One change of one node's link.

    Attributes:
        at_s: seconds since the command in the cluster was started, as emulated.
        node: whose link; None = all nodes'.
        direction: `up`, `down`, or None for both.
        rate: the new rate, as `1gbit`; `down` cuts the node off.
    """

    at_s: float
    node: int | None
    direction: Literal["up", "down"] | None
    rate: str

    @property
    def cuts(self) -> bool:
        """Whether the node is cut off."""
        return self.rate == DOWN

    @property
    def rate_bps(self) -> float:
        """Bits per second, as emulated; 0 where the node is cut off."""
        return 0.0 if self.cuts else parse_rate(self.rate)


def parse_changes(text: str) -> tuple[Change, ...]:
    """Changes in the order of their times.

    Raises:
        UsageError: a piece is no change; says how one is written.

    Example:
        >>> [(c.at_s, c.node, c.rate_bps) for c in parse_changes("10s:2:1gbit+5:all:100mbit")]
        [(5.0, None, 100000000.0), (10.0, 2, 1000000000.0)]
        >>> parse_changes("10s:up.2:1gbit")[0].direction
        'up'
    """
    pieces = [piece for piece in text.split("+") if piece]
    return tuple(sorted((_parse(piece) for piece in pieces), key=lambda c: c.at_s))


def _parse(piece: str) -> Change:
    words = piece.split(":")
    if len(words) != 3:
        raise _no_change(piece)
    time, where, rate = words
    way, dot, number = where.rpartition(".")
    if way not in ("", "up", "down") or bool(dot) != bool(way):
        raise _no_change(piece)
    if number != "all" and not number.isdigit():
        raise _no_change(piece)
    change = Change(
        parse_seconds(time),
        None if number == "all" else int(number),
        "up" if way == "up" else "down" if way == "down" else None,
        rate,
    )
    if not change.cuts and not change.rate_bps > 0:
        raise _no_change(piece)
    return change


def _no_change(piece: str) -> UsageError:
    return UsageError(
        f"cluster: change is {piece!r}; expected TIME:NODE:RATE, as 10s:2:1gbit, 10s:up.2:1gbit, "
        "10s:all:1gbit or 10s:2:down, several joined by +"
    )
