"""A recorded step played back, as it was and without one cause after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from testbed.causes.costs import Share
from testbed.causes.exchanges import Exchange, Round


@dataclass(frozen=True)
class Without:
    """What is left out when a step is played back.

    Attributes:
        late: ranks that nobody waits for.
        skew: nobody waits for any rank that is later than the middle one.
        host: what a busy host added to exchanges.
        more_startup: by which start-ups have grown since the usual steps.
        more_transfer: likewise bytes.
        order: a message that is complete starts when its channel is free, the most needed first.
        codec: encoding and decoding.
        dependency: gradients wait for no other of their message, messages for no end of backward,
            halves and rounds for none before.
        tiny: start-ups of many small messages.
        startup: all other start-ups.
        transfer: bytes.
        untold: start-ups and bytes that cannot be told apart.
    """

    late: frozenset[int] = frozenset()
    skew: bool = False
    host: bool = False
    more_startup: bool = False
    more_transfer: bool = False
    order: bool = False
    codec: bool = False
    dependency: bool = False
    tiny: bool = False
    startup: bool = False
    transfer: bool = False
    untold: bool = False


@dataclass(frozen=True, eq=False)
class _Measured:
    """What was measured between an exchange's release and its start."""

    release_s: float
    chained_s: float  # from the end of the one that it follows to its hand-over, at least 0
    gap_s: float  # free channel, released, not begun
    early_s: float  # its start less the end of the one before on its channel, at most 0


