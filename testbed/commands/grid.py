"""The grid that a command line describes: a recipe's cells, or the combinations of its axes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.axes import AXES, BACKENDS
from testbed.base.config import RunConfig
from testbed.base.errors import Unavailable, UsageError
from testbed.cluster.spec import parse_cluster
from testbed.commands.checks import check_places
from testbed.launch.plan_options import parts_of
from testbed.sweeping.grid import Sweep, expand
from testbed.sweeping.progress import chosen
from testbed.sweeping.recipe import check_parts, load_recipe, load_toml, with_axes


def cluster_axes(
    clusters: Sequence[str], has_workers: bool, recipe: str | None
) -> dict[str, tuple[Any, ...]]:
    """The axis of emulated clusters, in their usual spelling, and as many workers as they take.

    A recipe has its own numbers of workers, and so may the command line.

    Raises:
        UsageError: a cluster cannot be; or they take different numbers of workers, none given.
    """
    specs = [parse_cluster(text) for text in clusters]
    if not specs:
        return {}
    axes: dict[str, tuple[Any, ...]] = {"cluster": tuple(spec.text() for spec in specs)}
    places = {spec.places for spec in specs}
    if has_workers or recipe is not None:
        return axes
    if len(places) > 1:
        words = ", ".join(map(str, sorted(places)))
        raise UsageError(f"the clusters take {words} workers; say how many with --workers")
    return {**axes, "workers": tuple(places)}


def wanted_sweep(
    recipe: str | None,
    axes: Mapping[str, tuple[Any, ...]],
    changes: Mapping[str, Any],
    *,
    begun: bool = False,
) -> Sweep | None:
    """The sweep that the command line describes; None if it names neither recipe nor axis.

    Cells whose parts do not go together are left out of it, and told on standard error. Of a sweep
    that has begun, users' own files are not looked at.
    """
    if recipe is None and not axes:
        return None
    if recipe is None:
        sweep = Sweep("sweep", expand({}, axes))
    elif recipe.endswith(".toml") or "/" in recipe:
        sweep = with_axes(load_toml(Path(recipe)), axes)
    else:
        sweep = with_axes(load_recipe(recipe), axes)
    sweep = replace(sweep, **{name: v for name, v in changes.items() if name != "tune"})
    if "tune" in changes:
        cells = (msgspec.structs.replace(cell, tune=changes["tune"]) for cell in sweep.cells)
        sweep = replace(sweep, cells=tuple(cells))
    check_parts(sweep.cells, files=not begun)
    return replace(sweep, cells=_leave_out(sweep.cells))


def _leave_out(cells: Sequence[RunConfig]) -> tuple[RunConfig, ...]:
    """The cells whose parts go together; what else was asked for is told, with the reasons.

    Raises:
        UsageError: none is left.
    """
    reasons: dict[str, dict[str, None]] = {}
    kept = []
    for cell in cells:
        axes = [axis for axis in AXES if axis.is_light or cell.cluster is not None]
        try:
            parts = parts_of(cell, axes)
            if cell.cluster is not None:
                check_places(cell.cluster, parts[BACKENDS.what], cell.workers)
        except Unavailable:  # its cells fail when they run, and say why
            pass
        except UsageError as error:
            reasons.setdefault(str(error), {})[chosen(cell)] = None
            continue
        kept.append(cell)
    lines = [f"  {'; '.join(names)}: {why}" for why, names in reasons.items()]
    if not kept:
        raise UsageError("\n".join(["nothing of this can be run:", *lines]))
    if lines:
        told = f"{len(cells) - len(kept)} of {len(cells)} cells cannot be and are left out:"
        sys.stderr.write("\n".join([f"testbed: {told}", *lines, ""]))
    return tuple(kept)
