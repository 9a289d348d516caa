"""The control plane over TCP: meeting, announcing, and noticing who is gone."""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.errors import DeadlineExceeded, Disagreement, RankLost, RunFailed
from testbed.control import frames
from testbed.control.frames import BadFrame, Frame, FrameReader, Torn, encode, send_whole
from testbed.control.hub import WRONG_TOKEN, Hub
from testbed.control.protocol import PIECE_BYTES, Loss, hand_to_first
from testbed.control.tcp import TcpControl, host_control, join_control

TOKEN = b"0123456789abcdef"
WAIT_S = 20.0


def start(size: int, silence_s: float = WAIT_S, strangers: int = 0) -> list[TcpControl]:
    """All members of a plane, joined from one thread; the last `strangers` stay outside."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    first = host_control(listener, size, TOKEN, "rank 0", silence_s, WAIT_S, ("here",) * size)
    rest = [
        join_control(address, r, size, TOKEN, f"rank {r}", silence_s, WAIT_S, "here")
        for r in range(1, size - strangers)
    ]
    return [first, *rest]


@contextmanager
def plane(size: int, silence_s: float = WAIT_S) -> Iterator[list[TcpControl]]:
    members = start(size, silence_s)
    try:
        yield members
    finally:
        close_all(members)


def close_all(members: list[TcpControl]) -> None:
    # Rank 0 hosts the hub and stays until the others have left.
    for member in reversed(members):
        member.close()


def in_parallel(calls: list[Callable[[], object]]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_gather_gives_everybody_everything_in_rank_order() -> None:
    with plane(3) as members:
        for turn in range(3):
            values = [bytes([turn, m.rank]) for m in members]
            got = in_parallel(
                [
                    lambda m=m, v=v: m.all_gather("x", v, WAIT_S)
                    for m, v in zip(members, values, strict=True)
                ]
            )
            assert got == [values] * 3


def test_the_first_members_alone() -> None:
    with plane(3) as members:
        got = in_parallel(
            [lambda m=m: m.all_gather("pair", b"v", WAIT_S, members=2) for m in members[:2]]
        )
        assert got == [[b"v", b"v"]] * 2


def all_heard(members: Sequence[TcpControl]) -> list[list[bytes]]:
    """What each member was told on the topic until now.

    Every member's announcements precede its contribution, and the hub keeps that order.
    """
    in_parallel([lambda m=m: m.all_gather("sent", b"", WAIT_S) for m in members])
    heard: list[list[bytes]] = [[] for _ in members]
    for member, words in zip(members, heard, strict=True):
        member.listen("topic", words.append)
    return heard


def test_announcements_arrive_everywhere_in_one_order_even_before_anyone_listens() -> None:
    with plane(3) as members:
        for member in members:
            for i in range(5):
                member.announce("topic", bytes([member.rank, i]))
        heard = all_heard(members)
        assert heard[0] == heard[1] == heard[2]
        assert len(heard[0]) == 15


@pytest.mark.parametrize("announcer", [0, 1])
def test_what_is_for_the_others_alone_does_not_come_back(announcer: int) -> None:
    with plane(3) as members:
        members[announcer].announce("topic", b"others", others_alone=True)
        members[announcer].announce("topic", b"all")
        heard = all_heard(members)
        expected = [[b"others", b"all"]] * 3
        expected[announcer] = [b"all"]
        assert heard == expected


def test_announcers_of_several_threads_are_heard_in_one_order() -> None:
    with plane(3) as members:

        def speak(member: TcpControl, thread: int) -> None:
            for i in range(50):
                member.announce("topic", bytes([member.rank, thread, i]))

        in_parallel([lambda m=m, t=t: speak(m, t) for m in members for t in range(2)])
        heard = all_heard(members)
        assert heard[0] == heard[1] == heard[2]
        assert len(heard[0]) == 300
        for rank in range(3):
            for thread in range(2):
                mine = [w[2] for w in heard[0] if w[:2] == bytes([rank, thread])]
                assert mine == list(range(50))


def test_long_values_reach_the_first_member_whole_and_alone() -> None:
    values = [bytes([r]) * (2 * PIECE_BYTES + r) for r in range(3)]
    with plane(3) as members:
        got = in_parallel(
            [
                lambda m=m, v=v: hand_to_first(m, "long", v, WAIT_S, 3)
                for m, v in zip(members, values, strict=True)
            ]
        )
        assert got == [values, [], []]


def test_a_member_that_is_given_up_ends_this_member_s_waits_alone() -> None:
    with plane(3) as members:
        loss = Loss(1, "rank 1", "it ended its loop")
        members[2].give_up(loss)
        with pytest.raises(RankLost, match=r"rank 1 is lost: it ended its loop; .*'x'"):
            members[2].all_gather("x", b"", WAIT_S)
        others = [lambda m=m: m.all_gather("y", b"", WAIT_S, members=2) for m in members[:2]]
        assert in_parallel(others) == [[b"", b""]] * 2


def test_a_frame_that_no_reader_takes_is_refused_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    with plane(2) as members, pytest.raises(BadFrame, match="value 'x' has"):
        members[1].all_gather("x", bytes(1000), WAIT_S)


def test_an_answer_that_no_reader_takes_ends_all_waits_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    with plane(2) as members:
        results = in_parallel([lambda m=m: m.all_gather("x", bytes(600), WAIT_S) for m in members])
        for result in results:
            assert isinstance(result, RankLost)
            assert "at most 1000 go in one frame" in str(result)


class OfFew(socket.socket):
    """A listening socket of a process that may open no more files."""

    taken = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.taken += 1
        if self.taken == 2:
            raise ConnectionAbortedError  # who goes away at once is no reason
        if self.taken > 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_hub_that_has_no_files_left_says_so() -> None:
    listener = OfFew(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    first = host_control(listener, 2, TOKEN, "rank 0", WAIT_S, WAIT_S, ("here",) * 2)
    heard: queue.Queue[Loss] = queue.Queue()
    first.on_loss(heard.put)
    with socket.create_connection(first._connection.getpeername()):
        loss = heard.get(timeout=WAIT_S)
    first.close()
    assert loss.who == "rank 1 (host here)"
    assert "(Too many open files); raise `ulimit -n` there" in loss.why


def test_a_listener_that_fails_ends_all_waits_with_the_reason() -> None:
    def fail(words: bytes) -> None:
        raise ValueError("on purpose")

    with plane(2) as members:
        members[1].listen("topic", fail)
        members[0].announce("topic", b"")
        news = mourn(members[1]).get(timeout=WAIT_S)
        assert "ValueError: on purpose" in news.why


def mourn(member: TcpControl) -> queue.SimpleQueue[Loss]:
    news: queue.SimpleQueue[Loss] = queue.SimpleQueue()
    member.on_loss(news.put)
    return news


def test_a_connection_that_ends_without_goodbye_is_a_loss_for_all_others() -> None:
    with plane(3) as members:
        news = [mourn(m) for m in members[:2]]
        members[2]._connection.shutdown(socket.SHUT_RDWR)
        for words in news:
            loss = words.get(timeout=WAIT_S)
            assert (loss.member, loss.who) == (2, "rank 2")
            assert "without a goodbye" in loss.why


def test_a_goodbye_is_no_loss() -> None:
    with plane(3) as members:
        members[2].close()
        in_parallel([lambda m=m: m.all_gather("x", b"", WAIT_S, members=2) for m in members[:2]])
        assert members[0].loss is None
        assert members[1].loss is None


def test_a_failure_is_told_with_its_reason_also_by_the_hub_s_own_member() -> None:
    for culprit in (0, 1):
        with plane(2) as members:
            news = mourn(members[1 - culprit])
            members[culprit].report_failure("the disk is full")
            loss = news.get(timeout=WAIT_S)
            assert (loss.member, loss.why) == (culprit, "the disk is full")


def test_waiting_members_learn_of_a_loss_at_once() -> None:
    with plane(3) as members:
        waiting = [lambda m=m: m.all_gather("never", b"", WAIT_S) for m in members[:2]]
        results = in_parallel([*waiting, lambda: members[2].report_failure("broken")])
        for result in results[:2]:
            assert isinstance(result, RankLost)
            assert "rank 2 is lost: broken; this rank was in 'never'" in str(result)


class Counted:
    """A connection that tells when its timeout has passed so often."""

    def __init__(self, connection: socket.socket, often: int) -> None:
        self._connection, self._left, self.passed = connection, often, threading.Event()
        self.shutdown = connection.shutdown

    def send(self, data: memoryview) -> int:
        try:
            return self._connection.send(data)
        except TimeoutError:
            self._left -= 1
            if self._left == 0:
                self.passed.set()
            raise


def test_a_frame_is_sent_whole_however_slowly_it_is_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.01)
        slow = Counted(here, often=3)
        data = encode(Frame("announce", 1, "topic", values=(bytes(1 << 23),)))
        sender = threading.Thread(target=send_whole, args=(slow, data + data, WAIT_S))
        sender.start()
        assert slow.passed.wait(WAIT_S)  # nobody reads yet
        reader, frames = FrameReader(), list[Frame]()
        while len(frames) < 2:
            frames += reader.feed(there.recv(1 << 16))
        sender.join(WAIT_S)
    assert [len(frame.values[0]) for frame in frames] == [1 << 23, 1 << 23]


def test_a_connection_of_which_nobody_reads_is_given_up() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.01)
        with pytest.raises(Torn):
            send_whole(here, bytes(1 << 23), 0.05)
        with pytest.raises(TimeoutError) as nothing:
            send_whole(here, b"more", 0.05)
        assert not isinstance(nothing.value, Torn)


@pytest.mark.parametrize("moment", ["_take", "_watch"])
def test_a_hub_that_was_stopped_outside_its_listening_loses_nobody(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is paused as a whole stands still at any line of the hub."""
    silence_s, plain = 0.5, getattr(Hub, moment)
    asked, resumed = threading.Event(), threading.Event()

    def stop(hub: Hub, *given: Any) -> Any:
        if len(hub._peers) == 2 and not asked.is_set():
            asked.set()
            resumed.wait(WAIT_S)
        return plain(hub, *given)

    monkeypatch.setattr(Hub, moment, stop)
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(listener, 2, TOKEN, silence_s, WAIT_S, ("here",) * 2)
    with contextlib.ExitStack() as opened:
        members = [
            opened.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)
        ]
        for rank, member in enumerate(members):
            member.sendall(encode(Frame("hello", rank, f"rank {rank}", values=(TOKEN,))))
        for _ in range(60):
            for rank, member in enumerate(members):
                member.sendall(encode(Frame("beat", rank, values=(b"here",))))
            if asked.wait(0.05) and not resumed.is_set():
                time.sleep(4 * silence_s)  # nobody says a word
                resumed.set()
        assert resumed.is_set()
        for rank, member in enumerate(members):
            member.sendall(encode(Frame("bye", rank)))
        heard = [FrameReader().feed(said_until_closed(member)) for member in members]
    hub.close(WAIT_S)
    assert {frame.kind for frames in heard for frame in frames} == {"welcome", "beat"}