class Playback:
    """One step's exchanges and waits.

    Without anything left out, starts, ends and waits are the measured ones:

        B_x = max(release_x, E_(x-1) + early_x) + gap_x;  E_x = B_x + D_x
        wait of a rank: from its begin to max(begin, E_x - lag) + what followed

    Args:
        played: the step.
        shares: what each exchange's duration is made of, in the order of its exchanges.
        usual_gap_s: exchange's identity -> gap in usual steps, for what a busy host added.
        after_backward: the plan holds messages until the end of the backward pass.
        crosses: results are needed in the next forward pass, in the order of the waits.
    """

    def __init__(
        self,
        played: Round,
        shares: Sequence[Share],
        usual_gap_s: Mapping[tuple[int, int], float] | None = None,
        *,
        after_backward: bool = False,
        crosses: bool = False,
    ) -> None:
        self._round, self._shares, self._usual_gap_s = played, shares, usual_gap_s
        self._after_backward = after_backward
        self._number = {id(x): n for n, x in enumerate(played.exchanges)}
        self._followed = self._find_followed()
        self._measured = self._measure()
        self._needed = self._needs(crosses)

    @property
    def gaps_s(self) -> list[float]:
        """Of each exchange, how long it had been released, its channel free, and not begun."""
        return [m.gap_s for m in self._measured]

    def waits_s(self, without: Without) -> list[list[float]]:
        """Each rank's waits, without what is left out."""
        free = without.order or without.dependency
        ends_s = self._freely(without) if free else self._in_order(without)
        found = []
        for waits in self._round.waits:
            lengths: list[float] = []
            shift_s = 0.0  # by which the rank is ahead of the measured times
            for wait in waits:
                begin_s = wait.begin_s - shift_s
                if wait.exchange is None or id(wait.exchange) not in self._number:
                    lengths.append(wait.duration_s)
                    continue
                number = self._number[id(wait.exchange)]
                landed_s = wait.exchange.end_s[wait.rank]
                after_s = wait.end_s - max(landed_s, wait.begin_s)
                if without.codec:
                    after_s = max(0.0, after_s - wait.decode_s)
                arrives_s = landed_s - wait.exchange.ended_s + ends_s[number]
                end_s = max(begin_s, arrives_s) + after_s
                lengths.append(end_s - begin_s)
                shift_s = wait.end_s - end_s
            found.append(lengths)
        return found

    def _find_followed(self) -> list[int | None]:
        """Of each exchange the one whose end lets it go.

        That is its own half or round before; else what its last rank had waited for when it handed
        this one over, if nothing else follows that.
        """
        last: dict[tuple[int, int], int] = {}
        found: list[int | None] = []
        for number, exchange in enumerate(self._round.exchanges):
            found.append(last.get((exchange.message, exchange.turn - 1)))
            last[exchange.message, exchange.turn] = number
        followed = set(found)
        ended_s = [[wait.end_s for wait in waits] for waits in self._round.waits]
        for number, exchange in enumerate(self._round.exchanges):
            waited = self._waited_before(exchange, ended_s)
            free = found[number] is None and waited not in followed
            if waited is not None and waited < number and free:
                found[number] = waited
                followed.add(waited)
        return found

    def _waited_before(self, exchange: Exchange, ended_s: Sequence[Sequence[float]]) -> int | None:
        """The exchange that the last rank to hand this one over had waited for before, if any."""
        rank = max(range(len(exchange.queued_s)), key=lambda r: exchange.queued_s[r])
        count = bisect_right(ended_s[rank], exchange.queued_s[rank])  # waits follow each other
        return self._number.get(id(self._round.waits[rank][count - 1].exchange)) if count else None

    def _measure(self) -> list[_Measured]:
        found = []
        ended: dict[int, float] = {}
        for number, exchange in enumerate(self._round.exchanges):
            release_s = max(exchange.queued_s)
            before = self._followed[number]
            chained_s = 0.0
            if before is not None:
                earlier = self._round.exchanges[before]
                chained_s = max(0.0, release_s - earlier.ended_s)
                release_s = max(release_s, earlier.ended_s)
            channel_s = ended.get(exchange.channel, -inf)
            early_s = min(0.0, exchange.started_s - channel_s)
            gap_s = exchange.started_s - max(release_s, channel_s + early_s)
            found.append(_Measured(release_s, chained_s, gap_s, early_s))
            ended[exchange.channel] = exchange.started_s + exchange.duration_s
        return found

    def _needs(self, crosses: bool) -> list[float]:
        """Of each exchange which wait needs it; all alike where all are waited for together."""
        needed = [inf] * len(self._round.exchanges)
        if crosses:
            for waits in self._round.waits:
                for place, wait in enumerate(waits):
                    number = self._number.get(id(wait.exchange))
                    if number is not None:
                        needed[number] = min(needed[number], float(place))
            for number in range(len(needed) - 1, -1, -1):
                before = self._followed[number]
                if before is not None:
                    needed[before] = min(needed[before], needed[number])
        return needed

    def _duration_s(self, number: int, without: Without) -> float:
        share = self._shares[number]
        return (
            share.rest_s
            + (0.0 if without.untold else share.untold_s)
            + (0.0 if without.host else share.host_s)
            + (0.0 if without.more_startup else share.more_startup_s)
            + (0.0 if without.more_transfer else share.more_transfer_s)
            + (0.0 if without.tiny else share.tiny_s)
            + (0.0 if without.startup else share.startup_s)
            + (0.0 if without.transfer else share.transfer_s)
        )

    def _gap_s(self, number: int, without: Without) -> float:
        gap_s = self._measured[number].gap_s
        if without.host and self._usual_gap_s is not None:
            exchange = self._round.exchanges[number]
            usual_s = self._usual_gap_s.get((exchange.message, exchange.turn), 0.0)
            return min(gap_s, usual_s)
        return gap_s

    def _latest(self, moments: Sequence[float], without: Without) -> float:
        """When all ranks that count had come so far."""
        counted = [m for rank, m in enumerate(moments) if rank not in without.late]
        if without.skew:
            return sorted(moments)[(len(moments) - 1) // 2]
        return max(counted) if counted else min(moments)

    def _release_s(self, number: int, without: Without) -> float:
        """When the exchange may start, what it follows apart."""
        exchange = self._round.exchanges[number]
        if without.codec and (without.order or without.dependency):
            moments = exchange.ready_s
        elif without.order or without.dependency:
            moments = exchange.coded_s
        else:
            moments = exchange.queued_s
        release_s = self._latest(moments, without)
        if self._after_backward and not without.dependency and exchange.turn == 0:
            release_s = max(release_s, self._latest(self._round.backward_end_s, without))
        return release_s

    def _follows_s(self, number: int, before_s: float, without: Without) -> float:
        """When an exchange may start that follows another, which ends then.

        The second half is handed over at its own time, all others when the one before is over.
        """
        exchange = self._round.exchanges[number]
        if exchange.half:
            return max(self._release_s(number, without), before_s)
        chained_s = self._measured[number].chained_s
        if without.codec:
            chained_s = max(0.0, chained_s - max(exchange.encode_s))
        return before_s + chained_s

    def _in_order(self, without: Without) -> list[float]:
        ends_s: list[float] = []
        channel_s: dict[int, float] = {}
        for number, exchange in enumerate(self._round.exchanges):
            before = self._followed[number]
            if before is None:
                release_s = self._release_s(number, without)
            else:
                release_s = self._follows_s(number, ends_s[before], without)
            ahead_s = channel_s.get(exchange.channel, -inf) + self._measured[number].early_s
            start_s = max(release_s, ahead_s) + self._gap_s(number, without)
            ends_s.append(start_s + self._duration_s(number, without))
            channel_s[exchange.channel] = ends_s[-1]
        return ends_s

    def _freely(self, without: Without) -> list[float]:
        """Whenever a channel is free it takes what has been released, the most needed first."""
        exchanges = self._round.exchanges
        ends_s = [-inf] * len(exchanges)
        missing = [1] * len(exchanges)
        follows = {b: n for n, b in enumerate(self._followed) if b is not None}
        arriving: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
        waiting: dict[int, list[tuple[float, float, int, float]]] = defaultdict(list)
        for number, exchange in enumerate(exchanges):
            length_s = self._duration_s(number, without)
            if self._followed[number] is not None and not without.dependency:
                continue  # arrives when the one that it follows has ended
            for release_s, part_s in self._parts(number, length_s, without):
                arriving[exchange.channel].append((release_s, number, part_s))
                missing[number] += 1
            missing[number] -= 1
        for found in arriving.values():
            heapify(found)
        free_s: dict[int, float] = defaultdict(lambda: -inf)
        while any(arriving.values()) or any(waiting.values()):
            start_s, channel = min(
                (free_s[c] if waiting[c] else max(free_s[c], arriving[c][0][0]), c)
                for c in {*arriving, *waiting}
                if waiting[c] or arriving[c]
            )
            while arriving[channel] and arriving[channel][0][0] <= start_s:
                release_s, number, part_s = heappop(arriving[channel])
                heappush(waiting[channel], (self._needed[number], release_s, number, part_s))
            _, _, number, part_s = heappop(waiting[channel])
            gap_s = self._gap_s(number, without) if missing[number] == 1 else 0.0
            end_s = free_s[channel] = start_s + gap_s + part_s
            missing[number] -= 1
            if missing[number]:
                continue
            ends_s[number] = end_s
            after = follows.get(number)
            if after is not None and not without.dependency:
                release_s = self._follows_s(after, end_s, without)
                turn = (release_s, after, self._duration_s(after, without))
                heappush(arriving[exchanges[after].channel], turn)
        return ends_s

    def _parts(self, number: int, length_s: float, without: Without) -> list[tuple[float, float]]:
        """When pieces of the exchange may start, and how long each takes."""
        if not without.dependency:
            return [(self._release_s(number, without), length_s)]
        origin = number
        while (before := self._followed[origin]) is not None:
            origin = before
        first, share = self._round.exchanges[origin], self._shares[number]
        if not first.parts_s:
            return [(self._release_s(origin, without), length_s)]
        bytes_s = 0.0 if without.transfer else share.transfer_s
        bytes_s += 0.0 if without.untold else share.divisible_s
        bytes_s += 0.0 if without.more_transfer else share.more_transfer_s
        parts = [(self._latest(m, without), s * bytes_s) for m, s in first.parts_s]
        last_s = max(moment for moment, _ in parts)
        return [*parts, (last_s, length_s - bytes_s)]
