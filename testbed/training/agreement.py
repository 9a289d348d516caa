"""What ranks must agree on before the first step: a difference is an error, not a hang."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.control.protocol import Control
from testbed.errors import Disagreement

AGREE_S = 120.0


def agree_on(what: str, lines: Sequence[str], control: Control, num_workers: int) -> None:
    """Compare a list of words with all other workers.

    Raises:
        Disagreement: on every rank, naming the first that differs from rank 0 and where.
    """
    everybody = control.all_gather(
        f"agree on {what}", "\n".join(lines).encode(), AGREE_S, members=num_workers
    )
    expected = everybody[0].decode().split("\n")
    for rank, answer in enumerate(everybody):
        given = answer.decode().split("\n")
        if given != expected:
            raise Disagreement(_difference(what, rank, given, expected))


def _difference(what: str, rank: int, given: list[str], expected: list[str]) -> str:
    for position, (ours, theirs) in enumerate(zip(given, expected, strict=False)):
        if ours != theirs:
            return (
                f"{what} differ: number {position} is {ours!r} on rank {rank} and {theirs!r} on "
                "rank 0; all ranks must build the same model in the same order"
            )
    return (
        f"{what} differ: rank {rank} has {len(given)} and rank 0 has {len(expected)}; "
        "all ranks must build the same model"
    )
