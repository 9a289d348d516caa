"""What `replay:` may be given; torch is loaded only where a trace is really replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.base.files import find_trace
from testbed.replay.layout import owned
from testbed.workloads.workload import Workload, WorkloadKind


def _build(**options: Any) -> Workload:
    from testbed.replay.workload import build_replay

    return build_replay(**options)


def _check(options: Mapping[str, Any]) -> None:
    owned(find_trace(options["trace"]))


REPLAY = WorkloadKind(
    name="replay",
    summary="a recorded trace: replay:NAME (see traces) or replay:FILE (testbed.trace/1)",
    build=_build,
    options={"trace": "resnet50-v100"},
    bare_option="trace",
    check=_check,
    stretches=True,
)
