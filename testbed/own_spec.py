"""What names the user's own model: `path/to/my_model.py:build:key=value,...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import UsageError
from testbed.spec import parse_spec


@dataclass(frozen=True)
class OwnModel:
    """Where the user's function stands, and its options as text."""

    path: Path
    function: str
    options: Mapping[str, str]


def parse_own_model(spec_text: str) -> OwnModel | None:
    """The parts of `file.py:function:key=value,...`; None if the text names no Python file.

    Raises:
        UsageError: the function is missing, or an option is not `key=value`.

    Example:
        >>> own = parse_own_model("nets/my_model.py:build:width=32")
        >>> own.function, dict(own.options)
        ('build', {'width': '32'})
    """
    match = re.fullmatch(r"(.+?\.py)(?::(.*))?", spec_text.strip(), re.DOTALL)
    if match is None:
        return None
    spec = parse_spec(match[2] or "") if match[2] else None
    if spec is None or not spec.name.isidentifier():
        raise UsageError(
            f"workload is {spec_text!r}; expected a file and a function in it: "
            f"{match[1]}:build or {match[1]}:build:key=value,..."
        )
    return OwnModel(Path(match[1]), spec.name, spec.options)
