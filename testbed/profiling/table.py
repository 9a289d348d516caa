"""Traces and links as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.base.link import PROCESSOR_TIMES, Link
from testbed.base.trace import Trace
from testbed.base.units import format_bytes, format_seconds

NUM_SLOWEST = 10

POOR_FIT = 0.15  # median absolute residual above which the table calls the fit poor


def trace_table(trace: Trace) -> str:
    """Totals, what the hooks cost, the DAG, the slowest tensors and the largest activations."""
    recorded = trace.extra["recorded"]
    elements = sum(t.num_elements for t in trace.tensors)
    lines = [
        f"# testbed profile: {trace.name} on {trace.device}, batch {trace.batch_size}, "
        f"{recorded['threads']} thread(s)",
        f"# {len(trace.tensors)} tensors, {elements:,} elements, {format_bytes(trace.num_bytes)}",
        f"# medians over {recorded['repeats']} steps after {recorded['warmup']} of warm-up",
        f"# forward  {format_seconds(trace.forward_s):>8} (without hooks "
        f"{format_seconds(recorded['unhooked_forward_s'])}), of it loss "
        f"{_seconds_or_unknown(recorded['loss_s'])}",
        f"# backward {format_seconds(trace.backward_s):>8} (without hooks "
        f"{format_seconds(recorded['unhooked_backward_s'])})",
        f"# {_dag_line(trace)}",
        "#",
        *_slowest(trace),
        "#",
        *_activations(trace.extra["activation_bytes"]),
    ]
    return "\n".join(lines) + "\n"


def imported_table(trace: Trace) -> str:
    """Where it is from, totals and the slowest tensors, of a trace that was not recorded here."""
    found = trace.extra["imported"]
    elements = sum(t.num_elements for t in trace.tensors)
    lines = [
        f"# testbed profile: {trace.name} on {trace.device}, batch {trace.batch_size}, from "
        f"{found['from']}'s {found['file']}",
        f"# {len(trace.tensors)} tensors, {elements:,} elements, {format_bytes(trace.num_bytes)}",
        f"# medians over {found['repeats']} passes; {found['left_out']} incomplete ones left out",
        f"# forward  {format_seconds(trace.forward_s):>8}",
        f"# backward {format_seconds(trace.backward_s):>8}",
        "#",
        *_slowest(trace),
    ]
    return "\n".join(lines) + "\n"


def _seconds_or_unknown(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)


def _dag_line(trace: Trace) -> str:
    found = trace.extra["dag"]
    if trace.consumers is None:
        return f"layers: a chain ({found['reason']})"
    why = f" ({found['reason']})" if found["reason"] else ""
    return f"layers: a DAG, from {found['source']}{why}"


def _slowest(trace: Trace) -> list[str]:
    ranked = sorted(trace.tensors, key=lambda t: t.forward_s + t.backward_s, reverse=True)
    rows = [("forward", "backward", "bytes", "slowest tensors")]
    rows += [
        (
            format_seconds(t.forward_s),
            format_seconds(t.backward_s),
            format_bytes(t.num_bytes),
            t.name,
        )
        for t in ranked[:NUM_SLOWEST]
    ]
    return _columns(rows, widths=(10, 10, 10))


def _activations(activation_bytes: dict[str, int]) -> list[str]:
    ranked = sorted(activation_bytes.items(), key=lambda item: item[1], reverse=True)
    rows = [("bytes", "largest activations")]
    rows += [(format_bytes(num_bytes), name) for name, num_bytes in ranked[:NUM_SLOWEST]]
    rows.append((format_bytes(sum(activation_bytes.values())), "of all layers"))
    return _columns(rows, widths=(10,))


def link_table(link: Link) -> str:
    """The fit, its pieces and slow-down, and per size what was measured and by how much it misses.

    A residual is measured over fitted time less 1; the largest is that of one sample.
    """
    lines = [f"# fit of {link.backend}, {link.num_workers} worker(s)"]
    if link.num_workers == 1:
        return lines[0] + ": nothing is sent\n"
    lines.append(f"# one line: {_line(link.latency_s, link.seconds_per_byte)}")
    for piece in link.pieces or ():
        reach = "beyond" if piece.max_bytes is None else f"up to {format_bytes(piece.max_bytes)}"
        lines.append(f"#   {reach}: {_line(piece.latency_s, piece.seconds_per_byte)}")
    lines += _processor_lines(link)
    table = link.concurrency_slowdown
    words = "not measured (one channel)" if table is None else ", ".join(f"{s:.2f}" for s in table)
    lines.append(f"# slow-down of 1, 2, ... messages at once: {words}")
    fit = link.extra["fit"]
    rows = [("size", "samples", "measured", "fitted", "residual", "worst")]
    rows += [
        (
            format_bytes(row["num_bytes"]),
            str(row["num_samples"]),
            format_seconds(row["time_s"]),
            format_seconds(row["fitted_s"]),
            f"{100 * row['relative_residual_median']:+.1f} %",
            f"{100 * row['relative_residual_max']:+.1f} %",
        )
        for row in fit["sizes"]
    ]
    lines += _columns(rows, widths=(10, 8, 10, 10, 9, 9))
    typical = fit["relative_residual_median"]
    lines.append(
        f"# median absolute residual of all samples {100 * typical:.1f} % "
        "(rows: of their medians, and their worst sample)"
    )
    if typical > POOR_FIT:
        lines.append(
            f"# a poor fit (more than {100 * POOR_FIT:.0f} %): predictions from it are no better; "
            "measure again when nothing else runs here"
        )
    return "\n".join(lines) + "\n"


def _processor_lines(link: Link) -> list[str]:
    """Processor times of a message, where they were measured."""
    if not any(getattr(link, name) for name in PROCESSOR_TIMES):
        return []
    submit, landing, thread = (format_seconds(getattr(link, name)) for name in PROCESSOR_TIMES)
    return [
        f"# processor time of a message: {submit} to submit and {landing} to take its result, on "
        "the computing thread;",
        f"#   {thread} on the backend's own threads (part of the start-up, polling included)",
    ]


def _line(latency_s: float, seconds_per_byte: float) -> str:
    rate = f", {1 / seconds_per_byte / 1e9:.3g} GB/s" if seconds_per_byte > 0 else ""
    return f"{format_seconds(latency_s)} + {seconds_per_byte:.3g} s per byte{rate}"


def _columns(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Right-aligned columns, what is beyond the widths as it is; the first row is the head."""
    lines = []
    for number, row in enumerate(rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)]
        mark = "#" if number == 0 else " "
        lines.append(" ".join([mark, *cells, *(f" {cell}" for cell in row[len(widths) :])]))
    return lines
