"""Names to parts: the project's own by import path, third parties' by Python entry point.

A part is loaded only when somebody asks for it, so that a missing library of one part never
hinders another. Entry-point groups: `testbed.backends`, `testbed.schedulers`,
`testbed.compressors`, `testbed.workloads`; the value is the same object that the project's own
modules hold (`BackendKind`, `SchedulerKind`, `CompressorKind`, `WorkloadKind`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from testbed.errors import Unavailable, UnknownName


@dataclass(frozen=True)
class Registry:
    """A named family of parts.

    Attributes:
        what: the family's word in messages (`backend`).
        builtin: name -> `module:attribute`.
        group: the entry-point group of third parties' parts.
    """

    what: str
    builtin: Mapping[str, str]
    group: str

    def paths(self) -> dict[str, str]:
        """All known names with their import paths; a project's own name cannot be taken over."""
        external = {e.name: e.value for e in entry_points(group=self.group)}
        return external | dict(self.builtin)

    def load(self, name: str) -> Any:
        """The part of this name.

        Raises:
            UnknownName: nobody registered the name; the message lists the known ones.
            Unavailable: its module cannot be imported here.
        """
        paths = self.paths()
        if name not in paths:
            raise UnknownName(self.what, name, paths)
        module, _, attribute = paths[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"{module} cannot be imported ({error})"
            missing = getattr(error, "name", None) or module
            raise Unavailable(
                self.what, name, reason, f"install what provides {missing!r}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.paths()))


BACKENDS = Registry(
    "backend",
    {
        "loopback": "testbed.backends.loopback:LOOPBACK",
        "none": "testbed.backends.none:NONE",
        "zmq-ps": "testbed.backends.zmq_ps:ZMQ_PS",
        "mpi-ring": "testbed.backends.mpi:MPI_RING",
        "mpi": "testbed.backends.mpi:MPI_LIBRARY",
        "gloo": "testbed.backends.torch_groups:GLOO",
        "nccl": "testbed.backends.torch_groups:NCCL",
        "peer": "testbed.backends.torch_groups:PEER",
    },
    "testbed.backends",
)

WORKLOADS = Registry(
    "workload",
    {
        "digits-mlp": "testbed.models.digits:DIGITS_MLP",
        "digits-cnn": "testbed.models.digits:DIGITS_CNN",
        "resnet20": "testbed.models.resnet:RESNET20",
        "resnet56": "testbed.models.resnet:RESNET56",
        "resnet110": "testbed.models.resnet:RESNET110",
        "resnet50": "testbed.models.resnet:RESNET50",
        "resnet101": "testbed.models.resnet:RESNET101",
        "resnet152": "testbed.models.resnet:RESNET152",
        "vgg16": "testbed.models.vgg:VGG16",
        "densenet161": "testbed.models.densenet:DENSENET161",
        "densenet201": "testbed.models.densenet:DENSENET201",
        "inception-v4": "testbed.models.inception_v4:INCEPTION_V4",
        "googlenet": "testbed.models.googlenet:GOOGLENET",
        "alexnet": "testbed.models.alexnet:ALEXNET",
        "bert-base": "testbed.models.transformer:BERT_BASE",
        "bert-large": "testbed.models.transformer:BERT_LARGE",
        "gpt2": "testbed.models.transformer:GPT2",
        "replay": "testbed.replay.kind:REPLAY",
    },
    "testbed.workloads",
)

SCHEDULERS = Registry(
    "scheduler",
    {
        "sequential": "testbed.scheduling.sequential:SEQUENTIAL",
        "wfbp": "testbed.scheduling.wfbp:WFBP",
        "bucket": "testbed.scheduling.bucket:BUCKET",
        "cycle": "testbed.scheduling.cycle:CYCLE",
        "mg-wfbp": "testbed.scheduling.mg_wfbp:MG_WFBP",
        "asc-wfbp": "testbed.scheduling.asc_wfbp:ASC_WFBP",
        "optimal": "testbed.scheduling.optimal:OPTIMAL",
        "osf": "testbed.scheduling.osf:OSF",
        "pace": "testbed.scheduling.pace:PACE",
        "bytescheduler": "testbed.scheduling.bytescheduler:BYTESCHEDULER",
        "p3": "testbed.scheduling.p3:P3",
        "dear": "testbed.scheduling.dear:DEAR",
        "omgs": "testbed.scheduling.omgs:OMGS",
        "lags": "testbed.scheduling.lags:LAGS",
        "auto": "testbed.scheduling.auto:AUTO",
    },
    "testbed.schedulers",
)

COMPRESSORS = Registry(
    "compressor",
    {
        "none": "testbed.compression.kinds:NONE",
        "fp16": "testbed.compression.kinds:FP16",
        "bf16": "testbed.compression.kinds:BF16",
        "topk": "testbed.compression.kinds:TOPK",
        "topk-sampled": "testbed.compression.kinds:TOPK_SAMPLED",
        "randomk": "testbed.compression.kinds:RANDOMK",
        "threshold": "testbed.compression.kinds:THRESHOLD",
        "dgc": "testbed.compression.kinds:DGC",
        "gtopk": "testbed.compression.kinds:GTOPK",
        "oktopk": "testbed.compression.kinds:OKTOPK",
        "sign": "testbed.compression.kinds:SIGN",
        "ef-sign": "testbed.compression.kinds:EF_SIGN",
        "onebit": "testbed.compression.kinds:ONEBIT",
        "qsgd": "testbed.compression.kinds:QSGD",
        "terngrad": "testbed.compression.kinds:TERNGRAD",
        "natural": "testbed.compression.kinds:NATURAL",
        "powersgd": "testbed.compression.kinds:POWERSGD",
        "acp-sgd": "testbed.compression.kinds:ACP_SGD",
        "ef": "testbed.compression.kinds:EF",
        "warmup": "testbed.compression.kinds:WARMUP",
        "by-size": "testbed.compression.kinds:BY_SIZE",
    },
    "testbed.compressors",
)

STUDIES = Registry(
    "study",
    {
        "paper-shapes": "testbed.published.study:PAPER_SHAPES",
        "accuracy-compressed": "testbed.accuracy.study:ACCURACY_COMPRESSED",
    },
    "testbed.studies",
)
