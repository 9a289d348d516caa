"""A link measured on one emulated cluster, as it will be on another; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.errors import UsageError
from testbed.prediction.extrapolate import each_piece
from testbed.prediction.link import Link


@dataclass(frozen=True)
class Setting:
    """What of an emulated cluster a message's time depends on.

    Attributes:
        rate_bps: of the slowest link, as emulated.
        dilation: how many times slower than there everything happens here.
        latency_s: that every exchange waits before it starts, as emulated.
        cpu_policy: under which its nodes share this machine's cores.
        cores: whether any node's threads may be on any of them (`shared`) or each node keeps to its
            share (`pinned`).
        awake: whether idle cores polled instead of halting.
    """

    rate_bps: float
    dilation: float = 1.0
    latency_s: float = 0.0
    cpu_policy: str = "batch"
    cores: str = "pinned"
    awake: bool = True

    def __post_init__(self) -> None:
        if not (self.rate_bps > 0 and self.dilation > 0 and self.latency_s >= 0):
            raise UsageError(
                f"an emulated cluster has rate {self.rate_bps:g} bit/s, dilation "
                f"{self.dilation:g}, latency {self.latency_s:g} s; expected rate and dilation "
                "above 0, latency 0 or more"
            )


def carried(link: Link, measured: Setting, asked: Setting) -> Link:
    """The link on the asked cluster, in that cluster's time.

        a' = (a - L) D / D' + L',   b' = b R / R'

    R, D, L are rate, dilation and latency where it was measured, R', D', L' those asked for. A byte
    takes as long as the slowest link needs for it; a start-up is what the hosts need, which do not
    grow slower with the dilation, and the latency. Slow-downs are ratios and stay.

    Raises:
        UsageError: their nodes share this machine's cores in different ways.

    Example:
        >>> link = Link(backend="x", num_workers=4, latency_s=1e-4, seconds_per_byte=1.3e-9)
        >>> there = carried(link, Setting(10e9, dilation=10), Setting(5e9, dilation=20))
        >>> f"{there.latency_s:.3g} {there.seconds_per_byte:.3g}"
        '5e-05 2.6e-09'
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

    slower = measured.rate_bps / asked.rate_bps

    return each_piece(link, lambda a, b: (start_up_s(a), b * slower))


def _sharing(setting: Setting) -> str:
    awake = "auto" if setting.awake else "no"
    return f"cpu_policy={setting.cpu_policy},cores={setting.cores},awake={awake}"


def setting_of(record: Mapping[str, Any]) -> Setting:
    """The setting in the record that a link or a cell keeps of its cluster (`cluster`).

    Records that tell no CPU policy, or nothing of cores or whether they were kept awake, are of a
    time when there was the usual policy only, and cores were shared and halted.

    Raises:
        UsageError: latency is made by netem there: a message crosses the network several times,
            each algorithm as often as it does, so that its start-up cannot be carried over.

    Example:
        >>> ways = {"node": 1, "up_bps": 1e9, "down_bps": 5e8}
        >>> setting = setting_of({"links": [ways], "dilation": 10.0, "latency": "none"})
        >>> setting.rate_bps, setting.cpu_policy, setting.cores, setting.awake
        (500000000.0, 'other', 'shared', False)
    """
    if record.get("latency") == "netem":
        raise UsageError(
            "a link is to be carried from one emulated cluster to another, and netem makes latency "
            "in one of them; measure the link where it is used: leave out --link"
        )
    return Setting(
        min(min(link["up_bps"], link["down_bps"]) for link in record["links"]),
        record["dilation"],
        record["latency_s"] if record.get("latency") == "injected" else 0.0,
        record.get("cpu_policy", "other"),
        record.get("cores", "shared"),
        record.get("cores_awake") == "yes",
    )
