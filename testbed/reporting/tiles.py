"""Maps of coloured tiles as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.reporting.drawing import COLOURS, TOP, WIDTH, svg_text

TILE_WIDTH, TILE_HEIGHT, ROW_LABEL = 44, 20, 180


@dataclass(frozen=True)
class Tile:
    """One field of a map.

    Attributes:
        kind: what its colour says.
        text: in it.
    """

    kind: str
    text: str


def svg_tiles(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    tiles: Mapping[tuple[str, str], Tile],
) -> str:
    """A map of coloured tiles with a legend of their kinds, as an `<svg>` element.

    Args:
        title: above it.
        rows: labels from top to bottom.
        columns: labels from left to right.
        tiles: of row and column.

    Example:
        >>> svg_tiles("t", ["a"], ["x", "y"], {("a", "x"): Tile("dense", "1.0")}).count("<rect")
        3
    """
    kinds = list(dict.fromkeys(tile.kind for tile in tiles.values()))
    colours = {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}
    head = TOP + 60 + max(map(len, columns), default=0) * 6
    width = max(WIDTH, ROW_LABEL + TILE_WIDTH * len(columns) + 20)
    height = head + TILE_HEIGHT * len(rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        svg_text(8, 20, title, size=15),
    ]
    for number, kind in enumerate(kinds):
        x = 8 + number * (width - 8) / len(kinds)
        parts.append(
            f'<rect x="{x:.0f}" y="34" width="12" height="12" fill="{colours[kind]}" '
            'fill-opacity="0.5"/>'
        )
        parts.append(svg_text(x + 16, 44, kind))
    for number, label in enumerate(columns):
        x = ROW_LABEL + TILE_WIDTH * (number + 0.6)
        turned = svg_text(x, head - 6, label, size=11)
        parts.append(turned.replace("<text ", f'<text transform="rotate(-60 {x:.1f} {head - 6})" '))
    for line, row in enumerate(rows):
        y = head + TILE_HEIGHT * line
        parts.append(svg_text(ROW_LABEL - 6, y + 14, row, anchor="end"))
        for number, column in enumerate(columns):
            tile = tiles.get((row, column))
            if tile is None:
                continue
            x = ROW_LABEL + TILE_WIDTH * number
            parts.append(
                f'<rect x="{x}" y="{y}" width="{TILE_WIDTH - 1}" height="{TILE_HEIGHT - 1}" '
                f'fill="{colours[tile.kind]}" fill-opacity="0.5"/>'
            )
            parts.append(svg_text(x + TILE_WIDTH / 2, y + 14, tile.text, anchor="middle", size=10))
    return "\n".join([*parts, "</svg>"])
