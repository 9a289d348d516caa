"""What an exchange's time is made of: start-up and bytes, held against the link and usual steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from testbed.base.link import Link, phases_s
from testbed.causes.exchanges import Exchange, Round

Identity = tuple[int, int]  # message, turn
NOISE = 0.15  # share by which a duration may differ from start-up + bytes without another cause
LEAST_TINY = 0.2  # share of all exchanges that start-ups of small messages take to be called so
MANY = 4  # small messages in a step are many from so many on
MOST_STARTUP_S = 2e-3  # of a hop of a ring; what a message takes beyond is no start-up
SPREAD = 1.5  # largest over smallest message from which start-up and bytes can be told apart


def identity(exchange: Exchange) -> Identity:
    """What is the same exchange in every step."""
    return exchange.message, exchange.turn


def usual_s(rounds: Iterable[Round]) -> dict[Identity, float]:
    """The median wait-free time of each exchange over the steps."""
    times: dict[Identity, list[float]] = defaultdict(list)
    for each in rounds:
        for exchange in each.exchanges:
            times[identity(exchange)].append(exchange.wait_free_s)
    return {key: median(found) for key, found in times.items()}


@dataclass(frozen=True)
class Costs:
    """Start-up and transfer of every exchange in some steps.

        T(M) = S(M) + delta + B(M) + epsilon M

    S and B are the link's (0 without one), delta and epsilon what the steps' own wait-free times
    add; halves have half of each.

    Attributes:
        startup_s: S of each exchange.
        transfer_s: B of each.
        more_startup_s: delta of a whole message.
        more_s_per_byte: epsilon of one.
        missed_s: `missed_in` of the median step: the line follows most exchanges, and a step waits
            for all; 0 where no line was fitted.
        untold_s: of each the wait-free time, where without a link messages of about one size do
            not tell start-up from bytes; else empty.
        has_link: whether S and B are of a link.
        sizes: bytes of each.
        halves: those that are a half of their message's exchange.
    """

    startup_s: dict[Identity, float]
    transfer_s: dict[Identity, float]
    more_startup_s: float = 0.0
    more_s_per_byte: float = 0.0
    missed_s: float = 0.0
    has_link: bool = False
    sizes: dict[Identity, float] = field(default_factory=dict)
    untold_s: dict[Identity, float] = field(default_factory=dict)
    halves: frozenset[Identity] = frozenset()

    @classmethod
    def of(cls, rounds: Sequence[Round], link: Link | None) -> Costs:
        """Fitted to the wait-free times of these steps."""
        some = {identity(x): x for each in rounds for x in each.exchanges}
        startup, transfer = {}, {}
        for key, exchange in some.items():
            phases = (0.0, 0.0) if link is None else phases_s(link, exchange.num_bytes)
            half = 0.5 if exchange.half else 1.0
            startup[key], transfer[key] = phases[0] * half, phases[1] * half
        sizes = {key: x.num_bytes for key, x in some.items()}
        own = usual_s(rounds)
        halves = frozenset(key for key, x in some.items() if x.half)
        plain = cls(startup, transfer, has_link=link is not None, sizes=sizes, halves=halves)
        if max(sizes.values()) < SPREAD * max(1.0, min(sizes.values())):
            return plain if link is not None else replace(plain, untold_s=own)
        delta, epsilon = _line(plain, own)
        line = replace(plain, more_startup_s=delta, more_s_per_byte=epsilon)
        return replace(line, missed_s=median(line.missed_in(each) for each in rounds))

    def missed_in(self, played: Round) -> float:
        """What a step's exchanges take more than this together, of a whole message in the mean."""
        keys = [identity(x) for x in played.exchanges]
        taken_s = sum(x.wait_free_s for x in played.exchanges)
        missed_s = taken_s - sum(self.time_s(key) for key in keys)
        return missed_s / max(0.5, sum(self.share(key) for key in keys))

    def time_s(self, key: Identity) -> float:
        """Start-up and transfer."""
        return self.whole_startup_s(key) + self.whole_transfer_s(key)

    def share(self, key: Identity) -> float:
        """Of a whole message's exchange."""
        return 0.5 if key in self.halves else 1.0

    def whole_startup_s(self, key: Identity) -> float:
        """S + delta, at least 0."""
        return max(0.0, self.startup_s[key] + self.share(key) * self.more_startup_s)

    def whole_transfer_s(self, key: Identity) -> float:
        """B + epsilon M, at least 0."""
        more_s = self.share(key) * self.more_s_per_byte * self.sizes[key]
        return max(0.0, self.transfer_s[key] + more_s)


