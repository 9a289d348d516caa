"""What one answer is about, and what methods are called in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from testbed.base.axes import AXES, BACKENDS, COMPRESSORS, MEMORY, SCHEDULERS
from testbed.base.config import RunConfig
from testbed.records.report import ReportCell
from testbed.reporting.columns import settings
from testbed.reporting.naming import part_of, short_text
from testbed.reporting.ratios import name_of, short_name_of
from testbed.reporting.work import is_upper_bound, setting_key

_NAMED = (*(axis.what for axis in AXES), "repeat", "workers", "cluster", "tune")
_LEAST = ("link", "steps", "warmup", "predict", "verify_steps")  # told where nothing else differs


@dataclass(frozen=True)
class Setting:
    """What is alike in the cells of one answer, and the cells.

    Attributes:
        parts: the workload, the workers, the batch, the cluster, and what else tells it from the
            report's other settings.
        places: of its finished cells in `Report.cells`.
        names: of the method of each, by place.
        apart: of methods that share a name, the settings in which they differ, by place.
    """

    parts: tuple[str, ...]
    places: tuple[int, ...]
    names: Mapping[int, str]
    apart: Mapping[int, str]

    @property
    def heading(self) -> str:
        """The parts in a line."""
        return ", ".join(self.parts)

    def row(self, text: str, place: int) -> str:
        """What a row is called, with the settings that tell it from others of the same method."""
        return f"{text} ({self.apart[place]})" if place in self.apart else text


def settings_of(cells: Sequence[ReportCell]) -> list[Setting]:
    """The settings of a report: one for each workload, workers, cluster, batch and folder.

    How many steps there were, warm-up, repeats, files of links, and the method (backend,
    scheduler, compressor, memory strategy) make no other setting.
    """
    groups: dict[object, list[int]] = {}
    for place, cell in enumerate(cells):
        if cell.status == "ok":
            groups.setdefault((cell.source, setting_key(cell)), []).append(place)
    more = _apart_from_others(groups)
    found = [
        Setting(_parts(cells[places[0]], words), tuple(places), *_names(cells, places))
        for places, words in zip(groups.values(), more, strict=True)
    ]
    return sorted(found, key=lambda setting: _natural(setting.heading))


def _natural(text: str) -> list[tuple[int, str]]:
    """Orders numbers in a text by their size."""
    pieces = re.findall(r"\d+|\D+", text)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def _parts(cell: ReportCell, more: Sequence[str]) -> tuple[str, ...]:
    workers = f"{cell.num_workers} worker{'s' if cell.num_workers != 1 else ''}"
    cluster = [
        piece
        for piece in (cell.config.cluster or "").split(",")
        if piece and piece != f"nodes={cell.num_workers}"
    ]
    batch = [f"batch {cell.batch_size}"] if cell.batch_size else []
    emulated = ["emulated"] if cell.config.cluster else []
    return (short_text(cell.workload), workers, *batch, *emulated, *cluster, *more)


def _apart_from_others(groups: Iterable[object]) -> list[list[str]]:
    """What tells a setting from another of the same workload, workers, cluster and batch.

    Two files of the same name are told by their paths.
    """
    keys: list[tuple[str, tuple[RunConfig, str]]] = list(groups)  # type: ignore[arg-type]
    plain = ("workers", "cluster", "batch_size")

    def base(key: tuple[str, tuple[RunConfig, str]]) -> tuple[object, ...]:
        config = key[1][0]
        return short_text(config.workload), config.workers, config.cluster, config.batch_size

    told = []
    for key in keys:
        source, (config, sharing) = key
        alike = [other for other in keys if base(other) == base(key)]
        more = [
            f"{name}={value}"
            for name, value in msgspec.structs.asdict(config).items()
            if name not in plain and any(getattr(o[1][0], name) != value for o in alike)
        ]
        more += [sharing] if any(other[1][1] != sharing for other in alike) else []
        more += [source] if any(other[0] != source for other in alike) else []
        told.append(more)
    return told


def method_names(cells: Sequence[ReportCell], places: Sequence[int]) -> dict[int, str]:
    """Backend and scheduler, the latter where it differs; compressor and memory strategy."""
    chosen = [cells[place] for place in places]
    plans = {part_of(c, SCHEDULERS) for c in chosen if name_of(c) != part_of(c, BACKENDS)}
    told = plans - {SCHEDULERS.default} or len(plans) > 1
    alone = all(is_upper_bound(cell) for cell in chosen)
    names = {}
    for place in places:
        cell = cells[place]
        name = short_name_of(cell) if told else short_text(part_of(cell, BACKENDS))
        name += "" if cell.config.memory == MEMORY.default else f", memory {cell.config.memory}"
        name = cell.config.memory if alone else name
        if not COMPRESSORS.is_default(cell.config):
            name += f" with {cell.config.compressor}"
        names[place] = name
    return names


def _names(
    cells: Sequence[ReportCell], places: Sequence[int]
) -> tuple[dict[int, str], dict[int, str]]:
    """The methods' names; of those that share one, with the settings that differ; these alone."""
    names, apart = method_names(cells, places), dict[int, str]()
    groups: dict[str, list[int]] = {}
    for place, name in names.items():
        groups.setdefault(name, []).append(place)
    for alike in groups.values():
        differs = differing([cells[place].config for place in alike])
        for place in alike if differs else ():
            apart[place] = settings(cells[place].config, differs)
            names[place] += f" ({apart[place]})"
    return names, apart


def full_names(cells: Sequence[ReportCell]) -> list[str]:
    """Of every cell, finished or not: its method, and what tells its setting from the others'."""
    names = method_names(cells, range(len(cells)))
    settings = [
        _parts(msgspec.structs.replace(cell, num_workers=cell.config.workers, batch_size=0), ())
        for cell in cells
    ]
    told = []
    for place, parts in enumerate(settings):
        own = [part for part in parts if not all(part in others for others in settings)]
        told.append(", ".join([names[place], *own]))
    return told


def differing(configs: Sequence[RunConfig]) -> list[str]:
    """The settings in which configurations differ, beside the method; else those of their record.

    Example:
        >>> differing([RunConfig(momentum=0.9, steps=9), RunConfig(momentum=0.0, steps=8)])
        ['momentum']
    """
    fields = [name for name in RunConfig.__struct_fields__ if name not in _NAMED]
    differ = [name for name in fields if len({repr(getattr(c, name)) for c in configs}) > 1]
    return [name for name in differ if name not in _LEAST] or differ
