"""What `replay:` may be given; torch is loaded only where a trace is really replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from testbed.base.axes import WorkloadFacts
from testbed.base.files import find_trace
from testbed.base.parts import Part
from testbed.base.spec import BARE_OPTION
from testbed.replay.layout import owned
from testbed.workloads.workload import Workload


@dataclass(frozen=True)
class ReplayOptions:
    """Options of `replay`.

    Attributes:
        trace: a shipped trace's name, or a file with one.

    Raises:
        UsageError: there is no such trace, or it names tensors as no module could.
    """

    trace: str = field(default="resnet50-v100", metadata=BARE_OPTION)

    def __post_init__(self) -> None:
        owned(find_trace(self.trace))


def _build(options: ReplayOptions, **given: Any) -> Workload:
    from testbed.replay.workload import build_replay

    return build_replay(options.trace, **given)


REPLAY = Part(
    name="replay",
    summary="a recorded trace: replay:NAME (see traces) or replay:FILE (testbed.trace/1)",
    build=_build,
    options=ReplayOptions,
    facts=lambda options: WorkloadFacts(stretches=True),
)
