"""The map for people and for programs: Markdown, CSV, SVG; pure."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from testbed.prediction.codec import CodecCost
from testbed.reporting.tiles import Tile, svg_tiles
from testbed.studies.map.setups import BACKEND, DENSE, HALF, SCHEDULERS, Answer, Point, answers


def to_markdown(points: Sequence[Point], costs: Sequence[CodecCost], note: str) -> str:
    """The answer at each bandwidth and latency, over models and numbers of workers.

    Args:
        points: all that was simulated.
        costs: recorded, of each codec.
        note: where the costs come from.
    """
    found = answers(points)
    speeds = list(dict.fromkeys(point.speed for point in points))
    codecs = list(dict.fromkeys(point.codec for point in points))
    parts = [
        "# Where compressing gradients makes a step shorter",
        f"{len(points)} simulated setups (model x workers x bandwidth x latency x codec, at "
        f"{len(speeds)} speeds of the codecs), of which nothing ran: step times on nominal links, "
        f"{BACKEND}'s ring, traces of the shipped models, and recorded times of encoding and "
        "decoding. Made by `testbed sweep map`.",
        f"The answer of a setup is *dense* where no codec shortens the step by 1 %, *{HALF}* where "
        f"one does and none is 1 % faster than {HALF}, else the fastest codec. Steps alone are "
        "compared: a codec that needs more steps to the same loss may still lose. Dense and "
        f"compressed messages have the fastest of {', '.join(SCHEDULERS)}.",
        f"Codecs: {', '.join(c for c in codecs if c != DENSE)}. {note}",
        *(text for speed in speeds for text in _section(speed, found)),
        "## What a codec costs",
        _cost_table(costs),
    ]
    return "\n\n".join(parts) + "\n"


def _section(speed: float, found: Iterable[Answer]) -> list[str]:
    mine = [answer for answer in found if answer.setup[4] == speed]
    counts = Counter(answer.codec for answer in mine)
    further = [a for a in mine if a.codec not in (DENSE, HALF)]
    words = (
        f"Of {len(mine)} setups dense messages are best in {counts[DENSE]}, {HALF} in "
        f"{counts[HALF]}, another codec in {len(further)}"
    )
    if further:
        words += (
            f" ({', '.join(f'{codec}: {n}' for codec, n in _others(counts))}), where it is "
            f"{median(a.over_bf16 for a in further):.2f} times as fast as {HALF} in the median"
        )
    return [f"## Codecs at {speed:g} times the recorded speed", f"{words}.", _grid(mine)]


def _others(counts: Counter[str]) -> list[tuple[str, int]]:
    return [(codec, n) for codec, n in counts.most_common() if codec not in (DENSE, HALF)]


def _grid(found: Sequence[Answer]) -> str:
    """A row for each bandwidth and latency, a column for each number of workers."""
    workers = list(dict.fromkeys(answer.setup[1] for answer in found))
    rows = [
        "| bandwidth | latency | " + " | ".join(f"{n} workers" for n in workers) + " |",
        "|---|---|" + "---|" * len(workers),
    ]
    for rate, latency in dict.fromkeys(answer.setup[2:4] for answer in found):
        cells = [_summed([a for a in found if a.setup[1:4] == (n, rate, latency)]) for n in workers]
        rows.append(f"| {rate} | {latency} | {' | '.join(cells)} |")
    rows.append("")
    rows.append(
        "A cell: the most frequent answer over the models, for how many of them, and its median "
        f"gain over dense and over {HALF}."
    )
    return "\n".join(rows)


def _summed(found: Sequence[Answer]) -> str:
    codec, number = Counter(answer.codec for answer in found).most_common(1)[0]
    if codec == DENSE:
        return f"dense ({number}/{len(found)})"
    mine = [answer for answer in found if answer.codec == codec]
    gains = f"x{median(a.over_dense for a in mine):.2f}"
    if codec != HALF:
        gains += f", x{median(a.over_bf16 for a in mine):.2f}"
    return f"{codec} ({number}/{len(found)}): {gains}"


def _cost_table(costs: Sequence[CodecCost]) -> str:
    rows = [
        "| codec | workers | elements | bytes sent | encode ms | decode ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for cost in costs:
        last = cost.samples[-1]
        rows.append(
            f"| {cost.compressor} | {cost.num_workers} | {last.num_elements:.0f} "
            f"| {sum(r.num_bytes for r in last.rounds):.0f} | {1e3 * last.compute_s[0]:.2f} "
            f"| {1e3 * sum(last.compute_s[1:]):.2f} |"
        )
    return "\n".join(rows)


def to_csv(points: Iterable[Point]) -> str:
    """One line for each setup under each codec."""
    text = io.StringIO()
    names = Point.__struct_fields__
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for point in points:
        values = msgspec.structs.astuple(point)
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])
    return text.getvalue()


def to_svg(points: Sequence[Point], speed: float) -> str:
    """The map: a tile for each setup, coloured by the answer, with the gain over dense."""
    found = [answer for answer in answers(points) if answer.setup[4] == speed]
    columns = list(dict.fromkeys(f"{a.setup[2]} {a.setup[3]}" for a in found))
    rows = list(dict.fromkeys(f"{a.setup[0]}, {a.setup[1]}" for a in found))
    tiles = {
        (f"{a.setup[0]}, {a.setup[1]}", f"{a.setup[2]} {a.setup[3]}"): Tile(
            "dense" if a.codec == DENSE else a.codec,
            "" if a.codec == DENSE else f"{a.over_dense:.3g}",
        )
        for a in found
    }
    title = f"Fastest codec and its gain over dense, codecs at {speed:g} x the recorded speed"
    return svg_tiles(title, rows, columns, tiles) + "\n"