def test_a_stop_of_the_hub_is_no_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    silence_s, start_s, plain = 0.5, 4.0, Hub._take
    asked, resumed = threading.Event(), threading.Event()

    def stop(hub: Hub, *given: Any) -> Any:
        asked.set()
        resumed.wait(WAIT_S)
        return plain(hub, *given)

    monkeypatch.setattr(Hub, "_take", stop)
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(listener, 2, TOKEN, silence_s, start_s, ("here",) * 2)
    with socket.create_connection(listener.getsockname()) as member:
        member.sendall(encode(Frame("hello", 0, "rank 0", values=(TOKEN,))))
        assert asked.wait(WAIT_S)
        time.sleep(1.5 * start_s)
        resumed.set()
        for _ in range(6):  # rank 1 is not there yet, and has time left
            time.sleep(silence_s / 4)
            member.sendall(encode(Frame("beat", 0, values=(b"here",))))
        member.sendall(encode(Frame("bye", 0)))
        heard = FrameReader().feed(said_until_closed(member))
    hub._stop.set()
    hub.close(WAIT_S)
    assert {frame.kind for frame in heard} == {"welcome", "beat"}


def test_a_member_that_was_stopped_outside_its_listening_loses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence_s, plain = 0.5, TcpControl._take
    asked, resumed = threading.Event(), threading.Event()

    def stop(member: TcpControl, frame: Frame) -> None:
        asked.set()
        resumed.wait(WAIT_S)
        plain(member, frame)

    monkeypatch.setattr(TcpControl, "_take", stop)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with there:
        member = TcpControl(here, 1, 2, silence_s)
        there.sendall(encode(Frame("beat")))
        assert asked.wait(WAIT_S)
        time.sleep(4 * silence_s)  # the hub was stopped as well
        resumed.set()
        time.sleep(silence_s / 4)  # and speaks a little later than this member listens
        for _ in range(10):
            there.sendall(encode(Frame("beat")))
            time.sleep(silence_s / 8)
        assert member.loss is None
        member.close()


