"""`testbed simulate --memory`: what a step would take, before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from testbed.base.axes import COMPRESSORS
from testbed.base.config import make_config
from testbed.base.errors import UsageError
from testbed.base.files import to_json, write_atomically
from testbed.base.spec import split_specs
from testbed.base.units import format_bytes, format_seconds
from testbed.launch.plan_options import parts_of
from testbed.records.memory import MemoryForecast, MemorySimulation
from testbed.reporting.drawing import Panel, html_of, svg_areas

MIB = 2**20


def simulate_memory(
    memory: str,
    compressor: str,
    given: dict[str, object],
    batches: Sequence[int],
    budget_mb: float | None,
    *,
    max_batch: bool,
    json: str | None,
    plot: Path | None,
    plan_out: Path | None,
) -> bool:
    """Foresee the memory of a workload's step under strategies, and print a table.

    Args:
        memory: strategies, separated by commas.
        compressor: compressors, separated by commas.
        given: the other settings of a run.
        batches: samples of a micro-batch; empty: the workload's own.
        budget_mb: MiB that a step is to fit.
        max_batch: look for the largest batch that fits.
        json: file for the results; `-`: standard output.
        plot: SVG or HTML file for a picture of each step's memory over its time.
        plan_out: file for the plan of the one strategy and batch, see `laysa:plan=FILE`.

    Returns:
        False where there is a budget and nothing that was asked for fits it.

    Raises:
        UsageError: `--max-batch` without a budget, a budget not above 0, a part that cannot
            be used, or several plans for one file.
    """
    from testbed.launch.memory_forecast import foresee_all

    if max_batch and budget_mb is None:
        raise UsageError("--max-batch was given without --budget-mb; expected both")
    if budget_mb is not None and not 0 < budget_mb < inf:
        raise UsageError(f"--budget-mb is {budget_mb:g}; expected a finite number above 0")
    if max_batch and batches:
        raise UsageError("--max-batch looks for the batch size; leave --batch out")
    budget_bytes = None if budget_mb is None else round(budget_mb * MIB)
    configs = [
        make_config({**given, "memory": spec, "compressor": codec})
        for spec in split_specs(memory)
        for codec in split_specs(compressor)
    ]
    for config in configs:
        parts_of(config)
    asked = len(configs) * max(1, len(batches))
    if plan_out is not None and asked > 1:
        raise UsageError(
            f"--plan-out was given with {asked} combinations of strategy, compressor and batch; "
            "expected one of each: the file holds one memory plan"
        )
    found = MemorySimulation(
        workload=configs[0].workload,
        compressors=list(split_specs(compressor)),
        num_workers=configs[0].workers,
        budget_bytes=budget_bytes,
        forecasts=foresee_all(
            configs,
            batches,
            budget_bytes,
            max_batch=max_batch,
            curves=plot is not None,
            plans=plan_out is not None,
        ),
    )
    (first, *_) = found.forecasts
    if plan_out is not None:
        if first.plan is None:
            raise UsageError(f"there is no plan to save in {plan_out}: {first.error}")
        write_atomically(plan_out, bytes(first.plan))
    if plot is not None:
        write_atomically(plot, _picture(found, plot.suffix).encode())
    encoded = to_json(found)
    if json == "-":
        sys.stdout.write(encoded.decode())
    else:
        if json is not None:
            write_atomically(Path(json), encoded)
        sys.stdout.write(describe(found))
    return budget_bytes is None or any(each.fits for each in found.forecasts)


def describe(found: MemorySimulation) -> str:
    """The forecasts in words, one paragraph each."""
    budget = "" if found.budget_bytes is None else f", budget {format_bytes(found.budget_bytes)}"
    lines = [
        f"{found.workload}, {found.num_workers} worker{'s' * (found.num_workers > 1)}{budget}: "
        "predicted, nothing was run"
    ]
    for each in found.forecasts:
        lines += ["", *_describe_one(each)]
    return "\n".join(lines) + "\n"


def _describe_one(found: MemoryForecast) -> list[str]:
    if found.error:
        return [f"{_name(found)}: {found.error}"]
    fits = {None: "", True: "; fits", False: "; does not fit"}[found.fits]
    lines = [
        f"{_name(found)}, {found.batch_size} samples: peak {format_bytes(found.peak_bytes)}, in "
        f"{found.layer}{fits}",
        "  " + ", ".join(f"{name} {format_bytes(size)}" for name, size in found.peak.items()),
        f"  floor of model and batch {format_bytes(found.floor_bytes)}; step "
        f"{format_seconds(found.step_s)} and {format_seconds(found.extra_s)} more (estimated); "
        f"moved to the host {format_bytes(found.moved_bytes)} a step",
    ]
    return lines + ([f"  {found.why}"] if found.why else [])


def _name(found: MemoryForecast) -> str:
    """The strategy, and the compressor if there is one."""
    alone = found.compressor == COMPRESSORS.default
    return found.memory if alone else f"{found.memory} with {found.compressor}"


def _picture(found: MemorySimulation, suffix: str) -> str:
    """Each step's memory over its time, all on one scale."""
    panels = [
        Panel(
            f"memory {_name(each)}: peak {format_bytes(each.peak_bytes)}",
            each.curve.time_s,
            {name: [size / MIB for size in sizes] for name, sizes in each.curve.levels.items()},
        )
        for each in found.forecasts
        if each.curve is not None
    ]
    sizes = dict.fromkeys(each.batch_size for each in found.forecasts if each.curve is not None)
    title = (
        f"{found.workload}, {' and '.join(map(str, sizes))} samples: live storages in one step "
        "(predicted)"
    )
    drawing = svg_areas(title, "s (estimated)", "MiB", panels)
    return drawing + "\n" if suffix == ".svg" else html_of(title, [drawing])
