"""The hub of the control plane, to which all members connect: a thread in rank 0's process.

It matches all-gathers, repeats announcements in one order, and watches the members: a connection
that closes without a `bye`, or a member that sends nothing for too long, is a loss that is
reported to all.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from testbed.base.errors import tell
from testbed.control.frames import (
    OTHERS_ALONE,
    BadFrame,
    Frame,
    FrameReader,
    Torn,
    encode,
    read_some,
    send_whole,
    shut,
)

REPORT_EVERY_S = 10.0
GONE = "its process ended without a goodbye (killed or crashed)"
STALLED = "it takes no messages (stopped, or its host is cut off)"
WRONG_TOKEN = (
    "the token is another than rank 0's; expected that of the same job: two jobs meet on this "
    "port, or TESTBED_TOKEN differs between the ranks"
)


class _Peer:
    """One connection, and its member once that has sent `hello`."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.reader = FrameReader()
        self.is_stalled = False
        self.member = -1
        self.received_s = time.monotonic()
        self.state = b""


class Hub:
    """Serves the control plane until every member has left or a loss was reported to all.

    Args:
        listener: a listening socket on the job's own interface.
        size: number of members.
        token: the job's secret; a connection without it is dropped.
        silence_s: a member that sends nothing for so long is lost.
        start_s: how long members may take to connect.
        hosts: where each member is expected, for messages.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        token: bytes,
        silence_s: float,
        start_s: float,
        hosts: Sequence[str],
    ) -> None:
        self._listener = listener
        self._size = size
        self._token = token
        self._silence_s = silence_s
        self._start_s = start_s
        self._hosts = hosts
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._names: dict[int, str] = {}
        self._left: set[int] = set()
        self._loss: Frame | None = None
        self._report_s = REPORT_EVERY_S
        self._held: list[Frame] = []  # announcements made before all members had joined
        self._blocked_s = 0.0  # spent in sends since the hub last listened
        self._loss_sent = threading.Event()
        self._sending = threading.RLock()  # frames reach every member in one order
        self._values: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
        self._wake_in, self._wake_out = socket.socketpair()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-hub", daemon=True)
        self._thread.start()

    def wait_loss_sent(self, timeout_s: float) -> None:
        """Wait until the first loss was reported to all members; the process may then end."""
        self._loss_sent.wait(timeout_s)

    def announce(self, frame: Frame) -> None:
        """Pass an announcement on at once, from the thread of the member that hosts the hub."""
        with self._sending:
            if len(self._peers) < self._size:
                self._held.append(frame)
            else:
                self._broadcast(frame, _receivers(frame))

    def close(self, timeout_s: float) -> None:
        """Wait until all members have left, at most so long, then end."""
        self._thread.join(timeout_s)
        self._stop.set()
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")
        self._thread.join()
        self._wake_out.close()

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        started_s = watched_s = woke_s = time.monotonic()
        while not self._stop.is_set() and len(self._left) < self._size:
            ready = self._selector.select(self._silence_s / 8)
            # What sends took is no stop: a member that takes no bytes stays silent meanwhile.
            ran_s, self._blocked_s = woke_s + self._blocked_s, 0.0
            woke_s = time.monotonic()
            still_s = stood_still_s(ran_s, woke_s, self._silence_s)
            started_s += still_s
            for peer in self._peers.values():
                peer.received_s = min(woke_s, peer.received_s + still_s)
            for key, _ in ready:
                self._serve(key.fileobj)
            if woke_s - watched_s > self._silence_s / 8:
                watched_s = woke_s
                self._watch(woke_s, started_s)  # all that had come by then was read
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _serve(self, source: object) -> None:
        if source is self._listener:
            try:
                connection, address = self._listener.accept()
            except ConnectionAbortedError:
                return  # whoever came is gone again
            except OSError as error:  # no file is left for it
                self._refuse_more(error)
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._silence_s / 8)
            peer = _Peer(connection, f"{address[0]}:{address[1]}")
            self._selector.register(connection, selectors.EVENT_READ, peer)
        elif isinstance(source, socket.socket) and source is not self._wake_in:
            peer = self._selector.get_key(source).data
            data = read_some(source)
            if data:  # a part of a long frame is a sign of life, too
                peer.received_s = time.monotonic()
            try:
                frames = peer.reader.feed(data)
            except BadFrame:
                frames, data = [], b""  # no member, but another program: drop the connection
            for frame in frames:
                data = data if self._take(peer, frame) else b""
            if not data:
                self._drop(peer)

    def _refuse_more(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        if absent := self._absent():
            self._names[absent[0]] = f"rank {absent[0]} (host {self._hosts[absent[0]]})"
            why = f"rank 0 cannot take its connection ({error.strerror}); raise `ulimit -n` there"
            self._lose(absent[0], why)

    def _take(self, peer: _Peer, frame: Frame) -> bool:
        """Act on a frame; False: the connection is to be dropped."""
        if peer.member < 0:
            return self._welcome(peer, frame)
        if frame.kind == "beat":
            peer.state = frame.values[0]
        elif frame.kind == "value":
            self._gather(frame)
        elif frame.kind == "announce":
            self.announce(frame)
        elif frame.kind == "time":
            shown = repr(time.perf_counter()).encode()
            with self._sending:
                self._send(peer, Frame("time", turn=frame.turn, values=(shown,)))
        elif frame.kind == "failure":
            self._lose(peer.member, frame.name)
        elif frame.kind == "bye":
            self._left.add(peer.member)
            return False
        return True

    def _welcome(self, peer: _Peer, frame: Frame) -> bool:
        if frame.kind != "hello" or len(frame.values) != 1:
            return False
        if not hmac.compare_digest(frame.values[0], self._token):
            # Whoever has not shown the token changes nothing: its member stays absent.
            self._send(peer, Frame("refuse", 0, WRONG_TOKEN))
            who = f"{peer.address}, which calls itself {frame.name[:100]!r}"
            tell(f"testbed: refused {who}: {WRONG_TOKEN}\n")
            return False
        if frame.member not in self._absent():
            words = f"rank {frame.member} is there already, or is none of 0 .. {self._size - 1}"
            self._send(peer, Frame("refuse", 0, words))
            return False
        peer.member = frame.member
        self._names[frame.member] = frame.name
        with self._sending:
            self._peers[frame.member] = peer
            self._send(peer, Frame("welcome", members=self._size))
            if self._loss is not None:
                self._send(peer, self._loss)
            if len(self._peers) == self._size:
                for held in self._held:
                    self._broadcast(held, _receivers(held))
                self._held.clear()
        return True

    def _absent(self) -> list[int]:
        return [m for m in range(self._size) if m not in self._peers]

    def _gather(self, frame: Frame) -> None:
        values = self._values[(frame.name, frame.turn)]
        values[frame.member] = frame.values[0]
        if len(values) < frame.members:
            return
        del self._values[(frame.name, frame.turn)]
        answer = tuple(values[m] for m in sorted(values))
        told = Frame("values", 0, frame.name, frame.turn, frame.members, answer)
        try:
            self._broadcast(told, set(values))
        except BadFrame as error:
            self._lose(frame.member, str(error))
            self._tell_lost(self._peers[frame.member])

    def _broadcast(self, frame: Frame, members: set[int] | None = None) -> None:
        data = encode(frame)
        with self._sending:
            for member, peer in list(self._peers.items()):
                if (members is None or member in members) and member not in self._left:
                    self._send_bytes(peer, data)

    def _send(self, peer: _Peer, frame: Frame) -> None:
        self._send_bytes(peer, encode(frame))

    def _send_bytes(self, peer: _Peer, data: bytes) -> None:
        # A peer that takes no bytes is detected by the next read or by `silence_s`; the others hear
        # of the hub in less than that.
        began_s = time.monotonic()
        try:
            send_whole(peer.connection, data, self._silence_s / 2)
            peer.is_stalled = False
        except TimeoutError as error:
            peer.is_stalled = True
            if isinstance(error, Torn):
                shut(peer.connection)
        except OSError:
            pass
        finally:  # beyond its limit it was no send, but stopped
            self._blocked_s += min(time.monotonic() - began_s, self._silence_s / 2)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.member >= 0 and peer.member not in self._left:
            self._lose(peer.member, STALLED if peer.is_stalled else GONE)

    def _lose(self, member: int, why: str) -> None:
        self._left.add(member)
        if self._loss is None:
            self._loss = Frame("loss", member, f"{self._names[member]}\n{why}")
            self._broadcast(self._loss)
            self._loss_sent.set()

    def _tell_lost(self, peer: _Peer) -> None:
        """A member that may live hears that it is lost, after the others."""
        assert self._loss is not None
        self._send(peer, self._loss)

    def _watch(self, now_s: float, started_s: float) -> None:
        for member, peer in list(self._peers.items()):
            silent_s = now_s - peer.received_s
            if member not in self._left and silent_s > self._silence_s:
                self._lose(member, f"silent for {silent_s:.1f} s (stopped, or its host is cut off)")
                self._tell_lost(peer)
        if self._loss is None and (absent := self._absent()):
            self._miss(absent, now_s - started_s)
        told = sorted((m, peer.state) for m, peer in self._peers.items() if peer.state)
        states = tuple(f"{self._names[m]}: {state.decode()}".encode() for m, state in told)
        self._broadcast(Frame("beat", name=self._names.get(0, ""), values=states))

    def _miss(self, absent: list[int], waited_s: float) -> None:
        """Log from time to time who has not joined; at `start_s` they are lost."""
        who = ", ".join(f"rank {m} (host {self._hosts[m]})" for m in absent)
        if waited_s > self._start_s:
            self._names[absent[0]] = who
            self._lose(
                absent[0], f"did not join within {self._start_s:.0f} s, what --start-deadline left"
            )
        elif waited_s > self._report_s:
            self._report_s = waited_s + REPORT_EVERY_S
            left_s = self._start_s - waited_s
            tell(f"testbed: waiting for {who} to join, for {left_s:.0f} s more\n")


def stood_still_s(ran_s: float, now_s: float, silence_s: float) -> float:
    """How long this process was itself stopped since `ran_s`, at any line, not only in its wait.

    It waits for an eighth of `silence_s` at a time.

    Whoever was not running cannot tell that others were silent: a job may be paused as a whole, by
    Slurm, a container's freezer or the host of a virtual machine.

    Example:
        >>> stood_still_s(100.0, 100.6, 5.0), stood_still_s(100.0, 109.0, 5.0)
        (0.0, 8.375)
    """
    late_s = now_s - ran_s - silence_s / 8
    return late_s if late_s > silence_s / 8 else 0.0


def _receivers(announcement: Frame) -> set[int]:
    """The first so many members, but the announcer if it is for the others alone."""
    members = set(range(announcement.members))
    return members - {announcement.member} if announcement.turn == OTHERS_ALONE else members