def test_a_member_that_says_nothing_is_lost() -> None:
    members = start(2, silence_s=0.5, strangers=1)
    news = mourn(members[0])
    with socket.create_connection(members[0]._connection.getpeername()) as silent:
        silent.sendall(encode(Frame("hello", 1, "rank 1", values=(TOKEN,))))
        loss = news.get(timeout=WAIT_S)
        assert loss.member == 1
        assert "silent for" in loss.why
        close_all(members)


def test_parts_of_a_frame_are_signs_of_life() -> None:
    members = start(2, silence_s=0.4, strangers=1)
    news = mourn(members[0])
    with socket.create_connection(members[0]._connection.getpeername()) as slow:
        slow.sendall(encode(Frame("hello", 1, "rank 1", values=(TOKEN,))))
        data = encode(Frame("announce", 1, "topic", 0, 2, values=(b"whole",)))
        got: queue.Queue[bytes] = queue.Queue()
        members[0].listen("topic", got.put)
        for place in range(len(data)):  # longer than the silence, but never silent for so long
            with pytest.raises(queue.Empty):
                got.get(timeout=0.05)
            slow.sendall(data[place : place + 1])
        assert got.get(timeout=WAIT_S) == b"whole"
        assert news.empty()
    close_all(members)


def test_a_hub_that_takes_no_bytes_of_a_long_frame_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with there:
        member = TcpControl(here, 1, 2, silence_s=0.5)
        news = mourn(member)
        sender = threading.Thread(target=member.announce, args=("topic", bytes(1 << 23)))
        sender.start()
        loss = news.get(timeout=WAIT_S)
        assert loss.member == 0
        assert re.match("silent for|it takes no messages", loss.why)
        sender.join(WAIT_S)
        member.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02hi",
        encode(Frame("hello", 1, "intruder", values=(b"wrong token",))),
        encode(Frame("bye", 1)),
    ],
)
def test_strangers_are_turned_away_and_the_plane_goes_on(noise: bytes) -> None:
    with plane(2) as members:
        address = members[0]._connection.getpeername()
        with socket.create_connection(address, timeout=WAIT_S) as stranger:
            stranger.sendall(noise)
            assert said_until_closed(stranger) in (b"", encode(Frame("refuse", 0, WRONG_TOKEN)))
        got = in_parallel([lambda m=m: m.all_gather("x", b"", WAIT_S) for m in members])
        assert got == [[b"", b""]] * 2


