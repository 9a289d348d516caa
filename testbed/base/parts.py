"""Names to parts: the project's own by import path, third parties' by Python entry point.

A part is loaded only when somebody asks for it, so that a missing library of one part never
hinders another. Entry-point groups: `testbed.backends`, `testbed.schedulers`,
`testbed.compressors`, `testbed.workloads`; the value is the same object that the project's own
modules hold (`BackendKind`, `SchedulerKind`, `CompressorKind`, `WorkloadKind`).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from testbed.base.errors import Unavailable, UnknownName, UsageError, closest


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
        "sequential": "testbed.scheduling.wfbp:SEQUENTIAL",
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
        "none": "testbed.compression.registry:NONE",
        "fp16": "testbed.compression.registry:FP16",
        "bf16": "testbed.compression.registry:BF16",
        "topk": "testbed.compression.registry:TOPK",
        "topk-sampled": "testbed.compression.registry:TOPK_SAMPLED",
        "randomk": "testbed.compression.registry:RANDOMK",
        "threshold": "testbed.compression.registry:THRESHOLD",
        "dgc": "testbed.compression.registry:DGC",
        "gtopk": "testbed.compression.registry:GTOPK",
        "oktopk": "testbed.compression.registry:OKTOPK",
        "sign": "testbed.compression.registry:SIGN",
        "ef-sign": "testbed.compression.registry:EF_SIGN",
        "onebit": "testbed.compression.registry:ONEBIT",
        "qsgd": "testbed.compression.registry:QSGD",
        "terngrad": "testbed.compression.registry:TERNGRAD",
        "natural": "testbed.compression.registry:NATURAL",
        "powersgd": "testbed.compression.registry:POWERSGD",
        "acp-sgd": "testbed.compression.registry:ACP_SGD",
        "ef": "testbed.compression.registry:EF",
        "warmup": "testbed.compression.registry:WARMUP",
        "by-size": "testbed.compression.registry:BY_SIZE",
    },
    "testbed.compressors",
)

STUDIES = Registry(
    "study",
    {
        "paper-shapes": "testbed.studies.published.study:PAPER_SHAPES",
        "accuracy-compressed": "testbed.studies.accuracy.carry_out:ACCURACY_COMPRESSED",
    },
    "testbed.studies",
)


# Part specifications: `name` or `name:key=value,...`, on the command line and in recipes.
#
# A part may say that one of its options can be given without its key: `replay:resnet50-v100`.

T = TypeVar("T")

# Metadata of the field of an options dataclass that a first value without a key sets.
BARE_OPTION: Mapping[str, Any] = types.MappingProxyType({"bare": True})


def former_names(*names: str) -> Mapping[str, Any]:
    """Metadata of a field of an options dataclass: names that are still accepted for it."""
    return types.MappingProxyType({"former_names": names})


_IN_WORDS: Mapping[Any, str] = {int: "a whole number, as in 4", float: "a number, as in 0.5"}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True)
class PartSpec:
    """A part's name and its options as text, not yet checked against the part.

    A first option that was given without its key has the key "".
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        pieces = [f"{key}={value}" if key else value for key, value in self.options.items()]
        return f"{self.name}:" + ",".join(pieces)


def parse_spec(text: str) -> PartSpec:
    """The name and options of one part.

    Raises:
        UsageError: an option other than the first is not `key=value`.

    Example:
        >>> parse_spec("zmq-ps:servers=dedicated:2,consistency=ssp:4").options["consistency"]
        'ssp:4'
        >>> parse_spec("peer:ddp,bucket_mib=10").options
        {'': 'ddp', 'bucket_mib': '10'}
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for number, piece in enumerate(filter(None, rest.split(","))):
        key, equals, value = piece.partition("=")
        if not equals and number == 0:
            options[""] = piece.strip()
            continue
        if not equals or not key.strip():
            raise _not_key_value(name, piece)
        options[key.strip()] = value.strip()
    if not name:
        raise UsageError(f"part {text!r} has no name; write name or name:key=value,...")
    return PartSpec(name, options)


def split_specs(text: str) -> tuple[str, ...]:
    """Cut a comma-separated list of specifications, keeping each part's own options with it.

    A piece that reads `key=value` before any colon continues the part to its left.

    Example:
        >>> split_specs("mpi:blocking=1,gloo,zmq-ps:servers=dedicated:2,consistency=bsp")
        ('mpi:blocking=1', 'gloo', 'zmq-ps:servers=dedicated:2,consistency=bsp')
    """
    parts: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if parts and re.match(r"^[A-Za-z_][A-Za-z0-9_-]*=", piece):
            parts[-1] += ("," if ":" in parts[-1] else ":") + piece
        else:
            parts.append(piece)
    return tuple(parts)


def parse_options(part: str, options: Mapping[str, str], into: type[T]) -> T:
    """Fill a frozen dataclass of typed options from text.

    Raises:
        UsageError: an unknown option (the known ones are listed), or a value of the wrong kind.
    """
    fields = {f.name: f for f in dataclasses.fields(into)}  # type: ignore[arg-type]
    bare = next((f.name for f in fields.values() if BARE_OPTION.items() <= f.metadata.items()), "")
    former = {old: f.name for f in fields.values() for old in f.metadata.get("former_names", ())}
    hints = typing.get_type_hints(into)
    values: dict[str, Any] = {}
    for key, text in options.items():
        name = key.replace("-", "_") or bare
        name = former.get(name, name)
        if not name:
            raise _not_key_value(part, text)
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            told = f"{part!r} has no option {key!r}; known options: {known}"
            raise UsageError(told + closest(name, sorted(fields)))
        values[name] = _convert(part, name, text, hints[name])
    return into(**values)


def _not_key_value(part: str, piece: str) -> UsageError:
    return UsageError(f"option {piece!r} of {part!r} is not key=value; write {part}:key=value,...")


def _convert(part: str, key: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if text.lower() == "none" else _convert(part, key, text, inner[0])
    if typing.get_origin(kind) is typing.Literal:
        allowed = typing.get_args(kind)
        if text not in allowed:
            raise UsageError(f"{part}: {key} is {text!r}; expected one of {', '.join(allowed)}")
        return text
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise UsageError(f"{part}: {key} is {text!r}; expected 1 or 0")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError as error:
        wanted = _IN_WORDS.get(kind, kind.__name__)
        raise UsageError(f"{part}: {key} is {text!r}; expected {wanted}") from error
