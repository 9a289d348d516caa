"""The named errors of the testbed: each says what was given, what was expected and what to do."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable


class TestbedError(Exception):
    """Base of every error that the testbed raises on purpose."""

    __test__ = False  # keeps pytest from collecting the class by its name


class UsageError(TestbedError, ValueError):
    """A value that the user gave cannot be used; the command line exits with status 2."""


class NotDeclared(UsageError):
    """A backend is asked for an operation or a channel that it did not declare."""


class UnknownName(UsageError):
    """A name that no registry knows; the message lists the known ones and the closest."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        told = f"no {what} {name!r}; known: {', '.join(names) or 'none'}"
        super().__init__(told + closest(name, names))


def closest(name: str, known: Iterable[str]) -> str:
    """The words `; did you mean X?` for the known name closest to an unknown one; "" for none.

    Example:
        >>> closest("node", ["nodes", "rate"]), closest("x", ["nodes", "rate"])
        ("; did you mean 'nodes'?", '')
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class Unavailable(TestbedError):
    """A part that exists but cannot run here; says why and what to install."""

    def __init__(self, what: str, name: str, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{what} {name!r} is unavailable: {reason} - {remedy}")


class RankLost(TestbedError):
    """Another rank raised, died or stopped answering while this one needed it."""

    def __init__(self, lost: str, why: str, waiting: str = "") -> None:
        self.lost = lost
        self.why = why
        super().__init__(f"{lost} is lost: {why}" + (f"; {waiting}" if waiting else ""))


class DeadlineExceeded(TestbedError, TimeoutError):
    """An operation did not finish within its deadline although no rank is known to be lost."""


class Disagreement(TestbedError):
    """Ranks that must agree (tensors, plans, settings) do not; raised before any training."""


class NonFiniteGradient(TestbedError, ArithmeticError):
    """A gradient holds NaN or infinity; names tensor, step and rank."""


class RunFailed(TestbedError):
    """A run ended without a result; the command line exits with status 1."""


def tell(words: str) -> None:
    """On standard error, if anybody reads it: what else there is to do is done all the same."""
    if sys.stderr is None:  # closed before Python started
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed since
        sys.stderr.write(words)
        sys.stderr.flush()
