"""A worker that is slowed on purpose, to see which method waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.units import parse_seconds


@dataclass(frozen=True)
class Slowdown:
    """Rank `rank` is held up for `delay_s` in every `every`-th step."""

    rank: int
    delay_s: float
    every: int = 1

    def delay(self, rank: int, step: int) -> float:
        """Seconds that this rank is held up in this step."""
        return self.delay_s if rank == self.rank and step % self.every == 0 else 0.0


def parse_slowdowns(text: str, num_workers: int | None = None) -> tuple[Slowdown, ...]:
    """Slowdowns from `rank=1,delay=50ms[,every=8]`, several of them separated by semicolons.

    Args:
        text: of `--slow`.
        num_workers: how many there are; None = not known yet.

    Raises:
        UsageError: a key is unknown or missing, or there is no such rank.

    Example:
        >>> parse_slowdowns("rank=1,delay=50ms,every=2;rank=0,delay=25ms")[1]
        Slowdown(rank=0, delay_s=0.025, every=1)
    """
    slowdowns = tuple(_parse_one(piece) for piece in text.split(";"))
    for slowdown in slowdowns:
        if num_workers is not None and slowdown.rank >= num_workers:
            raise UsageError(
                f"--slow names rank {slowdown.rank}, and there are {num_workers} workers; expected "
                f"0 .. {num_workers - 1}"
            )
    return slowdowns


def _parse_one(text: str) -> Slowdown:
    pairs = dict(piece.strip().partition("=")[::2] for piece in text.split(","))
    unknown = set(pairs) - {"rank", "delay", "every"}
    digits = all(pairs.get(key, "1").isdigit() for key in ("rank", "every"))
    if unknown or not {"rank", "delay"} <= set(pairs) or not digits or pairs.get("every") == "0":
        raise UsageError(f"--slow is {text!r}; expected rank=R,delay=TIME[,every=STEPS][;...]")
    return Slowdown(int(pairs["rank"]), parse_seconds(pairs["delay"]), int(pairs.get("every", "1")))
