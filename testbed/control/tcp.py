"""One member's end of the control plane over TCP."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from testbed.base.errors import DeadlineExceeded, Disagreement, RankLost, RunFailed
from testbed.control.frames import (
    OTHERS_ALONE,
    BadFrame,
    Frame,
    FrameReader,
    Torn,
    encode,
    read_frame,
    send_whole,
    shut,
)
from testbed.control.hub import GONE, STALLED, Hub, stood_still_s
from testbed.control.protocol import Loss

OTHER_FILES: Final = 1024  # of a backend's connections, data and libraries


class TcpControl:
    """See `Control` for what each call means.

    Args:
        connection: to the hub, which has accepted this member.
        rank: this member's number.
        size: number of members.
        silence_s: the hub is lost when it sends nothing for so long.
        hub: the hub itself, in the process that hosts it.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        size: int,
        silence_s: float,
        hub: Hub | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._connection = connection
        self._silence_s = silence_s
        self._hub = hub
        self._turns: dict[str, int] = defaultdict(int)
        self._sending = threading.Lock()
        self._is_stalled = False  # the hub took nothing of the newest frame
        self._changed = threading.Condition(threading.RLock())
        self._values: dict[tuple[str, int], list[bytes]] = {}
        self._early: dict[str, list[bytes]] = defaultdict(list)
        self._listeners: dict[str, Callable[[bytes], None]] = {}
        self._loss_callbacks: list[Callable[[Loss], None]] = []
        self._loss: Loss | None = None
        self._read_s = 0.0  # when the newest bytes had come
        self._time: tuple[int, float, float] = (0, 0.0, 0.0)  # the newest answer's number, times
        self.state = "starting"
        self._states: tuple[bytes, ...] = ()
        self._hub_name = "rank 0"
        self._closed = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def all_gather(
        self, name: str, value: bytes, timeout_s: float, members: int | None = None
    ) -> list[bytes]:
        """See `Control.all_gather`."""
        turn = self._turns[name]
        self._turns[name] += 1
        self._send(Frame("value", self.rank, name, turn, members or self.size, (value,)))
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while (name, turn) not in self._values:
                if self._loss is not None:
                    waiting = f"this rank was in {name!r}"
                    raise RankLost(self._loss.who, self._loss.why, waiting)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{name!r} did not end within {timeout_s:g} s; {self.describe()}"
                    )
                self._changed.wait(left_s)
            return self._values.pop((name, turn))

    def announce(
        self, topic: str, value: bytes, members: int | None = None, *, others_alone: bool = False
    ) -> None:
        """See `Control.announce`; in the hub's process this thread itself sends it to all."""
        turn = OTHERS_ALONE if others_alone else 0
        frame = Frame("announce", self.rank, topic, turn, members or self.size, (value,))
        if self._hub is None:
            self._send(frame)
        else:
            self._hub.announce(frame)

    def listen(self, topic: str, callback: Callable[[bytes], None]) -> None:
        """See `Control.listen`; announcements that came before are delivered first."""
        with self._changed:
            for value in self._early.pop(topic, []):
                callback(value)
            self._listeners[topic] = callback

    def time_exchange(self, timeout_s: float) -> tuple[float, float, float]:
        """See `Control.time_exchange`."""
        self._turns["time"] += 1
        turn = self._turns["time"]
        data = encode(Frame("time", self.rank, turn=turn))
        with self._sending:
            asked_s = time.perf_counter()
            self._send_bytes(data, self._silence_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._time[0] == turn or self._loss is not None, timeout_s
            )
            if self._loss is not None:
                raise RankLost(self._loss.who, self._loss.why, "this rank asked for the time")
            if self._time[0] == turn:
                return asked_s, *self._time[1:]
        raise DeadlineExceeded(f"rank 0 did not tell the time within {timeout_s:g} s")

    def report_failure(self, why: str) -> None:
        """See `Control.report_failure`."""
        self._send(Frame("failure", self.rank, why))
        if self._hub is not None:
            self._hub.wait_loss_sent(self._silence_s)

    def give_up(self, loss: Loss) -> None:
        """See `Control.give_up`."""
        self._lose(loss)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """See `Control.on_loss`."""
        with self._changed:
            self._loss_callbacks.append(callback)
            loss = self._loss
        if loss is not None:
            callback(loss)

    @property
    def loss(self) -> Loss | None:
        """See `Control.loss`."""
        return self._loss

    def describe(self) -> str:
        """The last known `state` of every member."""
        return b"; ".join(self._states).decode() or "no member has said what it is doing"

    def close(self) -> None:
        """See `Control.close`."""
        if self._closed:
            return
        self._closed = True
        self._send(Frame("bye", self.rank))
        shut(self._connection)
        self._thread.join()
        self._connection.close()
        if self._hub is not None:
            self._hub.close(timeout_s=self._silence_s)

    def _send(self, frame: Frame) -> None:
        data = encode(frame)
        with self._sending:
            self._send_bytes(data, self._silence_s)

    def _send_bytes(self, data: bytes, patience_s: float) -> None:
        # A dead connection is detected by the reading thread, which fails all waits.
        try:
            send_whole(self._connection, data, patience_s)
            self._is_stalled = False
        except TimeoutError as error:
            self._is_stalled = True
            if isinstance(error, Torn):
                shut(self._connection)
        except OSError:
            pass

    def _beat(self) -> None:
        """Say that this member is there, unless another thread is saying something just now.

        The thread that watches the hub never waits for one that sends to it.
        """
        if self._sending.acquire(blocking=False):
            try:
                frame = Frame("beat", self.rank, values=(self.state.encode(),))
                self._send_bytes(encode(frame), 0.0)
            finally:
                self._sending.release()

    def _run(self) -> None:
        try:
            self._hear()
        except Exception as error:  # whoever waits hears of it, whatever it is
            self._lose_hub(f"its words could not be heard: {type(error).__name__}: {error}")
            traceback.print_exc()

    def _hear(self) -> None:
        reader = FrameReader()
        received_s = beat_s = now_s = time.monotonic()
        self._connection.settimeout(self._silence_s / 8)
        while not self._closed:
            ran_s = min(time.monotonic(), now_s + self._silence_s / 8)  # a beat may take so long
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                data = None
            except OSError:
                data = b""
            self._read_s = time.perf_counter()
            now_s = time.monotonic()
            received_s += stood_still_s(ran_s, now_s, self._silence_s)
            if now_s - beat_s > self._silence_s / 8:
                self._beat()
                beat_s = now_s
            if data:
                received_s = now_s
                for frame in reader.feed(data):
                    self._take(frame)
            elif data == b"":
                return self._lose_hub(STALLED if self._is_stalled else GONE)
            elif now_s - received_s > self._silence_s:
                return self._lose_hub(f"silent for {now_s - received_s:.1f} s")
        return None

    def _take(self, frame: Frame) -> None:
        if frame.kind == "values":
            with self._changed:
                self._values[(frame.name, frame.turn)] = list(frame.values)
                self._changed.notify_all()
        elif frame.kind == "announce":
            with self._changed:
                callback = self._listeners.get(frame.name)
                if callback is None:
                    self._early[frame.name].append(frame.values[0])
                else:
                    callback(frame.values[0])
        elif frame.kind == "time":
            with self._changed:
                self._time = (frame.turn, float(frame.values[0]), self._read_s)
                self._changed.notify_all()
        elif frame.kind == "beat":
            self._states, self._hub_name = frame.values, frame.name or self._hub_name
        elif frame.kind == "loss":
            who, _, why = frame.name.partition("\n")
            self._lose(Loss(frame.member, who, why))

    def _lose_hub(self, why: str) -> None:
        if not self._closed:
            self._lose(Loss(0, self._hub_name, why))

    def _lose(self, loss: Loss) -> None:
        with self._changed:
            if self._loss is not None:
                return
            self._loss = loss
            callbacks = list(self._loss_callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(loss)


def host_control(
    listener: socket.socket,
    size: int,
    token: bytes,
    who: str,
    silence_s: float,
    start_s: float,
    hosts: Sequence[str],
) -> TcpControl:
    """Rank 0's end: starts the hub on the listening socket and joins it."""
    _allow_files(size + OTHER_FILES)
    hub = Hub(listener, size, token, silence_s, start_s, hosts)
    address = listener.getsockname()[:2]
    return join_control(address, 0, size, token, who, silence_s, start_s, hosts[0], hub)


def _allow_files(wanted: int) -> None:
    """As many open files as there will be connections, where the system lets this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and (hard > soft or hard == resource.RLIM_INFINITY):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def join_control(
    address: tuple[str, int],
    rank: int,
    size: int,
    token: bytes,
    who: str,
    silence_s: float,
    start_s: float,
    hub_host: str,
    hub: Hub | None = None,
) -> TcpControl:
    """A member's end: connects to the hub, which may listen later, until it is accepted.

    Raises:
        RunFailed: the hub does not answer within `start_s`.
        Disagreement: the process that listens there refuses this member, or is no hub.
    """
    hello = Frame("hello", rank, who, values=(token,))
    end_s = time.monotonic() + start_s
    pause_s = 0.02
    while True:
        try:
            connection = _enter(address, hello, max(0.1, end_s - time.monotonic()))
            return TcpControl(connection, rank, size, silence_s, hub)
        except OSError as error:
            if time.monotonic() + pause_s > end_s:
                raise RunFailed(
                    f"{who} did not reach rank 0 (host {hub_host}) at {address[0]}:{address[1]} "
                    f"within {start_s:.0f} s, what --start-deadline left ({error}); see whether "
                    "rank 0 was started, name the network that joins the hosts with --interface, "
                    "or give ranks more time to start"
                ) from error
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


def _enter(address: tuple[str, int], hello: Frame, timeout_s: float) -> socket.socket:
    """A connection on which the hub has answered the hello with a welcome."""
    where = f"{address[0]}:{address[1]}"
    with contextlib.ExitStack() as failing:
        connection = socket.create_connection(address, timeout=timeout_s)
        failing.callback(connection.close)
        connection.sendall(encode(hello))
        try:
            answer = read_frame(connection)
        except BadFrame as error:
            raise Disagreement(f"who listens at {where} is not rank 0 of a job: {error}") from error
        if answer is None:
            raise ConnectionError("the connection was closed before an answer")
        if answer.kind != "welcome":
            raise Disagreement(f"{hello.name} was refused by rank 0 at {where}: {answer.name}")
        failing.pop_all()
        return connection