def _line(plain: Costs, own: Mapping[Identity, float]) -> tuple[float, float]:
    """Fit delta and epsilon by least squares, each miss over the root of its time.

    Long exchanges count more than in relative misses: they are what is exposed, and links often
    let short ones through faster than their line says. Outliers weigh less. Neither start-up nor
    time per byte falls below 0.
    """
    wholes = {k: t / plain.share(k) for k, t in own.items()}
    rows = [
        (plain.sizes[k], t - plain.time_s(k) / plain.share(k), 1 / max(t, 1e-9))
        for k, t in wholes.items()
    ]
    least = -median(s / plain.share(k) for k, s in plain.startup_s.items())
    slopes = [plain.transfer_s[k] / plain.share(k) / m for k, m in plain.sizes.items() if m > 0]
    flattest = -min(slopes, default=0.0)
    weights = [w for _, _, w in rows]
    delta = epsilon = 0.0
    for _ in range(5):
        s0 = sum(weights)
        s1 = sum(w * m for w, (m, _, _) in zip(weights, rows, strict=True))
        s2 = sum(w * m * m for w, (m, _, _) in zip(weights, rows, strict=True))
        r0 = sum(w * r for w, (_, r, _) in zip(weights, rows, strict=True))
        r1 = sum(w * m * r for w, (m, r, _) in zip(weights, rows, strict=True))
        determinant = s0 * s2 - s1 * s1
        if determinant <= 1e-12 * s0 * s2:
            return 0.0, 0.0
        delta, epsilon = (s2 * r0 - s1 * r1) / determinant, (s0 * r1 - s1 * r0) / determinant
        if delta < least:
            delta, epsilon = least, (r1 - least * s1) / s2
        if epsilon < flattest:
            epsilon, delta = flattest, max(least, (r0 - flattest * s1) / s0)
        # soft L1: a disturbed message pulls no harder however far off it is
        weights = [w0 / (1 + abs(r - delta - epsilon * m) * w0 / NOISE) for m, r, w0 in rows]
    return delta, epsilon


@dataclass(frozen=True)
class Share:
    """What one exchange's duration is made of, seconds.

    Attributes:
        more_startup_s: by which start-ups have grown since the usual steps.
        more_transfer_s: likewise bytes.
        startup_s: of a message that is not tiny, and what start-ups take more than the link's.
        tiny_s: start-up of one of many messages whose start-up is more than their transfer.
        transfer_s: bytes.
        untold_s: start-up or bytes, which cannot be told apart.
        divisible_s: of these what is more than start-ups take, so that a message may be divided.
        host_s: beyond these while the host was busy.
        rest_s: beyond these otherwise.
    """

    startup_s: float = 0.0
    tiny_s: float = 0.0
    transfer_s: float = 0.0
    untold_s: float = 0.0
    divisible_s: float = 0.0
    host_s: float = 0.0
    rest_s: float = 0.0
    more_startup_s: float = 0.0
    more_transfer_s: float = 0.0

    @classmethod
    def of(
        cls,
        exchange: Exchange,
        costs: Costs,
        usual: Costs,
        tiny: frozenset[Identity],
        *,
        is_busy: bool,
    ) -> Share:
        """The exchange's duration, divided."""
        key, whole_s = identity(exchange), exchange.duration_s
        known_s = costs.time_s(key) or costs.untold_s.get(key, 0.0)
        if known_s <= 0:
            return cls(rest_s=whole_s)
        beyond_s = max(0.0, whole_s - known_s)
        if beyond_s <= NOISE * known_s:
            beyond_s = 0.0
        host_s, rest_s = (beyond_s, 0.0) if is_busy else (0.0, beyond_s)
        if costs.time_s(key) <= 0:
            untold_s = whole_s - beyond_s
            startup_s = MOST_STARTUP_S * 2 * (len(exchange.begin_s) - 1)
            bytes_s = min(untold_s, usual.untold_s.get(key, 0.0)) - startup_s  # growth may be both
            rest = {"host_s": host_s, "rest_s": rest_s}
            return cls(untold_s=untold_s, divisible_s=max(0.0, bytes_s), **rest)
        factor = (whole_s - beyond_s) / known_s
        startup_s = factor * costs.whole_startup_s(key)
        transfer_s = factor * costs.whole_transfer_s(key)
        more_startup_s = more_transfer_s = 0.0
        if key in usual.sizes:
            more_startup_s = max(0.0, startup_s - factor * usual.whole_startup_s(key))
            more_transfer_s = max(0.0, transfer_s - factor * usual.whole_transfer_s(key))
        startup_s -= more_startup_s
        own_s = costs.startup_s[key] if costs.has_link else costs.whole_startup_s(key)
        tiny_s = min(startup_s, factor * own_s) if key in tiny else 0.0
        return cls(
            startup_s=startup_s - tiny_s,
            tiny_s=tiny_s,
            transfer_s=transfer_s - more_transfer_s,
            host_s=host_s,
            rest_s=rest_s,
            more_startup_s=more_startup_s,
            more_transfer_s=more_transfer_s,
        )


def tiny_messages(costs: Costs, usual: Costs) -> frozenset[Identity]:
    """Exchanges below the break-even size a / b, if a step has many whose start-ups take long.

    Args:
        costs: of the steps.
        usual: of the steps that they are held against; a start-up that has grown since makes no
            message tiny.
    """
    base = costs if costs.has_link else usual
    small: dict[Identity, float] = {}
    for key in costs.sizes:
        if key not in base.sizes:
            continue
        startup_s = base.startup_s[key] if base.has_link else base.whole_startup_s(key)
        transfer_s = base.transfer_s[key] if base.has_link else base.whole_transfer_s(key)
        if startup_s > transfer_s:
            small[key] = startup_s
    whole_s = sum(base.time_s(key) for key in base.sizes)
    is_much = sum(small.values()) >= LEAST_TINY * whole_s
    is_many = len({message for message, _ in small}) >= MANY  # halves and rounds are no more
    return frozenset(small) if is_many and is_much else frozenset()
