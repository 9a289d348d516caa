"""What a rank does for the tests: opens backends in its group and runs cases on them."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from testbed.backends.protocol import Backend, Group, Order
from testbed.base.errors import NotDeclared
from testbed.launch.join import Role, open_backend

CLOSE_S = 10.0


@dataclass(frozen=True)
class Setup:
    """How a backend is opened; the prefix tells several backends of one job apart."""

    order: Order = "fifo"
    num_channels: int = 1
    credit_bytes: int | None = None
    prefix: str = ""

    @property
    def name(self) -> str:
        credit = "" if self.credit_bytes is None else f"-{self.credit_bytes}"
        return f"{self.prefix}{self.order}-{self.num_channels}{credit}"


@dataclass(frozen=True)
class Case:
    """A function `module:function`, to be called as `function(backend, group, *args)`."""

    setup: Setup
    function: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Leave:
    """Close all backends, leave the job and end."""


@dataclass(frozen=True)
class Answer:
    """What a case returned on one rank, or the text of what it raised.

    Attributes:
        rank: which.
        result: what the case returned.
        error: the trace back of what it raised; empty = nothing.
        not_declared: the message, if it asked the backend for what that does not declare.
    """

    rank: int
    result: Any = None
    error: str = ""
    not_declared: str = ""


class Agent:
    """One rank's backends and the cases that run on them.

    Args:
        role: which backend.
        group: this rank's end of the job.
    """

    def __init__(self, role: Role, group: Group) -> None:
        self._role = role
        self._group = group
        self._opened: dict[Setup, tuple[Backend, Group]] = {}

    def perform(self, command: Case | Leave) -> Answer:
        """Do what was asked; whatever is raised becomes the answer."""
        try:
            if isinstance(command, Leave):
                self._leave()
                return Answer(self._group.rank)
            module, _, name = command.function.partition(":")
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            backend, group = self._open(command.setup)
            return Answer(self._group.rank, function(backend, group, *command.args))
        except BaseException as error:
            not_declared = str(error) if isinstance(error, NotDeclared) else ""
            return Answer(self._group.rank, None, traceback.format_exc(), not_declared)

    def _open(self, setup: Setup) -> tuple[Backend, Group]:
        if setup not in self._opened:
            group = replace(
                self._group,
                name=setup.name,
                order=setup.order,
                num_channels=setup.num_channels,
                credit_bytes=setup.credit_bytes,
            )
            self._opened[setup] = (open_backend(self._role, group), group)
        return self._opened[setup]

    def close_backends(self) -> None:
        """Close whatever was opened; collective."""
        for backend, _ in self._opened.values():
            backend.close(CLOSE_S)
        self._opened.clear()

    def _leave(self) -> None:
        self.close_backends()
        self._group.control.close()
