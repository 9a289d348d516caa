"""A link measured on one emulated cluster as it is on another: what hosts and wires need; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from testbed.base.errors import UsageError
from testbed.base.link import PROCESSOR_TIMES, Link
from testbed.prediction.extrapolate import each_piece


@dataclass(frozen=True)
class Setting:
    """The properties of an emulated cluster on which a message's time depends.

    Attributes:
        rate_bps: of the slowest link, as emulated.
        dilation: how many times slower than there everything happens here.
        latency_s: that latency adds to every exchange, as emulated.
        cpu_policy: under which its nodes share this machine's cores.
        cores: whether any node's threads may be on any of them (`shared`) or each node keeps to its
            share (`pinned`).
        awake: whether idle cores polled instead of halting.
        nodes_per_core: how many nodes share a core, at least 1; None: not known.
    """

    rate_bps: float
    dilation: float = 1.0
    latency_s: float = 0.0
    cpu_policy: str = "batch"
    cores: str = "pinned"
    awake: bool = True
    nodes_per_core: float | None = None

    def __post_init__(self) -> None:
        if not (self.rate_bps > 0 and self.dilation > 0 and self.latency_s >= 0):
            raise UsageError(
                f"an emulated cluster has rate {self.rate_bps:g} bit/s, dilation "
                f"{self.dilation:g}, latency {self.latency_s:g} s; expected rate and dilation "
                "above 0, latency 0 or more"
            )


def carried(link: Link, measured: Setting, asked: Setting, wire_s_per_byte: float = inf) -> Link:
    """A link measured on one emulated cluster as it is on another, in the other one's time.

        a' = (a - L) D / D' + L',   b' = w R / R' + (b - w) D / D' c' / c,   w <= b

    R, D, L, c are rate, dilation, latency and nodes per core where it was measured, R', D', L', c'
    those asked for. Of the time of a byte the slowest link needs w; the rest is what the hosts
    need, which do not grow slower with the dilation, but share this machine's cores. A start-up is
    theirs, too, and the latency; so are processor times, o' = o D / D'. Slow-downs stay.

    Args:
        link: a in s, b in s/byte.
        measured: where that was.
        asked: where it is wanted.
        wire_s_per_byte: w, what the network alone needs there; infinite: all of b.

    Raises:
        UsageError: their nodes share this machine's cores in different ways.

    Example:
        >>> link = Link(backend="x", num_workers=4, latency_s=1e-4, seconds_per_byte=1.3e-9)
        >>> there = carried(link, Setting(10e9, dilation=10), Setting(5e9, dilation=20), 1.2e-9)
        >>> f"{there.latency_s:.3g} {there.seconds_per_byte:.3g}"
        '5e-05 2.45e-09'
    """
    theirs, ours = _sharing(measured), _sharing(asked)
    if theirs != ours:
        raise UsageError(
            f"the link was measured under {theirs} and the cluster has {ours}: what hosts need for "
            f"a message differs; measure the link again, or add {theirs} to --cluster, where this "
            "machine's cores allow it"
        )

    def start_up_s(latency_s: float) -> float:
        hosts_s = max(0.0, latency_s - measured.latency_s)
        return hosts_s * measured.dilation / asked.dilation + asked.latency_s

    here, there = asked.nodes_per_core, measured.nodes_per_core
    crowd = 1.0 if here is None or there is None else here / there

    def byte_s(seconds_per_byte: float) -> float:
        wire_s = min(wire_s_per_byte, seconds_per_byte)
        hosts_s = (seconds_per_byte - wire_s) * measured.dilation / asked.dilation * crowd
        return wire_s * measured.rate_bps / asked.rate_bps + hosts_s

    found = each_piece(link, lambda a, b: (start_up_s(a), byte_s(b)))
    times = _processor_times(link, measured.dilation / asked.dilation)
    return msgspec.structs.replace(found, **times)


def _sharing(setting: Setting) -> str:
    awake = "auto" if setting.awake else "no"
    return f"cpu_policy={setting.cpu_policy},cores={setting.cores},awake={awake}"


def setting_of(record: Mapping[str, Any], num_startups: float | None = None) -> Setting:
    """The setting in the record that a link or a cell keeps of its cluster (`cluster`).

    Records without CPU policy, cores or `cores_awake` are older than these options: their clusters
    had the usual policy, shared cores, and cores that halted when idle.

    Args:
        record: of the cluster.
        num_startups: messages of an exchange that wait for each other, each for the latency where
            packets are delayed; None = unknown.

    Raises:
        UsageError: packets are delayed there, and it is not known how often an exchange waits.

    Example:
        >>> ways = {"node": 1, "up_bps": 1e9, "down_bps": 5e8}
        >>> setting = setting_of({"links": [ways], "dilation": 10.0, "latency": "none"})
        >>> setting.rate_bps, setting.cpu_policy, setting.cores, setting.awake
        (500000000.0, 'other', 'shared', False)
    """
    latency_s = 0.0
    if record.get("latency") in ("netem", "relay"):
        if num_startups is None:
            raise UsageError(
                "the link was measured where packets were delayed, so that what hosts need for a "
                "message is not known apart; give one that was measured without latency, or leave "
                "out --link: it is measured where it is used"
            )
        latency_s = num_startups * record["latency_s"]
    elif record.get("latency") == "injected":
        latency_s = record["latency_s"]
    shares = Counter(core for cores in record.get("node_cores") or () for core in cores)
    return Setting(
        min(min(link["up_bps"], link["down_bps"]) for link in record["links"]),
        record["dilation"],
        latency_s,
        record.get("cpu_policy", "other"),
        record.get("cores", "shared"),
        record.get("cores_awake") == "yes",
        float(max(shares.values())) if shares else None,
    )


def stretched_link(link: Link, factor: float) -> Link:
    """The link with every time multiplied, as by the dilation of an emulated cluster.

    The figures of its fit (`Link.extra["fit"]`) go with it; slow-downs are ratios and stay.

    Example:
        >>> slow = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=8e-9)
        >>> stretched_link(slow, 0.5).time_s(1000) == slow.time_s(1000) / 2
        True
    """
    extra = dict(link.extra)
    if "fit" in extra:
        extra["fit"] = {**extra["fit"], "sizes": [_row(r, factor) for r in extra["fit"]["sizes"]]}
    if "missing_s" in extra:
        extra["missing_s"] = [time_s * factor for time_s in extra["missing_s"]]
    stretched = each_piece(link, lambda a, b: (a * factor, b * factor))
    return msgspec.structs.replace(stretched, extra=extra, **_processor_times(link, factor))


def _processor_times(link: Link, factor: float) -> dict[str, float]:
    return {name: getattr(link, name) * factor for name in PROCESSOR_TIMES}


def _row(row: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**row, "time_s": row["time_s"] * factor, "fitted_s": row["fitted_s"] * factor}
