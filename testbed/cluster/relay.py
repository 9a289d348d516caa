"""Holds every packet for the latency in a process of ours, where the kernel has no netem.

Each node's network card is a TAP device whose other end this process holds: it reads what a node
sends, keeps it as long as links and latency take (`switching`), and writes it to the card of the
node that it is for. What TCP cuts up later passes whole (`IFF_VNET_HDR`), so that a core carries
some hundred Mbit/s of each link; links are to be dilated to that. It ends with its owner: their
pipe closes. Where that is allowed it has a real-time policy, for it must not wait for a core behind
processes that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from testbed.base.errors import RunFailed
from testbed.base.files import to_json
from testbed.cluster.switching import MAC, Switch, is_pure_ack, wire_bytes
from testbed.cluster.system import COMMAND_S, NETNS_FOLDER

TUN: Final = Path("/dev/net/tun")
STATE_S: Final = 0.5  # how old what the file tells may be

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CAN_CUT_UP = 0x1 | 0x2 | 0x4  # checksums, TCP over IPv4 and IPv6
_HEAD = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, kind, header, segment, checksum at, in
_FRAME_BYTES = _HEAD.size + 14 + (1 << 16)
_FRAMES_AT_ONCE = 16
_PRIORITY = 10


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be relayed; times and rates are this machine's, so with the dilation in them.

    Attributes:
        namespaces: of the nodes, in order.
        device: name of each node's card.
        up_bps: of each node's link, bits per second.
        down_bps: likewise.
        latency_s: one way.
        jitter_s: largest deviation from it.
        state: file that is told what the relay did.
    """

    namespaces: list[str]
    device: str
    up_bps: list[float]
    down_bps: list[float]
    latency_s: float
    jitter_s: float
    state: str


class RelayState(msgspec.Struct, kw_only=True):
    """What the relay did so far.

    Attributes:
        policy: under which it runs: `fifo`, or why not.
        processor_s: that it took.
        wall_s: since it began.
        num_frames: handed over.
        num_dropped: that a card did not take: it was down or gone.
        late_s: sum over frames of how long after their time they were handed over.
        latest_s: the largest of these.
    """

    policy: str
    processor_s: float = 0.0
    wall_s: float = 0.0
    num_frames: int = 0
    num_dropped: int = 0
    late_s: float = 0.0
    latest_s: float = 0.0


@contextlib.contextmanager
def relay(links: Links, within: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with every node's card made; killed at the end of the block.

    Args:
        links: what to relay.
        within: namespace that it lives in, so that whoever removes that ends the process, too.

    Raises:
        RunFailed: it did not start; quotes it.
    """
    own = (sys.executable, "-m", __name__, msgspec.json.encode(links).decode())
    with subprocess.Popen(
        ("ip", "netns", "exec", within, *own),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # an interrupt is for the owner, which ends this one last
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                told = process.stderr.read().decode().strip()
                raise RunFailed(f"the relay that makes the cluster's latency failed: {told}")
            yield process
        finally:
            process.kill()
            process.wait(COMMAND_S)


def main() -> None:
    """Relay until the owner's pipe closes; called in a process of its own."""
    links = msgspec.json.decode(sys.argv[1], type=Links)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    cards = [_card(name, links.device) for name in links.namespaces]
    _enter(home)
    state = RelayState(policy=_real_time())
    gc.freeze()
    gc.disable()  # there are no cycles, and a collection is a pause
    relaying = _Relay(links, cards, state)
    relaying.tell(time.monotonic())
    print("up", flush=True)
    relaying.run(sys.stdin.fileno())


def _card(namespace: str, device: str) -> int:
    """Make a node's network card; its other end."""
    held = os.open(NETNS_FOLDER / namespace, os.O_RDONLY)
    _enter(held)
    os.close(held)
    card = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
    fcntl.ioctl(card, _TUNSETOFFLOAD, _CAN_CUT_UP)
    return card


def _enter(namespace: int) -> None:
    """Cards are made in the namespace that this process is in."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _real_time() -> str:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError as error:
        return f"other: {error.strerror}"
    return "fifo"


class _Relay:
    """Reads, keeps and writes; the switch says how long."""

    def __init__(self, links: Links, cards: Sequence[int], state: RelayState) -> None:
        self._cards = cards
        self._state, self._file = state, Path(links.state)
        self._switch = Switch(links.up_bps, links.down_bps, links.latency_s, links.jitter_s)
        self._begin_s = time.monotonic()

    def run(self, owner: int) -> None:
        """Until the other end of this pipe closes."""
        of_card = {card: node for node, card in enumerate(self._cards)}
        watched = [owner, *self._cards]
        told_s = self._begin_s
        while True:
            now_s = time.monotonic()
            if now_s - told_s >= STATE_S:
                self.tell(now_s)
                told_s = now_s
            next_s = self._switch.next_s()
            wait_s = STATE_S if next_s is None else min(STATE_S, max(0.0, next_s - now_s))
            ready, _, _ = select.select(watched, (), (), wait_s)
            if owner in ready and not os.read(owner, 1):
                return
            for card in ready:
                if card != owner:
                    self._take(of_card[card])
            self._hand_over()

    def _take(self, source: int) -> None:
        """Read what a node has sent, a bounded number of frames, so that none waits for others."""
        for _ in range(_FRAMES_AT_ONCE):
            try:
                data = os.read(self._cards[source], _FRAME_BYTES)
            except BlockingIOError:
                return
            frame = data[_HEAD.size :]
            num_bytes = wire_bytes(frame, _HEAD.unpack_from(data)[3])
            waits = not is_pure_ack(frame)
            now_s = time.monotonic()
            for target in self._targets(source, frame):
                self._switch.send(source, target, num_bytes, data, now_s, waits=waits)

    def _targets(self, source: int, frame: bytes) -> Sequence[int]:
        """The node whose card has the address, or all others of a broadcast."""
        if frame[: len(MAC)] == MAC and 0 < frame[len(MAC)] <= len(self._cards):
            return (frame[len(MAC)] - 1,)
        return [node for node in range(len(self._cards)) if node != source]

    def _hand_over(self) -> None:
        state = self._state
        now_s = time.monotonic()
        for arrival in self._switch.due(now_s):
            try:
                os.write(self._cards[arrival.target], arrival.data)
            except OSError:  # as on a wire: nobody is told, the frame is lost, and counted
                state.num_dropped += 1
                continue
            late_s = time.monotonic() - arrival.at_s
            state.num_frames += 1
            state.late_s += late_s
            state.latest_s = max(state.latest_s, late_s)

    def tell(self, now_s: float) -> None:
        """Replace the file at once, so that a reader finds the old state or the new one."""
        self._state.processor_s = time.process_time()
        self._state.wall_s = now_s - self._begin_s
        draft = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk: the old state stays, and the network
            draft.write_bytes(to_json(self._state))
            draft.replace(self._file)


if __name__ == "__main__":
    main()
