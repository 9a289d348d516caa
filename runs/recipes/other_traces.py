"""Other models at other rates than `emulated`: whether predictions hold where links differ."""

from __future__ import annotations

from itertools import chain

from testbed.sweeping.grid import Sweep, expand

# Rates that two cores can carry for four nodes, a tenth of them in the kernel; plans of few
# and of many messages, one on each backend: every pair of scheduler and backend that is not here
# is a case of your own.
CASES = (
    ("vgg16bn-v100", "10gbit", ("mg-wfbp", "gloo"), ("osf", "mpi-ring"), ("wfbp", "zmq-ps")),
    ("inception-v4-2080ti", "10gbit", ("wfbp", "mpi-ring"), ("osf", "gloo"), ("bucket", "zmq-ps")),
    ("densenet201-2080ti", "5gbit", ("osf", "mpi-ring"), ("mg-wfbp", "gloo"), ("bucket", "zmq-ps")),
    ("bert-base-2080ti", "10gbit", ("bucket", "mpi-ring"), ("wfbp", "gloo"), ("osf", "zmq-ps")),
    ("resnet152-2080ti", "8gbit", ("asc-wfbp", "mpi-ring"), ("bucket", "gloo"), ("pace", "zmq-ps")),
)

BASE = {
    "workers": 4,
    "steps": 9,
    "warmup": 3,
    "verify_steps": 2,
    "threads": 1,
    "deadline": 60.0,
    "predict": True,
}


def recipe() -> Sweep:
    """Five replayed models at other rates on 4 nodes, three plans each: predicted and measured."""
    cells = chain.from_iterable(
        expand(
            {
                **BASE,
                "workload": f"replay:{trace}",
                "cluster": f"nodes=4,rate={rate},dilation=10",
                "scheduler": scheduler,
            },
            {"backend": (backend,)},
        )
        for trace, rate, *plans in CASES
        for scheduler, backend in plans
    )
    return Sweep("other-traces", tuple(cells), repeats=1, summary=recipe.__doc__ or "")
