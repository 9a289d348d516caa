"""One cell in words, for the end of `testbed run`."""

from __future__ import annotations

import textwrap

from testbed.base.units import format_bytes, format_seconds
from testbed.records.cell import Cell, MemoryResult
from testbed.reporting.cores import core_words
from testbed.reporting.naming import tuning_of
from testbed.reporting.prediction import kind_of, was_rehearsed
from testbed.reporting.work import cluster_words, undilated

LINE_COLUMNS, MARGIN = 100, 16


def describe_cell(cell: Cell) -> str:
    """A few lines with the numbers that matter, units included."""
    cell = undilated(cell)
    work = {True: "yes", False: "no", None: "not checked"}[cell.identical_work]
    servers = f" + {cell.num_servers} servers" if cell.num_servers else ""
    lines = [
        f"{cell.workload} on {cell.backend}, {cell.num_workers} workers{servers}, "
        f"{cell.steps} steps of {cell.num_workers} x {cell.batch_size} samples ({cell.data})"
    ]
    if cell.opened_as:
        lines.append(f"  opened as     {cell.opened_as} (measured)")
    lines += _schedule(cell)
    if (tuning := tuning_of(cell)) != "-":
        lines.append(f"  tuning        {tuning}")
    if cell.cluster is not None:
        lines.append(f"  {cluster_words(cell)}")
    if cell.step_time_s is not None and cell.compute_s is not None:
        exposed_s = cell.exposed_comm_s or 0.0
        spread = ""
        if cell.step_time_p5_s is not None and cell.step_time_p95_s is not None:
            low, high = format_seconds(cell.step_time_p5_s), format_seconds(cell.step_time_p95_s)
            spread = f" (90 % of steps {low} .. {high})"
        lines.append(
            f"  step time     {format_seconds(cell.step_time_s)}{spread}: "
            f"compute {format_seconds(cell.compute_s)}, "
            f"exposed communication {format_seconds(exposed_s)}"
        )
        if cell.predicted_step_time_s is not None:
            missed = cell.predicted_step_time_s / cell.step_time_s - 1
            predicted = format_seconds(cell.predicted_step_time_s)
            how = ", its messages as long as in rehearsed steps" if was_rehearsed(cell) else ""
            lines.append(
                f"  predicted     {predicted} ({100 * missed:+.1f} % of what was measured), "
                f"{kind_of(cell)}{how}"
            )
        if cell.predicted_unrehearsed_s is not None:
            missed = cell.predicted_unrehearsed_s / cell.step_time_s - 1
            before = format_seconds(cell.predicted_unrehearsed_s)
            lines.append(f"                {before} ({100 * missed:+.1f} %) without rehearsing")
    if cell.samples_per_s is not None:
        lines.append(f"  throughput    {cell.samples_per_s:,.0f} samples/s")
    if cell.wire_bytes_per_step is not None:
        lines.append(
            f"  on the wire   {format_bytes(cell.wire_bytes_per_step)} sent per step, busiest rank"
        )
    if cell.compression is not None:
        found = cell.compression
        error = (
            "" if found.relative_error is None else f", relative error {found.relative_error:.2g}"
        )
        lines.append(
            f"  compressed    {format_bytes(found.dense_bytes)} to "
            f"{format_bytes(found.sent_bytes)} by {found.compressor}{error}: encode "
            f"{format_seconds(found.encode_s)}, communicate "
            f"{format_seconds(found.communication_s)}, decode {format_seconds(found.decode_s)}, "
            f"state {format_bytes(found.state_bytes)}"
        )
        if found.note:
            lines.append(f"                {found.note}")
        if cell.dilation != 1:
            lines.append(
                f"                this machine took {cell.dilation:g} times as long to encode and "
                "decode"
            )
    if cell.peak_memory_bytes is not None:
        lines.append(f"  peak memory   {format_bytes(cell.peak_memory_bytes)} of the largest rank")
    if cell.memory is not None:
        lines += _memory(cell.memory)
    if words := core_words(cell):
        lines.append(f"  cores         {words}")
    if cell.test_accuracy is not None:
        lines.append(f"  test accuracy {cell.test_accuracy:.2%}")
    never = "not reached" if cell.test_accuracy is not None else "not known: nothing tells one"
    for target, time_s in cell.time_to_accuracy_s.items():
        when = never if time_s is None else f"after {format_seconds(time_s)}"
        what = f"{float(target) * 100:g} % accuracy"
        lines.append(f"  {what:<13} {when}")
    for target, time_s in cell.time_to_loss_s.items():
        when = "not reached" if time_s is None else f"after {format_seconds(time_s)}"
        lines.append(f"  loss {target}     {when}")
    if cell.staleness_max is not None:
        lines.append(f"  staleness     at most {cell.staleness_max} steps ({cell.consistency})")
    lines.append(f"  same work     {work}: {cell.identical_work_note}")
    return "\n".join(lines) + "\n"


def _memory(found: MemoryResult) -> list[str]:
    """The peak of a step by category, foreseen and measured."""
    measured = found.measured_bytes
    told = "not measured: no step before the measured ones"
    if measured:
        missed = found.predicted_bytes / measured - 1
        told = f"{format_bytes(measured)} measured ({100 * missed:+.2f} %)"
    lines = [
        f"  storages      {format_bytes(found.predicted_bytes)} predicted at the peak of a step, "
        f"in {found.layer}; {told}"
    ]
    for category, predicted in found.predicted.items():
        there = f", {format_bytes(found.measured[category])} measured" if measured else ""
        lines.append(f"                {category}: {format_bytes(predicted)} predicted{there}")
    if found.resident_bytes is not None:
        foreseen = found.predicted_resident_bytes
        told = "" if foreseen is None else f"{format_bytes(foreseen)} predicted, "
        lines.append(
            f"                resident: {told}{format_bytes(found.resident_bytes)} measured"
        )
        if found.kept_bytes:
            lines.append(
                f"                  of it {format_bytes(found.kept_bytes)} that no prediction has: "
                "freed pages, which the allocator keeps"
            )
    if found.arena_bytes:
        lines.append(
            f"                buckets: an arena of {format_bytes(found.arena_bytes)}, "
            f"{100 * found.arena_fragmentation:.2g} % of it lost to fragmentation"
        )
    if found.moved_bytes:
        lines.append(f"                moved to the host: {format_bytes(found.moved_bytes)} a step")
    lines.append(
        f"                floor of this model and batch: {format_bytes(found.floor_bytes)}"
    )
    if found.why:
        lines.append(f"                plan {found.plan}: {found.why}")
    return lines


def _schedule(cell: Cell) -> list[str]:
    """In which messages gradients travelled, and why; none where the backend exchanges nothing."""
    if cell.num_messages is None:
        return []
    first, *others = cell.plan_reason.split("; ")
    count = "1 message" if cell.num_messages == 1 else f"{cell.num_messages} messages"
    if first.startswith(count):
        head = f"{cell.scheduler}: {first}"
    else:
        head = f"{cell.scheduler}, {count} a step" + (f": {first}" if first else "")
    wrap = textwrap.TextWrapper(
        LINE_COLUMNS - MARGIN, break_long_words=False, break_on_hyphens=False
    ).wrap
    lines = [line for clause in (head, *others) for line in wrap(clause)]
    return [f"{'  schedule' if not n else '':<{MARGIN}}{line}" for n, line in enumerate(lines)]
