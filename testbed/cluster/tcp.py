"""TCP settings of an emulated node; pure."""

from __future__ import annotations

SEND_WINDOW_S = 1e-3
LEAST_SEND_WINDOW_BYTES = 1 << 16


def send_window_bytes(kernel_bps: float, round_trip_s: float = 0.0) -> int:
    """Bytes that one connection may have under way and in queues.

        W = R / 8 (1 ms + 2 l),   R bit/s in the kernel, l the latency of one way there

    What a link carries in a millisecond: no loss ever tells senders to slow down here, so without
    a bound each would fill the queues with megabytes, connections would share a link by how much
    they queued, and an urgent message would stand behind all of it. What a latency keeps on the way
    (bandwidth times round trip) comes on top, or no connection would fill its link.

    Args:
        kernel_bps: the link's rate.
        round_trip_s: 2 l, where netem makes latency.

    Example:
        >>> send_window_bytes(1e9), send_window_bytes(1e6), send_window_bytes(1e9, 0.02)
        (125000, 65536, 2625000)
    """
    return max(LEAST_SEND_WINDOW_BYTES, round(kernel_bps / 8 * (SEND_WINDOW_S + round_trip_s)))


def tcp_settings(kernel_bps: float, round_trip_s: float = 0.0) -> dict[str, str]:
    """Path below `/proc/sys/net` -> value, for a node whose link has this rate.

    `reno` is the one congestion control that a namespace may always choose; on a network without
    loss it does nothing but grow. A pause for computing is no reason to begin slowly again.
    """
    window = send_window_bytes(kernel_bps, round_trip_s)
    return {
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_wmem": f"4096 {LEAST_SEND_WINDOW_BYTES} {window}",
    }