def said_until_closed(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_member_that_asks_before_the_hub_listens_asks_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as early:
        address = early.getsockname()[:2]
        joined: queue.SimpleQueue[TcpControl] = queue.SimpleQueue()
        asking = threading.Thread(
            target=lambda: joined.put(
                join_control(address, 1, 2, TOKEN, "rank 1", WAIT_S, WAIT_S, "here")
            )
        )
        asking.start()
        early.accept()[0].close()  # it has asked; from here on nobody listens
    listener = socket.create_server(address)
    first = host_control(listener, 2, TOKEN, "rank 0", WAIT_S, WAIT_S, ("here", "here"))
    members = [first, joined.get(timeout=WAIT_S)]
    asking.join()
    got = in_parallel([lambda m=m: m.all_gather("x", b"", WAIT_S) for m in members])
    assert got == [[b"", b""]] * 2
    close_all(members)


def test_a_wrong_token_ends_its_join_at_once_and_leaves_the_member_absent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    members = start(2, strangers=1)
    address = members[0]._connection.getpeername()
    with pytest.raises(Disagreement, match=r"rank 1 \(host h2\) was refused .*TESTBED_TOKEN"):
        join_control(address, 1, 2, b"of another job.", "rank 1 (host h2)", WAIT_S, WAIT_S, "here")
    told = r"testbed: refused 127\.0\.0\.1:\d+, which calls itself 'rank 1 \(host h2\)': the token"
    members.append(join_control(address, 1, 2, TOKEN, "rank 1", WAIT_S, WAIT_S, "here"))
    got = in_parallel([lambda m=m: m.all_gather("join", b"", WAIT_S) for m in members])
    assert got == [[b"", b""]] * 2
    assert re.search(told, capfd.readouterr().err)
    close_all(members)


def test_a_second_process_of_a_rank_is_refused_and_the_plane_goes_on() -> None:
    with plane(2) as members:
        address = members[0]._connection.getpeername()
        with pytest.raises(Disagreement, match="rank 1 is there already"):
            join_control(address, 1, 2, TOKEN, "another rank 1", WAIT_S, WAIT_S, "here")
        got = in_parallel([lambda m=m: m.all_gather("x", b"", WAIT_S) for m in members])
        assert got == [[b"", b""]] * 2


def test_who_listens_but_is_no_hub_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1 << 16)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(Disagreement, match="is not rank 0 of a job"):
            join_control(listener.getsockname()[:2], 1, 2, TOKEN, "rank 1", WAIT_S, WAIT_S, "here")
        answering.join()


