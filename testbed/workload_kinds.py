"""Which kinds of workload there are here and what each may be given.

Loads torch only for a kind that computes: replayed ones and the user's own are checked without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import Any

from testbed.errors import Unavailable, UsageError
from testbed.own_spec import parse_own_model
from testbed.registry import WORKLOADS
from testbed.spec import BARE_OPTION, parse_options, parse_spec
from testbed.workload import WorkloadKind


def workload_availability(name: str) -> tuple[str, str] | None:
    """None where the workload can be used here, else (reason, what to install).

    Raises:
        UnknownName: no such workload.
    """
    try:
        kind: WorkloadKind = WORKLOADS.load(name)
    except Unavailable as error:
        return error.reason, error.remedy
    return kind.probe()


def check_dilation(spec_text: str, dilation: float) -> None:
    """Refuse to stretch what cannot be stretched.

    Raises:
        UsageError: the workload really computes; its compute takes as long as it takes.
    """
    if dilation == 1:
        return
    if parse_own_model(spec_text) is None:
        kind: WorkloadKind = WORKLOADS.load(parse_spec(spec_text).name)
        if kind.stretches:
            return
    raise UsageError(
        f"dilation is {dilation:g}, but workload {spec_text!r} really computes and cannot be made "
        "slower; replay a recorded trace of it, or use dilation=1"
    )


def kind_options(kind: WorkloadKind, given: Mapping[str, str]) -> dict[str, Any]:
    """All options of a workload: its defaults, and the given ones converted to the same types.

    Raises:
        UsageError: an unknown option (the known ones are listed), or a value of the wrong kind.
    """
    fields = [
        (
            name,
            str | None if default is None else type(default),
            field(default=default, metadata=BARE_OPTION if name == kind.bare_option else None),
        )
        for name, default in kind.options.items()
    ]
    options = dict(vars(parse_options(kind.name, given, make_dataclass("Options", fields))))
    kind.check(options)
    return options
