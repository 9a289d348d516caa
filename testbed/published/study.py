"""The study `paper-shapes`: published inequalities, each with both numbers."""

from __future__ import annotations

from testbed.published.table import compare, encode_comparison, to_markdown
from testbed.sweeping.study import Study


def _files() -> dict[str, str]:
    comparison = compare()
    return {
        "paper-shapes.md": to_markdown(comparison),
        "paper-shapes.json": encode_comparison(comparison).decode(),
    }


PAPER_SHAPES = Study(
    name="paper-shapes",
    summary="published tables and gains beside the simulator's, and which inequalities hold",
    compute=_files,
)
