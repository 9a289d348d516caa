"""`testbed list`: every part, and why it is unavailable if it is."""

from __future__ import annotations

import functools
import json as json_module
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from testbed.base.axes import AXES
from testbed.base.errors import Unavailable, UnknownName
from testbed.base.files import load_shipped_trace, shipped_traces
from testbed.base.parts import Registry


def list_parts(
    family: Annotated[
        str | None, typer.Argument(help="only these: compressors", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="as JSON, schema testbed.list/1")] = False,
) -> None:
    """List all parts, or the reason why one is missing, and the traces that come along.

    Methods are marked: a published rule, a reconstruction of what a paper does not spell out, or
    ours.

    Examples:
        testbed list

        testbed list compressors

        testbed list --json
    """
    rows: dict[str, Callable[[], list[dict[str, Any]]]] = {
        **{axis.title: functools.partial(_describe_all, axis) for axis in AXES},
        "traces": lambda: [_describe_trace(name) for name in shipped_traces()],
    }
    if family is not None and family not in rows:
        raise UnknownName("family of parts", family, rows)
    families = {name: make() for name, make in rows.items() if family in (None, name)}
    if json:
        document = {"schema": "testbed.list/1", **families}
        sys.stdout.write(json_module.dumps(document, indent=1) + "\n")
        return
    for heading, parts in families.items():
        sys.stdout.write(f"{heading}:\n")
        width = max(len(part["name"]) for part in parts)
        for part in parts:
            state = part["summary"] if part["available"] else f"unavailable: {part['reason']}"
            state += f" [{part['origin']}]" if part.get("origin") else ""
            sys.stdout.write(f"  {part['name']:<{width}}  {state}\n")


def _describe_all(registry: Registry) -> list[dict[str, Any]]:
    return [_describe(registry, name) for name in registry]


def _describe_trace(name: str) -> dict[str, Any]:
    """A trace that comes with the package, for `--trace NAME` and `--workload replay:NAME`."""
    trace = load_shipped_trace(name)
    summary = (
        f"{trace.device}, batch {trace.batch_size}: {len(trace.tensors)} tensors, "
        f"{trace.num_bytes / 1e6:.1f} MB, forward {1e3 * trace.forward_s:.1f} ms, "
        f"backward {1e3 * trace.backward_s:.1f} ms"
    )
    return {"name": name, "available": True, "reason": "", "summary": summary}


def _describe(registry: Registry, name: str) -> dict[str, Any]:
    """One part as a row; whatever is wrong with it becomes its reason, never a crash."""
    try:
        kind = registry.load(name)
        origin = str(kind.origin)
        probe: Callable[[], tuple[str, str] | None] = kind.probe
        lacking = probe()
        summary = str(kind.summary)
    except Unavailable as error:
        lacking, summary, origin = (error.reason, error.remedy), "", ""
    except (
        Exception
    ) as error:  # a third party's part may raise anything; the others are still listed
        lacking = (f"it raised {type(error).__name__}: {error}", "report it to its authors")
        summary = origin = ""
    return {
        "name": name,
        "available": lacking is None,
        "reason": "" if lacking is None else f"{lacking[0]} - {lacking[1]}",
        "summary": summary,
        "origin": origin,
    }