def test_ranks_that_do_not_come_are_named_with_their_hosts() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address, hosts = listener.getsockname()[:2], ("h0", "h1", "h2", "h3")
    first = host_control(listener, 4, TOKEN, "rank 0", 0.8, 0.5, hosts)
    second = join_control(address, 2, 4, TOKEN, "rank 2", WAIT_S, WAIT_S, "h0")
    for member in (first, second):
        with pytest.raises(RankLost, match=r"^rank 1 \(host h1\), rank 3 \(host h3\) is lost: did"):
            member.all_gather("join", b"", WAIT_S)
    close_all([first, second])


def test_a_rank_0_that_does_not_come_is_named_with_its_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()[:2]
    with pytest.raises(RunFailed, match=r"rank 1 did not reach rank 0 \(host h0\) at 127.0.0.1:"):
        join_control(address, 1, 2, TOKEN, "rank 1", WAIT_S, 0.2, "h0")


def test_who_did_not_come_is_told_by_what_everybody_does() -> None:
    late = pytest.raises(DeadlineExceeded, match="'alone' did not end within")
    with plane(2) as members, late:
        members[0].all_gather("alone", b"", 0.01)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.text(max_size=8), st.binary(max_size=64)), max_size=5),
    st.integers(1, 7),
)
def test_frames_survive_any_cutting(items: list[tuple[int, str, bytes]], size: int) -> None:
    frames = [Frame("value", member, name, values=(value,)) for member, name, value in items]
    stream = b"".join(map(encode, frames))
    reader = FrameReader()
    got = [f for i in range(0, len(stream), size) for f in reader.feed(stream[i : i + size])]
    assert got == frames


@given(st.binary(min_size=4, max_size=64))
def test_garbage_never_raises_anything_but_bad_frame(data: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(BadFrame):
        assert all(isinstance(frame, Frame) for frame in reader.feed(data))


def test_rank_0_tells_the_time_while_all_members_ask() -> None:
    with plane(3) as members:

        def ask(member: TcpControl) -> Callable[[], object]:
            return lambda: [member.time_exchange(WAIT_S) for _ in range(50)]

        for exchanges in in_parallel([ask(member) for member in members[1:]]):
            assert isinstance(exchanges, list)
            # One process: its clock is rank 0's, so that the answer lies between.
            assert all(asked < answered < came for asked, answered, came in exchanges)
            assert all(a[2] <= b[0] for a, b in itertools.pairwise(exchanges))


def test_who_asks_for_the_time_hears_of_a_loss() -> None:
    with plane(3) as members:
        heard = threading.Event()
        members[1].on_loss(lambda loss: heard.set())
        members[2].report_failure("it broke")
        assert heard.wait(WAIT_S)
        with pytest.raises(RankLost, match="it broke"):
            members[1].time_exchange(WAIT_S)
