"""The backend over process groups of torch.distributed, one per channel; Gloo's process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as untyped_dist

from testbed.backends.channels import ThreadedBackend
from testbed.backends.checks import NUMBERED, one_dtype
from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork
from testbed.base.errors import Unavailable, UsageError
from testbed.base.types import SERVERLESS_OPS, Capabilities, Op, Request, Result, Traffic
from testbed.control.protocol import OPEN_S

# torch.distributed does not export to type checkers the classes that it documents.
dist: Any = untyped_dist

# Deadlines are those of `Work.wait`, and the control plane detects lost ranks; the library's own
# timeout only has to be longer than both.
LIBRARY_TIMEOUT = timedelta(hours=1)

# But to connect all ranks with each other Gloo has no other: a port may be blocked for two of them.
CONNECT_TIMEOUT = timedelta(seconds=90)

# All-reduces of one process group that Gloo runs at once.
GLOO_THREADS = 2

# The halves of a ring all-reduce, over a process group that can only send and receive.
#
# A shard goes in pieces, so that a piece is added or sent on while the next is on its way.
#
# Gloo's own halves cost more than their names suggest: its reduce-scatter is an all-reduce of the
# whole tensor, with twice the bytes, and its `allgather` works on copies. Fold and spread of 16 MiB
# between four nodes reached 0.81 of the line rate with that all-gather and the copies that it
# needs, 0.88 with one in place (`_allgather_base`), and 0.93 with this one.

NUM_PIECES = 4
MIN_PIECE_BYTES = 32 * 1024


def ring_fold(group: Any, rank: int, size: int, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the sum over all ranks; the other shards are left as partial sums.

    In round k of n - 1 rank r sends shard r - 1 - k to r + 1 and adds what r - 1 sends to its shard
    r - 2 - k (mod n), so that every link carries (n - 1) / n of the tensor once. What it summed in
    one round is what it sends in the next: each piece leaves as soon as it is summed, and what
    arrives has memory of its own in every other round.

    Args:
        group: has `send(tensors, rank, tag)` and `recv(tensors, rank, tag)`.
        rank: r.
        size: n >= 2.
        tensor: n shards of equal size, flat; summed in place.

    Reference:
        Patarasuk and Yuan, 2009, JPDC.
    """
    shards = torch.split(tensor, tensor.numel() // size)
    before, after = (rank - 1) % size, (rank + 1) % size
    landing = [_pieces(torch.empty_like(shards[0])) for _ in range(min(2, size - 1))]

    def receive(k: int) -> list[Any]:
        pieces = landing[k % 2] if k < size - 1 else ()
        return [group.recv([p], before, k * NUM_PIECES + i) for i, p in enumerate(pieces)]

    receives = receive(0)
    sends = [group.send([p], after, i) for i, p in enumerate(_pieces(shards[rank - 1]))]
    for k in range(size - 1):
        following = receive(k + 1)
        for i, total in enumerate(_pieces(shards[(rank - 2 - k) % size])):
            receives[i].wait()
            total += landing[k % 2][i]
            if following:
                sends.append(group.send([total], after, (k + 1) * NUM_PIECES + i))
        receives = following
    for send in sends:
        send.wait()
    return shards[rank]


def ring_spread(group: Any, rank: int, size: int, tensor: torch.Tensor) -> None:
    """Each rank's own shard comes to all others.

    In round k of n - 1 rank r sends shard r - k to r + 1 and takes shard r - 1 - k from r - 1 (mod
    n): what it took in one round is what it sends in the next.

    Args:
        group: has `send(tensors, rank, tag)` and `recv(tensors, rank, tag)`.
        rank: r.
        size: n >= 2.
        tensor: n shards of equal size, flat, of which shard r counts; all are filled.

    Reference:
        Patarasuk and Yuan, 2009, JPDC.
    """
    shards = [_pieces(shard) for shard in torch.split(tensor, tensor.numel() // size)]
    before, after = (rank - 1) % size, (rank + 1) % size
    receives = [
        [
            group.recv([piece], before, k * NUM_PIECES + i)
            for i, piece in enumerate(shards[(rank - 1 - k) % size])
        ]
        for k in range(size - 1)
    ]
    sends = []
    for k in range(size - 1):
        for i, piece in enumerate(shards[(rank - k) % size]):
            if k > 0:
                receives[k - 1][i].wait()
            sends.append(group.send([piece], after, k * NUM_PIECES + i))
    for transfer in (*receives[-1], *sends):
        transfer.wait()


def _pieces(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wanted = shard.numel() * shard.element_size() // MIN_PIECE_BYTES
    return shard.chunk(max(1, min(NUM_PIECES, wanted)))


def let_go(group: Any) -> None:
    """A group that ends when nobody holds it."""


class TorchBackend(ThreadedBackend):
    """See `Backend`.

    Args:
        group: the job.
        name: `gloo` or `nccl`.
        device_type: where its tensors live.
        make: makes the process group of one channel.
        end: lets go of one, when nothing is under way.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        device_type: str,
        make: Callable[[Group, Any], Any],
        end: Callable[[Any], None] = let_go,
    ) -> None:
        self._end = end
        self._device = torch.device(group.device if device_type == "cuda" else "cpu")
        group.control.state = f"opening {name}"
        store = _open_store(group)
        self._store = store
        self._groups = [
            make(group, dist.PrefixStore(f"{group.name}/{channel}", store))
            for channel in range(group.num_channels)
        ]
        self._streams = [
            _make_stream(self._device) if device_type == "cuda" else None
            for _ in range(group.num_channels)
        ]
        self._made: dict[int, tuple[torch.cuda.Event, torch.cuda.Stream]] = {}
        for process_group in self._groups:
            self._settle(process_group.barrier(), None)
        capabilities = Capabilities(
            SERVERLESS_OPS,
            group.num_channels,
            device_types=frozenset({device_type}),
            exact_order=False,
        )
        super().__init__(group, name, capabilities, self._perform)

    def submit(self, request: Request) -> PendingWork:
        """See `Backend.submit`."""
        if any(t.is_cuda for t in request.tensors):
            # The kernels that make this tensor are only queued: the channel's stream, on another
            # thread, must come after them.
            theirs = torch.cuda.current_stream(self._device)
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record(theirs)
            self._made[id(request)] = made, theirs
        try:
            return super().submit(request)
        except UsageError:
            self._made.pop(id(request), None)
            raise

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`."""
        super().close(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            while self._groups:
                self._end(self._groups.pop())

    def _perform(self, request: Request) -> Result:
        stream = self._streams[request.channel]
        if stream is None:
            return self._exchange(request, None)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            made, theirs = self._made.pop(id(request), (None, None))
            if made is not None:
                stream.wait_event(made)
            result = self._exchange(request, stream)
            stream.synchronize()
            if theirs is not None:
                for part in result.parts:  # of this stream's memory, to be read on the caller's
                    part.record_stream(theirs)
            return result

    def _exchange(self, request: Request, stream: torch.cuda.Stream | None) -> Result:
        group, tensor = self._groups[request.channel], request.tensor
        if request.op is Op.ALL_TO_ALL:
            return self._all_to_all(group, request.parts, stream)
        if request.op is Op.BARRIER or tensor is None:
            self._settle(group.barrier(), stream)
            return Result()
        if request.op is Op.ALL_GATHER:
            return self._all_gather(group, tensor, stream)
        flat = tensor.view(-1)
        if flat.numel() and self.size > 1:
            if request.op is Op.ALL_REDUCE:
                self._settle(group.allreduce([flat]), stream)
            elif request.op is Op.BROADCAST:
                self._settle(group.broadcast(flat, request.root), stream)
            elif request.op is Op.FOLD:
                self._fold(group, flat, stream)
            else:
                self._spread(group, flat, stream)
        return Result(tensor, traffic=self._ring_traffic(request))

    def _fold(self, group: Any, flat: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        padded, own = self._sharded(flat)
        if padded is not flat:
            padded[: flat.numel()] = flat
            padded[flat.numel() :] = 0
        if stream is None:
            mine = ring_fold(group, self.rank, self.size, padded)
            if padded is not flat:
                own.copy_(mine[: own.numel()])
            return
        shards = list(torch.split(padded, padded.numel() // self.size))
        mine = torch.empty_like(shards[0])
        self._settle(group.reduce_scatter([mine], [shards]), stream)
        own.copy_(mine[: own.numel()])

    def _spread(self, group: Any, flat: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        padded, own = self._sharded(flat)
        mine = padded.view(self.size, -1)[self.rank]
        if padded is not flat:
            mine[: own.numel()] = own
            mine[own.numel() :] = 0
        if stream is None:
            ring_spread(group, self.rank, self.size, padded)
        else:
            self._settle(group._allgather_base(padded, mine.clone()), stream)
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])

    def _sharded(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the tensor in equal shards, as both halves take no others; its own shard.

        The tensor itself if it can be cut so: a copy of it takes a tenth of its transfer time.
        Otherwise new memory, not filled.
        """
        chunk = -(-flat.numel() // self.size)
        own = flat[self.rank * chunk : (self.rank + 1) * chunk]
        if chunk * self.size == flat.numel():
            return flat, own
        return flat.new_empty(chunk * self.size), own

    def _all_gather(
        self, group: Any, tensor: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> Result:
        count = torch.tensor([tensor.numel()], device=tensor.device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        self._settle(group.allgather([counts], [count]), stream)
        lengths = [int(c) for c in counts]
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        if longest:
            self._settle(group.allgather([parts], [padded]), stream)
        # The library has no all-gather of unequal sizes: what travels is padded to the longest.
        moved = longest * tensor.element_size() * (self.size - 1)
        traffic = Traffic(moved, moved, 8 * (self.size - 1), 0, 2)
        return Result(tensor, tuple(p[:n] for p, n in zip(parts, lengths, strict=True)), traffic)

    def _all_to_all(
        self, group: Any, parts: tuple[torch.Tensor, ...], stream: torch.cuda.Stream | None
    ) -> Result:
        sizes = [part.numel() * part.element_size() for part in parts]
        heads = torch.tensor([[size, NUMBERED.index(parts[0].dtype)] for size in sizes])
        heads = heads.to(parts[0].device)
        theirs = torch.empty_like(heads)
        self._settle(group.alltoall_base(theirs, heads, [], []), stream)
        arriving, codes = (column.tolist() for column in theirs.cpu().T)
        dtype = one_dtype([NUMBERED[code] for code in codes])
        # As bytes: Gloo's all-to-all has no bfloat16.
        given = torch.cat([part.view(torch.uint8) for part in parts])
        taken = torch.empty(sum(arriving), dtype=torch.uint8, device=given.device)
        self._settle(group.alltoall_base(taken, given, arriving, sizes), stream)
        traffic = Traffic(
            sum(sizes) - sizes[self.rank],
            sum(arriving) - arriving[self.rank],
            heads[0].numel() * heads.element_size() * (self.size - 1),
            num_messages=2,
        )
        # Each part has memory of its own, so that any dtype may view it.
        pieces = [piece.clone().view(dtype) for piece in torch.split(taken, arriving)]
        return Result(parts=tuple(pieces), traffic=traffic)

    def _settle(self, work: Any, stream: torch.cuda.Stream | None) -> None:
        work.wait()
        if stream is not None:
            stream.synchronize()

    def _ring_traffic(self, request: Request) -> Traffic:
        n, num_bytes = self.size, request.num_bytes
        if request.op is Op.BROADCAST:
            is_root = request.root == self.rank
            num_bytes = num_bytes if n > 1 else 0
            return Traffic(num_bytes if is_root else 0, 0 if is_root else num_bytes, 0, 0, 1)
        halves = 2 if request.op is Op.ALL_REDUCE else 1
        moved = halves * (n - 1) * num_bytes // n
        return Traffic(moved, moved, 0, 0, halves * (n - 1))


def _make_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _open_store(group: Group) -> Any:
    timeout = timedelta(seconds=60)
    if group.size == 1:
        return dist.HashStore()
    store: Any = None
    port = 0
    if group.rank == 0:
        hosted = dist.TCPStore(group.address, 0, group.size, True, timeout, wait_for_workers=False)
        store, port = hosted, hosted.port
    answers = group.control.all_gather(
        f"{group.name}.store", f"{group.address} {port}".encode(), OPEN_S, members=group.size
    )
    if store is None:
        host, port_text = answers[0].decode().split()
        store = dist.TCPStore(
            host, int(port_text), group.size, False, timeout, wait_for_workers=False
        )
    return store


def open_gloo(group: Group) -> TorchBackend:
    """`gloo`: all-reduces over TCP, for tensors in main memory.

    Raises:
        Unavailable: this torch has no Gloo.
    """
    refuse_without_gloo("gloo")
    return TorchBackend(group, "gloo", "cpu", make_gloo)


def refuse_without_gloo(backend: str) -> None:
    """Torch may have been built without Gloo, which only loading it shows."""
    if not (dist.is_available() and dist.is_gloo_available()):
        reason = "this torch was built without Gloo"
        raise Unavailable("backend", backend, reason, "install a torch wheel from PyPI")


def make_gloo(group: Group, store: Any) -> Any:
    """Gloo's process group of one channel, bound to the job's own interface."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=group.address)]
    options._timeout = CONNECT_TIMEOUT
    options._threads = GLOO_THREADS
    made = dist.ProcessGroupGloo(store, group.rank, group.size, options)
    made._set_default_timeout(LIBRARY_TIMEOUT)
    return made
