"""The study `paper-shapes`: published inequalities, each with both numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from testbed.base.files import to_json
from testbed.base.spec import parse_options
from testbed.studies.published.emulate import emulate
from testbed.studies.published.lines import Comparison
from testbed.studies.published.shapes import published_shapes
from testbed.studies.published.table import (
    compare,
    to_markdown,
)
from testbed.sweeping.study import Measured, Study

SIMULATED = "paper-shapes.json"


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        emulate: also run the settings that fit this machine, on an emulated cluster.
    """

    emulate: bool = True


def _files() -> dict[str, str]:
    comparison = compare()
    return {
        "paper-shapes.md": to_markdown(comparison),
        SIMULATED: to_json(comparison).decode(),
    }


def _measure(folder: Path, files: Mapping[str, str]) -> Measured:
    simulated = msgspec.json.decode(files[SIMULATED].encode(), type=Comparison)
    return emulate(folder, published_shapes(), simulated.lines)


def _with_options(given: Mapping[str, str]) -> Study:
    options = parse_options(PAPER_SHAPES.name, given, Options)
    return PAPER_SHAPES if options.emulate else dataclasses.replace(PAPER_SHAPES, measure=None)


PAPER_SHAPES = Study(
    name="paper-shapes",
    summary="published inequalities, simulated and (emulate=0: not) on an emulated cluster",
    compute=_files,
    measure=_measure,
    with_options=_with_options,
)
