"""Quantities with units to numbers and back: `"64M"` bytes, `"10gbit"` bits per second, `"200us"`.

Sizes take power-of-two suffixes as nccl-tests and OSU do (`4K` = 4096 bytes); rates are SI.
"""

from __future__ import annotations

import re

from testbed.base.errors import UsageError

_SIZE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RATE_BPS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `8`, `4K`, `64MiB`; suffixes are powers of two.

    Raises:
        UsageError: the text is no size.

    Example:
        >>> parse_bytes("4K"), parse_bytes("1.5MiB")
        (4096, 1572864)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"size is {text!r}; expected a number of bytes such as 8, 4K or 64M")
    return round(float(match[1]) * _SIZE[match[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """A size for people, in powers of two.

    Example:
        >>> format_bytes(1572864), format_bytes(12), format_bytes(1010 * 2**20)
        ('1.5 MiB', '12 B', '1010 MiB')
    """
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as `10gbit`, `100mbit`; suffixes are powers of ten.

    Raises:
        UsageError: the text is no rate.

    Example:
        >>> parse_rate("10gbit"), parse_rate("2.5mbit")
        (10000000000.0, 2500000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"rate is {text!r}; expected bits per second such as 10gbit or 100mbit")
    return float(match[1]) * _RATE_BPS[match[2].lower()]


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as `10`, `200us`, `1.5ms`.

    Raises:
        UsageError: the text is no duration.

    Example:
        >>> parse_seconds("1.5ms"), parse_seconds("10")
        (0.0015, 10.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|ns)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"duration is {text!r}; expected seconds such as 10, 1.5ms or 200us")
    return float(match[1]) * _TIME_S[(match[2] or "s").lower()]


def format_seconds(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> format_seconds(0.00021), format_seconds(75), format_seconds(0)
        ('210 us', '1m15s', '0 s')
    """
    if 0 <= seconds < 1e-9:
        return "0 s"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def rounded(figure: float) -> str:
    """Three digits that count, never an exponent, never fewer digits than the whole part has.

    Example:
        >>> rounded(12.345), rounded(0.01234), rounded(123456.7), rounded(0.0)
        ('12.3', '0.0123', '123457', '0')
    """
    if figure == 0:
        return "0"
    if abs(figure) >= 100:
        return f"{figure:.0f}"
    digits = 3
    while abs(figure) < 1 and digits < 9 and abs(figure) < 10 ** (2 - digits):
        digits += 1
    places = 1 if abs(figure) >= 10 else 2 if abs(figure) >= 1 else digits
    return f"{figure:.{places}f}"
