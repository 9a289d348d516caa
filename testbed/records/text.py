"""Columns, durations and rates of the tables that people read."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first flush left, the others flush right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(widths[c]) for c, cell in enumerate(row) if c)]
        ).rstrip()
        for row in rows
    )


def rate_text(bits_per_s: float) -> str:
    """A rate for people.

    Example:
        >>> rate_text(1.25e10), rate_text(3e6)
        ('12.5 Gbit/s', '3 Mbit/s')
        >>> rate_text(999999999.9), rate_text(float("inf"))
        ('1 Gbit/s', 'no limit')
    """
    if bits_per_s == float("inf"):
        return "no limit"
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= 0.9995 * scale:  # else three digits would say 1e+03 of the unit below
            return f"{bits_per_s / scale:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"
