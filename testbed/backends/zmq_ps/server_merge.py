"""A server's half of MERGE: payloads of all workers become one payload for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from testbed.backends.zmq_ps.wire import ExchangeName, Flag, Header, Mismatch, Packet, check_same
from testbed.base.errors import TestbedError
from testbed.compression.protocol import Context, State
from testbed.compression.server_merge import Merging, Pulled, build, merge


@dataclass
class _Pushed:
    """One worker's payload as its slices come in."""

    total_elements: int
    note: bytes = b""
    slices: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return sum(piece.numel() for piece in self.slices.values()) == self.total_elements

    def payload(self) -> torch.Tensor:
        return torch.cat([piece for _, piece in sorted(self.slices.items())])


@dataclass
class _Merging:
    first: Header
    pushed: dict[int, _Pushed] = field(default_factory=dict)


class Merges:
    """MERGE of one server.

    Args:
        num_workers: workers 0 .. num_workers - 1.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._open: dict[ExchangeName, _Merging] = {}
        self._states: dict[str, State] = {}

    @property
    def num_open(self) -> int:
        """Exchanges that wait for a worker."""
        return len(self._open)

    @property
    def state_bytes(self) -> int:
        """Bytes of the residuals, which live as long as the server."""
        kept = [tensor for state in self._states.values() for tensor in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def residual(self, key: str) -> torch.Tensor | None:
        """What was not sent to a key's workers yet [n]; None where it goes back without loss."""
        return self._states.get(key, {}).get("residual")

    def push(self, message: Packet) -> list[Packet]:
        """A slice of a worker's payload; once all payloads are whole, the answer to all.

        Raises:
            Mismatch: the workers disagree about key, step or merger, a slice came twice, or the
                payloads cannot be merged.
        """
        header = message.header
        assert message.payload is not None
        entry = self._open.setdefault(header.exchange, _Merging(header))
        check_same(entry.first, header, ("key", "step", "dtype"))
        pushed = entry.pushed.setdefault(header.worker, _Pushed(header.total_elements))
        if header.offset in pushed.slices or pushed.total_elements != header.total_elements:
            raise Mismatch(f"rank {header.worker} pushed one payload of {header.key!r} twice")
        pushed.slices[header.offset] = message.payload
        pushed.note = pushed.note or header.note
        complete = [worker for worker, one in entry.pushed.items() if one.complete]
        if len(complete) < self._num_workers:
            return []
        del self._open[header.exchange]
        return self._answers(header, self._merged(entry))

    def _merged(self, entry: _Merging) -> Pulled:
        header = entry.first
        in_order = [entry.pushed[worker] for worker in range(self._num_workers)]
        for worker, one in enumerate(in_order):
            if one.note != in_order[0].note:
                raise Mismatch(
                    f"MERGE of {header.key!r} in step {header.step}: rank 0 names the merger "
                    f"{in_order[0].note!r:.200} and rank {worker} {one.note!r:.200}; all ranks "
                    "must use one compressor with the same options"
                )
        try:
            merging = build(in_order[0].note)
            return self._merge(merging, tuple(one.payload() for one in in_order), header)
        except (TestbedError, RuntimeError, ValueError, IndexError) as error:
            # Payloads that do not fit their merger: all workers get the error.
            raise Mismatch(
                f"MERGE of {header.key!r} in step {header.step} failed on its server: {error}"
            ) from error

    def _merge(
        self, merging: Merging, payloads: tuple[torch.Tensor, ...], header: Header
    ) -> Pulled:
        like = merging.like()
        before = {} if merging.again is None else self._before(header.key, like)
        # None of the workers has this rank, so that the server's draws are none of theirs.
        context = Context(
            rank=self._num_workers,
            num_workers=self._num_workers,
            step=header.step,
            seed=merging.seed,
            key=header.key,
        )
        pulled, after = merge(merging.merger, payloads, like, before, context, merging.again)
        if merging.again is not None:
            self._states[header.key] = after
        return pulled

    def _before(self, key: str, like: torch.Tensor) -> State:
        """The residual of a key; zeros for a message of another size, as after a new plan."""
        state = self._states.get(key, {})
        kept = state.get("residual")
        return state if kept is not None and kept.shape == like.shape else {}

    def _answers(self, header: Header, pulled: Pulled) -> list[Packet]:
        size = pulled.payload.numel()
        flags = Flag.PAYLOAD if pulled.lossless else Flag.PAYLOAD | Flag.REPACKED
        told = replace(
            header, flags=flags, offset=0, num_elements=size, total_elements=size, note=b""
        )
        return [
            Packet(replace(told, worker=worker), pulled.payload)
            for worker in range(self._num_workers)
        ]
