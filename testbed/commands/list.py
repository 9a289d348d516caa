"""`testbed list`: every part, and why it is unavailable if it is."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from testbed.errors import Unavailable
from testbed.registry import BACKENDS, SCHEDULERS, WORKLOADS, Registry


def list_parts(
    json: Annotated[bool, typer.Option("--json", help="as JSON, schema testbed.list/1")] = False,
) -> None:
    """List backends, schedulers and workloads, each available or with the reason why not.

    Examples:
        testbed list

        testbed list --json
    """
    families = {
        "backends": [_describe(BACKENDS, name) for name in BACKENDS],
        "schedulers": [_describe(SCHEDULERS, name) for name in SCHEDULERS],
        "workloads": [_describe(WORKLOADS, name) for name in WORKLOADS],
    }
    if json:
        document = {"schema": "testbed.list/1", **families}
        sys.stdout.write(json_module.dumps(document, indent=1) + "\n")
        return
    for family, parts in families.items():
        sys.stdout.write(f"{family}:\n")
        width = max(len(part["name"]) for part in parts)
        for part in parts:
            state = part["summary"] if part["available"] else f"unavailable: {part['reason']}"
            sys.stdout.write(f"  {part['name']:<{width}}  {state}\n")


def _describe(registry: Registry, name: str) -> dict[str, Any]:
    """One part as a row; whatever is wrong with it becomes its reason, never a crash."""
    try:
        kind = registry.load(name)
        probe: Callable[[], tuple[str, str] | None] = kind.probe
        lacking = probe()
        summary = str(kind.summary)
    except Unavailable as error:
        lacking, summary = (error.reason, error.remedy), ""
    except (
        Exception
    ) as error:  # a third party's part may raise anything; the others are still listed
        lacking = (f"it raised {type(error).__name__}: {error}", "report it to its authors")
        summary = ""
    return {
        "name": name,
        "available": lacking is None,
        "reason": "" if lacking is None else f"{lacking[0]} - {lacking[1]}",
        "summary": summary,
    }
