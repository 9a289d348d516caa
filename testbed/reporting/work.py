"""Which cells may be compared, and how far each is from the step without communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from testbed.base.axes import AXES, BACKENDS, COMPRESSORS, MEMORY, SCHEDULERS
from testbed.base.config import RunConfig
from testbed.records.cell import Cell, CompressionResult
from testbed.records.report import ReportCell
from testbed.reporting.resources import resources_of
from testbed.statistics.summary import efficiency, most_common

# Tables show the times of the emulated cluster: real ones divided by the dilation; pure.

C = TypeVar("C", bound=Cell)

_TIMES = (
    "step_time_s",
    "step_time_unfiltered_s",
    "step_time_smallest_s",
    "step_time_largest_s",
    "step_time_p5_s",
    "step_time_p95_s",
    "step_time_low_s",
    "step_time_high_s",
    "compute_s",
    "exposed_comm_s",
    "predicted_step_time_s",
    "predicted_unrehearsed_s",
    "training_time_s",
)


def undilated(cell: C) -> C:
    """The cell with the times and the speed of the cluster that it emulated.

    Samples and the curve of accuracies keep the real ones. A cell that is undilated already, as one
    without a cluster is, stays as it is.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> cell = Cell(backend="mpi", workload="x", num_workers=2, config=RunConfig(),
        ...             dilation=10.0, step_time_s=1.0, samples_per_s=64.0)
        >>> shown = undilated(cell)
        >>> shown.step_time_s, shown.samples_per_s
        (0.1, 640.0)
    """
    factor = cell.dilation
    if factor == 1:
        return cell
    times = {name: value / factor for name in _TIMES if (value := getattr(cell, name, None))}
    reached = {
        name: {target: t if t is None else t / factor for target, t in getattr(cell, name).items()}
        for name in ("time_to_accuracy_s", "time_to_loss_s")
    }
    speed = None if cell.samples_per_s is None else cell.samples_per_s * factor
    found = msgspec.structs.replace(
        cell,
        **times,
        **reached,
        samples_per_s=speed,
        compression=_compression(cell.compression, factor),
    )
    if isinstance(found, ReportCell):
        found = msgspec.structs.replace(found, resources=resources_of(found))
    return found


def _compression(found: CompressionResult | None, factor: float) -> CompressionResult | None:
    if found is None:
        return None
    return msgspec.structs.replace(
        found,
        encode_s=found.encode_s / factor,
        communication_s=found.communication_s / factor,
        decode_s=found.decode_s / factor,
    )


def sharing_of(cluster: Mapping[str, Any] | None) -> str:
    """How an emulated cluster's nodes share this machine's cores; empty without one.

    Example:
        >>> sharing_of({"cpu_policy": "batch", "cores": "pinned", "cores_awake": "yes"})
        'CPU policy: batch, cores: pinned, kept awake'
        >>> sharing_of({}), sharing_of(None)
        ('CPU policy: other, cores: shared', '')
    """
    if cluster is None:
        return ""
    # Older records tell nothing of what could not be chosen then.
    policy, cores = cluster.get("cpu_policy", "other"), cluster.get("cores", "shared")
    told = cluster.get("cores_awake")
    awake = "" if told is None else ", kept awake" if told == "yes" else ", not kept awake"
    return f"CPU policy: {policy}, cores: {cores}{awake}"


def cluster_words(cell: Cell) -> str:
    """The emulated cluster in words; empty without one."""
    if cell.cluster is None:
        return ""
    spec, latency = cell.cluster.get("spec", ""), cell.cluster.get("latency", "none")
    words = f"emulated cluster {spec} (latency: {latency}, {sharing_of(cell.cluster)})"
    if cell.dilation == 1:
        return words
    return f"{words}: times are the cluster's, real ones {cell.dilation:g} times as long"


# Settings of the exchange and of the record: they may differ between cells that do the same work.
_EXCHANGE = (
    *(axis.what for axis in AXES if axis.same_work),
    *(
        "predict",
        "trace",
        "link",
        "plan",
        "slow",
        "deadline",
        "start_deadline",
        "budget_mb",
        "tune",
        "tuned",
    ),
)
_RECORD = (
    "repeat",
    "warmup",
    "target_accuracy",
    "target_loss",
    "evaluate_every",
    "verify_steps",
    "checkpoint",
    "every",
    "measure_memory",
    "max_batch",
)
_MEMORY = (MEMORY.what, "budget_mb")
_FILES = ("workload", "trace", "link", "plan", "data", "resume_from")
_PREDICTION = ("predict", "rehearse")
# What a step's time does not depend on: how many there are, which samples they see, and numbers.
_LENGTH = (
    *("steps", "epochs", "resume_from", "seed"),
    *("warmup_steps", "schedule", "learning_rate", "momentum"),
)


def is_upper_bound(cell: ReportCell) -> bool:
    """Whether the cell is the step without communication."""
    found = BACKENDS.find(cell.backend)
    return found is not None and not found.facts.exchanges


def is_exact(cell: Cell) -> bool:
    """Whether its backend and scheduler deliver means of whole gradients of the same step.

    Compressors are not asked: see `compresses`.
    """
    backend, scheduler = BACKENDS.find(cell.config.backend), SCHEDULERS.find(cell.config.scheduler)
    return (backend is None or backend.facts.exact) and (scheduler is None or scheduler.facts.exact)


def compresses(cell: Cell) -> bool:
    """Whether what it sends is smaller than the gradients: by a compressor, or by its framework.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> configs = [RunConfig(backend="ddp", compressor="fp16"), RunConfig(backend="ddp")]
        >>> [compresses(Cell(backend="ddp", workload="w", num_workers=2, config=c))
        ...  for c in configs]
        [True, False]
    """
    found = BACKENDS.find(cell.config.backend)
    schedule = None if found is None else found.facts.schedule
    by_framework = schedule is not None and schedule.compresses
    return by_framework or not COMPRESSORS.is_default(cell.config)


def judge(cells: Sequence[ReportCell]) -> list[ReportCell]:
    """The cells with `efficiency`, `comparable` and `comparable_note` filled in.

    Each is held against cells of its own folder: those of another were made another day, perhaps
    by another program.
    """
    bounds: dict[tuple[str, Key], float] = {}
    peers: dict[tuple[str, Key], list[ReportCell]] = {}
    plain: dict[tuple[str, Key], ReportCell] = {}
    for cell in cells:
        if cell.status == "ok" and is_upper_bound(cell) and cell.step_time_s:
            at = cell.source, step_key(cell)
            bounds[at] = min(cell.step_time_s, bounds.get(at, cell.step_time_s))
        peers.setdefault((cell.source, _work_key(cell)), []).append(cell)
        if cell.config.memory == MEMORY.default:
            plain[cell.source, _exact_key(cell)] = cell
    judged = []
    for cell in cells:
        comparable, note = _compare(cell, peers[cell.source, _work_key(cell)])
        share = efficiency(bounds.get((cell.source, step_key(cell))), cell.step_time_s)
        judged.append(
            msgspec.structs.replace(
                cell,
                efficiency=share,
                comparable=comparable,
                comparable_note=note,
                same_parameters_note=_same_parameters(
                    cell, plain.get((cell.source, _exact_key(cell)))
                ),
            )
        )
    return judged


def sort_cells(cells: Iterable[ReportCell]) -> list[ReportCell]:
    """By workload and workers; then the upper bound, the others by step time, failed ones."""

    def position(cell: ReportCell) -> tuple[object, ...]:
        time_s = cell.step_time_s
        return (
            cell.workload,
            cell.num_workers,
            not is_upper_bound(cell),
            cell.status == "failed",
            float("inf") if time_s is None else time_s,
            cell.backend,
            cell.source,
        )

    return sorted(cells, key=position)


def same_work(cell: ReportCell) -> tuple[str, str]:
    """`yes`, `no` or `not checked`, and why, in words."""
    if cell.status == "failed":
        return "", ""
    if cell.comparable is False:
        return "no", cell.comparable_note
    if cell.identical_work is False:
        return "no", cell.identical_work_note
    if cell.identical_work is None:
        return "not checked", cell.identical_work_note or cell.comparable_note
    return "yes", cell.identical_work_note


Key = tuple[RunConfig, str]  # settings, and how nodes of an emulated cluster share cores


def _work_key(cell: ReportCell) -> Key:
    return _without(cell, _EXCHANGE + _RECORD), sharing_of(cell.cluster)


def step_key(cell: ReportCell) -> Key:
    """What cells have in common whose steps take equally long without communication."""
    kept = {"slow", "budget_mb", *(axis.what for axis in AXES if not axis.same_step)}
    levelled = tuple(n for n in _EXCHANGE if n not in kept) + _RECORD + _LENGTH
    return _without(cell, levelled), sharing_of(cell.cluster)


def setting_key(cell: ReportCell) -> Key:
    """What cells have in common that one answer is about: all but the method and its record."""
    levelled = (*_EXCHANGE, *_RECORD, *_LENGTH, *_PREDICTION)
    return _without(cell, [name for name in levelled if name != "slow"]), sharing_of(cell.cluster)


def apart_from_memory(cell: ReportCell) -> Key:
    """What a cell has in common with itself under another memory strategy."""
    return _without(cell, (*_MEMORY, *_RECORD, "steps", "seed")), sharing_of(cell.cluster)


def scaling_key(cell: ReportCell, *, methods: bool = True) -> Key:
    """What a cell has in common with itself on another number of workers; else with all methods."""
    parts = {axis.what for axis in AXES} if methods else set[str]()
    levelled = (*_EXCHANGE, *_MEMORY, *_RECORD, *_LENGTH, *_PREDICTION)
    found = _without(cell, [name for name in levelled if name not in {"slow", *parts}])
    pieces = (cell.config.cluster or "").split(",")
    cluster = ",".join(piece for piece in pieces if not piece.startswith("nodes="))
    return msgspec.structs.replace(found, workers=1, cluster=cluster), ""


def apart_from_dilation(cell: ReportCell) -> Key:
    """What a cell has in common with itself at another dilation of its emulated cluster."""
    levelled = _without(cell, (*_RECORD, *_LENGTH, "deadline", "start_deadline"))
    pieces = (cell.config.cluster or "").split(",")
    cluster = ",".join(piece for piece in pieces if not piece.startswith("dilation="))
    return msgspec.structs.replace(levelled, cluster=cluster), sharing_of(cell.cluster)


def _exact_key(cell: ReportCell) -> Key:
    """What decides which parameters a run ends with, bit for bit."""
    return _without(cell, (*_MEMORY, *_RECORD)), sharing_of(cell.cluster)


def _same_parameters(cell: ReportCell, plain: ReportCell | None) -> str:
    if plain is None or cell.config.memory == MEMORY.default:
        return ""
    if not (cell.final_digest and plain.final_digest):
        return ""
    what = f"as memory {MEMORY.default} with the same compressor after {cell.steps} steps"
    if cell.final_digest == plain.final_digest:
        told = f"same parameters {what}, bit for bit"
        recorded = cell.buffer_digest and plain.buffer_digest
        buffers_differ = recorded and cell.buffer_digest != plain.buffer_digest
        return f"{told}; buffers differ" if buffers_differ else told
    return f"not the same bits {what}: {cell.final_digest[:8]}, not {plain.final_digest[:8]}"


def settings_of(cell: Cell, *, folders: bool = False) -> RunConfig:
    """A cell's settings without what changes neither its work nor its time.

    Files are named without their folders, so that checkouts in two places have the same cells; with
    them where a side holds cells that differ in these alone.
    """
    found = _without(cell, (*_RECORD, "deadline", "start_deadline"))
    short = {name: _without_folder(text) for name, text in files_of(found).items()}
    return found if folders else msgspec.structs.replace(found, **short)


def files_of(settings: RunConfig) -> dict[str, str]:
    """The settings that may name a file, with its folder.

    Example:
        >>> files_of(RunConfig(workload="old/net.py:build", link="link.json"))
        {'workload': 'old/net.py:build', 'link': 'link.json'}
    """
    return {name: text for name in _FILES if (text := getattr(settings, name))}


def _without_folder(text: str) -> str:
    head, colon, options = text.partition(":")
    if "=" in head:
        return text
    file, more, rest = options.partition(":")  # `replay` has its trace as its first option
    file = file if "=" in file else file.rpartition("/")[2]
    return head.rpartition("/")[2] + colon + file + more + rest


def _without(cell: Cell, names: Iterable[str]) -> RunConfig:
    """The cell's settings as they came out in the end, with some of them levelled."""
    asked = msgspec.structs.replace(
        cell.config,
        workers=cell.num_workers,
        batch_size=cell.batch_size or None,
        steps=cell.steps or None,
        epochs=None,
    )
    default = RunConfig()
    return msgspec.structs.replace(asked, **{name: getattr(default, name) for name in names})


def _compare(cell: ReportCell, peers: Sequence[ReportCell]) -> tuple[bool | None, str]:
    if cell.status == "failed":
        return None, "failed"
    finished = [peer for peer in peers if peer.status == "ok"]
    for what, name in (("initial parameters", "initial_digest"), ("samples", "sample_digest")):
        own = getattr(cell, name)
        if not own:
            return None, f"no single digest of the {what} is recorded"
        others = most_common([getattr(peer, name) for peer in finished])
        if own != others:
            return (
                False,
                f"{what} differ from those of the other cells: {own[:8]}, not {others[:8]}",
            )
    contents = [peer.content_digest for peer in finished if peer.content_digest]
    if cell.content_digest and cell.content_digest != (usual := most_common(contents)):
        differ = f"{cell.content_digest[:8]}, not {usual[:8]}"
        return False, f"sample contents differ from those of the other cells: {differ}"
    if len(finished) == 1:
        return True, "no other cell of the same work to compare with"
    return True, f"same initial parameters and samples as {len(finished) - 1} other cell(s)"
