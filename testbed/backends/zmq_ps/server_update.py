"""Parameters that live on a server: installed once, then updated by the workers' gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from testbed.backends.zmq_ps.server_exchange import RankOrderSum
from testbed.backends.zmq_ps.wire import Header, Mismatch, Operation, Packet, answer, check_same
from testbed.base.errors import UsageError

# The optimizers that a server can run over its slices, as the note of an INSTALL names them.


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the note of an INSTALL says, in JSON; the rate comes with every APPLY.

    Attributes:
        optimizer: an elementwise rule, so that slices may be updated apart from each other.
        momentum: for sgd.
        weight_decay: added to the gradient (sgd, adam) or to the parameters (adamw).
        nesterov: for sgd with momentum.
        betas: for adam and adamw.
        eps: for adam and adamw.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


def parse_optimizer(note: str | bytes) -> OptimizerSettings:
    """The settings of an INSTALL's note; an empty note is plain SGD.

    Raises:
        UsageError: the note is no JSON, or names an optimizer or a setting that is not known.

    Example:
        >>> parse_optimizer('{"optimizer": "sgd", "momentum": 0.9}').momentum
        0.9
    """
    try:
        settings = msgspec.json.decode(note or b"{}", type=OptimizerSettings)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"optimizer note is {note!r}: {error}; expected JSON with optimizer (sgd, adam or "
            "adamw), momentum, weight_decay, nesterov, betas, eps"
        ) from error
    build(settings, torch.zeros(1))  # torch's own checks, before anything travels
    return settings


def build(settings: OptimizerSettings, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Torch's optimizer over one slice of parameters.

    Raises:
        UsageError: torch refuses the settings.
    """
    try:
        if settings.optimizer == "sgd":
            return torch.optim.SGD(
                [parameter],
                lr=0.0,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                nesterov=settings.nesterov,
            )
        kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        return kind(
            [parameter],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
    except ValueError as error:
        raise UsageError(f"optimizer {settings} cannot be made: {error}") from error


def step(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    learning_rate: float,
) -> None:
    """One update of a slice, in place."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    parameter.grad = gradient
    optimizer.step()
    parameter.grad = None


INSTALLED_SLICE = ("key", "dtype", "total_elements", "num_elements")


class ParameterSlice:
    """One slice of one tensor with its optimizer, and who pushed how often.

    `clock` c of a worker is the number of gradients that it has pushed. With staleness s a worker
    that pushed its c-th gradient goes on as soon as all workers have pushed at least c - s:

        c - min_w c_w <= s     at every release

    Reference:
        Ho et al., 2013, NeurIPS (stale synchronous parallel). Departs: a gradient is applied when
        it arrives, scaled by 1/n, instead of being buffered as an additive update.
    """

    def __init__(
        self, header: Header, value: torch.Tensor, num_workers: int, staleness: int | None
    ) -> None:
        try:
            settings = parse_optimizer(header.note)
        except UsageError as error:
            raise Mismatch(str(error)) from error
        self.installed = header
        self._value = value.clone()
        self._optimizer = build(settings, self._value)
        self._num_workers = num_workers
        self._staleness = staleness
        self._version = 0
        self._clocks = [0] * num_workers
        self._gone: set[int] = set()
        self._sum = RankOrderSum(num_workers)
        self._waiting: list[Header] = []

    @property
    def num_waiting(self) -> int:
        """Workers that pushed and were not answered."""
        return len(self._waiting)

    def push(self, header: Header, gradient: torch.Tensor) -> list[Packet]:
        """A worker's gradient, which is consumed; workers that may go on get the parameters.

        Raises:
            Mismatch: another tensor than was installed, or rates that differ between the workers.
        """
        check_same(self.installed, header, INSTALLED_SLICE)
        if any(waiting.worker == header.worker for waiting in self._waiting):
            raise Mismatch(f"rank {header.worker} applied {header.key!r} twice at once")
        if self._staleness == 0:
            return self._push_together(header, gradient)
        self._update(gradient, header.learning_rate)
        self._clocks[header.worker] += 1
        self._waiting.append(header)
        return self._release()

    def depart(self, worker: int) -> list[Packet]:
        """The worker left in good order: no other worker waits for it any more."""
        self._gone.add(worker)
        return self._release() if self._staleness != 0 else []

    def _push_together(self, header: Header, gradient: torch.Tensor) -> list[Packet]:
        if self._waiting:
            check_same(self._waiting[0], header, ("step", "learning_rate"))
        self._waiting.append(header)
        if not self._sum.add(header.worker, gradient):
            return []
        total, self._sum = self._sum.total, RankOrderSum(self._num_workers)
        assert total is not None
        self._update(total, header.learning_rate)
        answers = self._answers(self._waiting, [0] * self._num_workers)
        self._waiting = []
        return answers

    def _update(self, gradient: torch.Tensor, learning_rate: float) -> None:
        step(self._optimizer, self._value, gradient.div_(self._num_workers), learning_rate)
        self._version += 1

    def _release(self) -> list[Packet]:
        present = [c for worker, c in enumerate(self._clocks) if worker not in self._gone]
        slowest = min(present, default=0)
        behind = [self._clocks[header.worker] - slowest for header in self._waiting]
        limit = self._staleness
        free = [limit is None or lag <= limit for lag in behind]
        released = [h for h, go in zip(self._waiting, free, strict=True) if go]
        lags = [lag for lag, go in zip(behind, free, strict=True) if go]
        self._waiting = [h for h, go in zip(self._waiting, free, strict=True) if not go]
        return self._answers(released, lags)

    def _answers(self, headers: list[Header], lags: list[int]) -> list[Packet]:
        if not headers:
            return []
        # The next update may come while this answer is still being sent, so it gets a copy.
        snapshot = self._value.clone()
        answers = []
        for header, lag in zip(headers, lags, strict=True):
            message = answer(header, header.worker, snapshot)
            told = replace(message.header, version=self._version, staleness=lag)
            answers.append(Packet(told, snapshot))
        return answers


@dataclass
class _Installing:
    first: Header
    source: Packet | None = None
    asked: dict[int, Header] = field(default_factory=dict)


class Parameters:
    """INSTALL and APPLY of one server."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self._num_workers = num_workers
        self._staleness = staleness
        self._slices: dict[tuple[str, int], ParameterSlice] = {}
        self._installing: dict[tuple[Operation, int, int, int], _Installing] = {}

    @property
    def num_open(self) -> int:
        """Slices that wait for a worker, and workers that wait for a slice."""
        return len(self._installing) + sum(s.num_waiting for s in self._slices.values())

    def install(self, message: Packet) -> list[Packet]:
        """Rank 0's parameters, or another worker's request for them; answered when all have come.

        Raises:
            Mismatch: the workers disagree about the tensor, or the optimizer is not known.
        """
        header = message.header
        name = (*header.exchange, header.offset)
        entry = self._installing.setdefault(name, _Installing(header))
        check_same(entry.first, header)
        entry.asked[header.worker] = header
        if header.worker == 0:
            entry.source = message
        if len(entry.asked) < self._num_workers:
            return []
        assert entry.source is not None
        assert entry.source.payload is not None
        del self._installing[name]
        value = entry.source.payload
        self._slices[(header.key, header.offset)] = ParameterSlice(
            entry.source.header, value, self._num_workers, self._staleness
        )
        return [answer(ask, w, value if w else None) for w, ask in sorted(entry.asked.items())]

    def apply(self, message: Packet) -> list[Packet]:
        """A worker's gradient of an installed slice.

        Raises:
            Mismatch: the slice was not installed, or the workers disagree about it.
        """
        header = message.header
        held = self._slices.get((header.key, header.offset))
        if held is None:
            raise Mismatch(f"apply of {header.key!r}, which was not installed; install it first")
        assert message.payload is not None
        return held.push(header, message.payload)

    def depart(self, worker: int) -> list[Packet]:
        """The worker left in good order."""
        return [m for held in self._slices.values() for m in held.depart(worker)]
