"""`--tune`: the knobs of a cell's method are searched before it runs, and each sample is kept."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.axes import BACKENDS, SCHEDULERS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.knobs import Space
from testbed.base.parts import Axis
from testbed.base.spec import PartSpec
from testbed.launch.held_out import scorer
from testbed.records.cell import Cell
from testbed.scheduling.tuning import Budget, best_of, parse_budget, search

COLUMNS = ("trial", "specification", "predicted_s", "confirmed_s", "chosen", "why_not")

Measure = Callable[[RunConfig, int], Cell]
"""Runs a variant; the number of its trial names what it leaves behind."""


@dataclass(frozen=True)
class Sample:
    """A line of the log.

    Attributes:
        text: specification of the method with its knobs set.
        predicted_s: step on the link model, in real seconds; None: it cannot be.
        confirmed_s: median step of a short run; None: it was not run, or did not end well.
        chosen: it is the one.
        why_not: it cannot be, or its run failed.
    """

    text: str
    predicted_s: float | None
    confirmed_s: float | None = None
    chosen: bool = False
    why_not: str = ""


def method_of(config: RunConfig) -> Axis[Any]:
    """The axis whose part decides when gradients leave: that of a framework, else the scheduler.

    Example:
        >>> method_of(RunConfig(backend="ddp")).what, method_of(RunConfig()).what
        ('backend', 'scheduler')
    """
    framework = BACKENDS.resolve(config.backend).facts.schedule is not None
    return BACKENDS if framework else SCHEDULERS


def space_of(config: RunConfig) -> Space:
    """The knobs of a cell's method that its configuration leaves open; none where nothing is sent.

    Example:
        >>> sorted(space_of(RunConfig(scheduler="bytescheduler:credit_kib=4096")))
        ['partition_kib']
        >>> space_of(RunConfig(scheduler="asc-wfbp"))
        {'channels': Grid(values=(2, 4))}
    """
    if not BACKENDS.resolve(config.backend).facts.exchanges:
        return {}
    axis = method_of(config)
    part = axis.resolve(axis.of(config))
    given = axis.links(axis.of(config))[0].options
    space = part.part.knobs(part.options)
    return {name: knob for name, knob in space.items() if name not in given}


def tuned(config: RunConfig, log: Path, measure: Measure) -> RunConfig:
    """The cell with the best knobs that its budget finds; the samples go to a file.

    A log that is there already is read, and nothing is searched again.

    Args:
        config: of a cell that asks for it.
        log: CSV with a line for each sample.
        measure: carries a short run out.

    Raises:
        UsageError: nothing says what is computed or over which link, or no short run ends well.
    """
    assert config.tune is not None
    budget, axis, space = parse_budget(config.tune), method_of(config), space_of(config)
    plain = msgspec.structs.replace(config, tune=None)
    if not space:
        return plain
    if not log.exists():
        write_atomically(log, encode_log(sample(plain, axis, space, budget, measure)).encode())
    chosen = chosen_in(log.read_text())
    return msgspec.structs.replace(plain, **{axis.what: chosen}, tuned=str(budget))


def sample(
    config: RunConfig, axis: Axis[Any], space: Space, budget: Budget, measure: Measure
) -> list[Sample]:
    """Search on the link model, run the best few, choose the fastest of these."""
    step_s = scorer(config)

    def variant(values: Mapping[str, Any]) -> RunConfig:
        return msgspec.structs.replace(config, **{axis.what: with_knobs(axis, config, values)})

    def score(values: Mapping[str, Any]) -> float:
        one = variant(values)
        axis.resolve(axis.of(one)).check(one)
        return step_s(one)

    options = axis.resolve(axis.of(config)).options
    trials = search(space, score, budget)
    given = {name: getattr(options, name) for name in space}
    best = best_of(trials, budget.confirm or 1, given, space)
    samples = [Sample(axis.of(variant(t.values)), t.score, why_not=t.why) for t in trials]
    return _choose(
        samples, best, budget, lambda n: measure(short(variant(trials[n].values), budget), n)
    )


def _choose(
    samples: Sequence[Sample],
    best: list[int],
    budget: Budget,
    run: Callable[[int], Cell],
) -> list[Sample]:
    found = list(samples)
    if budget.confirm:
        for number in best:
            cell = run(number)
            error = " ".join(cell.error.split())
            time_s = cell.step_time_s if cell.status == "ok" else None
            found[number] = replace(found[number], confirmed_s=time_s, why_not=error)
        best = sorted(
            (n for n in best if found[n].confirmed_s is not None),
            key=lambda n: found[n].confirmed_s or 0.0,
        )
    if not best:
        told = "; ".join(dict.fromkeys(s.why_not for s in found if s.why_not))
        raise UsageError(f"--tune found no setting that can be run: {told}")
    found[best[0]] = replace(found[best[0]], chosen=True)
    return found


def with_knobs(axis: Axis[Any], config: RunConfig, values: Mapping[str, Any]) -> str:
    """The method's specification with these knobs set.

    Example:
        >>> with_knobs(SCHEDULERS, RunConfig(scheduler="dear"), {"mib": 16.0})
        'dear:mib=16'
    """
    (spec,) = axis.links(axis.of(config))
    return str(PartSpec(spec.name, {**spec.options, **{k: _text(v) for k, v in values.items()}}))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def short(config: RunConfig, budget: Budget) -> RunConfig:
    """The run that confirms a setting: few steps, and nothing but their time."""
    return msgspec.structs.replace(
        config,
        steps=budget.steps,
        epochs=None,
        warmup=None,
        verify_steps=0,
        predict=False,
        rehearse=False,
        measure_memory=False,
        checkpoint=None,
        every=None,
        target_accuracy=(),
    )


def encode_log(samples: Sequence[Sample]) -> str:
    """The samples as CSV; seconds have all their digits.

    Example:
        >>> print(encode_log([Sample("dear:mib=8", 0.5, chosen=True)]), end="")
        trial,specification,predicted_s,confirmed_s,chosen,why_not
        0,dear:mib=8,0.5,,1,
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, one in enumerate(samples):
        times = ["" if s is None else repr(s) for s in (one.predicted_s, one.confirmed_s)]
        writer.writerow([number, one.text, *times, int(one.chosen), one.why_not])
    return text.getvalue()


def chosen_in(text: str) -> str:
    """The specification that a log has chosen.

    Raises:
        UsageError: it is no such log.

    Example:
        >>> chosen_in(encode_log([Sample("dear", 0.6), Sample("dear:mib=8", 0.5, chosen=True)]))
        'dear:mib=8'
    """
    for row in csv.DictReader(io.StringIO(text)):
        if row.get("chosen") == "1":
            return row["specification"]
    raise UsageError(
        f"a log of samples has no chosen one; expected columns {','.join(COLUMNS)} and a line with "
        "chosen=1; delete the file to search again"
    )
