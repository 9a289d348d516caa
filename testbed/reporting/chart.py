"""Line charts as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase

SHARED = "*"  # where several lines meet


def text_chart(
    x_labels: Sequence[str], series: Mapping[str, Sequence[float]], height: int = 14
) -> str:
    """One column for each x, one letter for each line; the scale is linear from 0.

    Lines that meet in a cell are a `*`. The legend names lines in the order of their last values.

    Args:
        x_labels: of the columns.
        series: name -> one value of 0 or more for each column.
        height: rows.

    Example:
        >>> print(text_chart(["2", "4"], {"wfbp": [1.0, 0.5], "osf": [1.0, 0.75]}, height=5))
        1.00 | *
        0.75 |    b
        0.50 |    a
        0.25 |
        0.00 |
             +------
               2  4
        b osf  a wfbp
    """
    letters = dict(zip(series, ascii_lowercase, strict=False))
    width = max([len(label) for label in x_labels], default=0) + 2
    top = max([v for values in series.values() for v in values], default=0.0) or 1.0
    rows = [[" "] * (width * len(x_labels)) for _ in range(height)]
    for name, values in series.items():
        for column, value in enumerate(values):
            row = rows[height - 1 - round(value / top * (height - 1))]
            place = column * width + width // 2
            row[place] = letters[name] if row[place] == " " else SHARED
    lines = [
        f"{top * (height - 1 - number) / (height - 1):4.2f} |{''.join(row)}".rstrip()
        for number, row in enumerate(rows)
    ]
    axis = "".join(label.center(width) for label in x_labels)
    ends = sorted(series, key=lambda name: -series[name][-1])
    legend = "  ".join(f"{letters[name]} {name}" for name in ends)
    return "\n".join(
        [*lines, "     +" + "-" * (width * len(x_labels)), f"      {axis}".rstrip(), legend]
    )
