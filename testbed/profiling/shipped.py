"""How traces are derived from published times, and those that come with the package.

    python -m testbed.profiling.shipped models/traces

writes the very files that are there, or says what it cannot build.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from testbed.base.errors import UnknownName
from testbed.base.files import save_trace
from testbed.base.trace import Trace, TraceTensor
from testbed.models.densenet import densenet161, densenet201
from testbed.models.googlenet_caffe import CaffeGoogLeNet
from testbed.models.inception_v4 import inception_v4
from testbed.models.resnet import resnet50, resnet101, resnet152
from testbed.models.vgg import vgg16
from testbed.profiling.dag import consumers_of
from testbed.profiling.overhead import Step
from testbed.profiling.survey import Survey, survey_step

# Traces of models whose total times were published, shared out by operation counts.
#
# Nothing is computed: the model runs on torch's meta device, where tensors have shapes alone.

NORM_OPERATIONS: Final = 8  # per value: mean, variance, scaling, shifting, each read and written
EMBEDDING_OPERATIONS: Final = 1  # per value that is looked up
_NORMS: Final = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Loss = Callable[[Any], torch.Tensor]


def derive_trace(
    model: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    *,
    name: str,
    device: str,
    batch_size: int,
    forward_s: float,
    backward_s: float,
    source: str,
    loss: Loss = torch.sum,
) -> Trace:
    """A trace whose totals were published, shared out over the tensors by their operations.

        t_f(l) = t_f cost(l) / sum(cost),   t_b(l) = t_b cost(l) / sum(cost)

    The cost of a weight is the multiplications of its layer for one batch (convolutions, matrix
    products); 8 operations for each value that a normalisation puts out, 1 for each value that an
    embedding looks up. What needs no parameters of its own (attention) counts for the last layer
    before it. Biases come with their weights and cost nothing.

    Args:
        model: on the meta device; its weights need no values.
        arguments: of one call of the model, a whole batch.
        name: of the trace.
        device: where the totals were measured.
        batch_size: of that measurement.
        forward_s: of the whole model.
        backward_s: of the whole model.
        source: where the totals come from, in words; kept in the file.
        loss: of the model's output; only which parameters it reaches matters.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2))
        ...     batch = torch.empty(4, 2)
        >>> trace = derive_trace(model, (batch,), name="toy", device="none", batch_size=4,
        ...                      forward_s=1.0, backward_s=2.0, source="made up")
        >>> [(t.name, t.num_elements, t.backward_s) for t in trace.tensors]
        [('0.weight', 6, 1.0), ('1.weight', 6, 1.0), ('1.bias', 2, 0.0)]
    """
    survey = survey_step(model, Step(lambda: loss(model(*arguments))))
    costs = _costs(model, arguments, survey)
    total = sum(costs)
    dag = consumers_of(model, arguments, {}, survey.names)
    tensors = tuple(
        TraceTensor(
            name=tensor,
            num_elements=parameter.numel(),
            forward_s=cost / total * forward_s,
            backward_s=cost / total * backward_s,
        )
        for tensor, parameter, cost in zip(survey.names, survey.parameters, costs, strict=True)
    )
    return Trace(
        name=name,
        device=f"{device} (derived)",
        batch_size=batch_size,
        tensors=tensors,
        consumers=dag.consumers,
        extra={"origin": "derived", "source": source, "dag": dag.source},
    )


def _costs(model: nn.Module, arguments: tuple[torch.Tensor, ...], survey: Survey) -> list[int]:
    """Operations of one forward pass for which each tensor stands, in the survey's order."""
    runs: list[str] = []
    operations: dict[str, int] = {}
    path_of = {module: path for path, module in model.named_modules()}
    owners = {path_of[layer.module]: layer.tensors[0] for layer in survey.layers}
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(_after, runs, operations, path))
            hooks.callback(hook.remove)
        counter = hooks.enter_context(FlopCounterMode(display=False))
        model(*arguments)
    products = _own_products(counter.get_flop_counts(), type(model).__name__)
    for path, count in products.items():
        operations[path] = operations.get(path, 0) + count
    costs = [0] * len(survey.names)
    for path, count in operations.items():
        costs[owners[_payer(path, runs, owners)]] += count
    return costs


def _after(
    runs: list[str], operations: dict[str, int], path: str, module: nn.Module, _: Any, output: Any
) -> None:
    runs.append(path)
    if isinstance(module, _NORMS):
        operations[path] = operations.get(path, 0) + NORM_OPERATIONS * output.numel()
    elif isinstance(module, nn.Embedding):
        operations[path] = operations.get(path, 0) + EMBEDDING_OPERATIONS * output.numel()


def _own_products(counts: Mapping[str, Mapping[Any, int]], root: str) -> dict[str, int]:
    """Multiplications that each module does itself, without those of its children."""
    totals = {
        path.removeprefix(root).removeprefix("."): sum(by_kind.values()) // 2
        for path, by_kind in counts.items()
        if path.split(".")[0] == root
    }
    own = dict(totals)
    for path, count in totals.items():
        if path:
            parent = path.rpartition(".")[0]
            while parent and parent not in own:
                parent = parent.rpartition(".")[0]
            own[parent] -= count
    return {path: count for path, count in own.items() if count}


def _payer(path: str, runs: Sequence[str], owners: Mapping[str, int]) -> str:
    """The module itself if tensors are its own, else the last one of its inside that has some."""
    if path in owners:
        return path
    inside = [run for run in runs if run in owners and run.startswith(f"{path}.")]
    return inside[-1]


NETAI = "Zhang et al., 2020, NetAI: batch and backward times of one V100"
ASC = "Shi, Chu and Li, 2021, INFOCOM (ASC-WFBP): t_f and t_b of one GPU"
MG = (
    "Shi, Chu and Li, 2021, IEEE TPDS 32(8) (MG-WFBP): compute time of one V100 in FP32, a third "
    "of it taken for forward"
)
MG_K80 = (
    "Shi, Chu and Li, 2019, INFOCOM (MG-WFBP): images/s of one node of two GPUs, where all "
    "schedulers are equal, taken for compute; a third of it for forward"
)
SEQUENCE_LENGTH: Final = 64
IMAGE_CLASSES: Final = 1000


@dataclass(frozen=True)
class Derived:
    """One shipped trace: a model, what it was given, and the published totals.

    Attributes:
        make_model: without values, on the meta device.
        batch_size: of the measurement.
        image_size: pixels; None = sequences of tokens.
        device: of the measurement.
        forward_s: published or inferred, see `source`.
        backward_s: likewise.
        source: of the totals.
    """

    make_model: Callable[[], nn.Module]
    batch_size: int
    image_size: int | None
    device: str
    forward_s: float
    backward_s: float
    source: str


def _classifier(make: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: make(num_classes=IMAGE_CLASSES, **options)


def bert_for_pretraining(
    hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12
) -> nn.Module:
    """BERT with both pretraining tasks and the vocabulary padded to a multiple of 8.

    30,528 instead of 30,522 words: 110,111,042 parameters for the base size, the published count.
    """
    from transformers import BertConfig, BertForPreTraining

    class Scores(nn.Module):
        """The scores of both tasks, added up so that one number reaches every parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = BertForPreTraining(
                BertConfig(
                    vocab_size=30528,
                    hidden_size=hidden_size,
                    num_hidden_layers=num_layers,
                    num_attention_heads=num_heads,
                    intermediate_size=4 * hidden_size,
                )
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            """Tokens [B, L] to one number."""
            scores = self.inner(input_ids=tokens)
            total: torch.Tensor = (
                scores.prediction_logits.sum() + scores.seq_relationship_logits.sum()
            )
            return total

    return Scores()


DERIVED: Final[dict[str, Derived]] = {
    "resnet50-v100": Derived(_classifier(resnet50), 32, 224, "V100", 0.0633, 0.0648, NETAI),
    "resnet101-v100": Derived(_classifier(resnet101), 32, 224, "V100", 0.0856, 0.1064, NETAI),
    "vgg16bn-v100": Derived(_classifier(vgg16, bn=True), 32, 224, "V100", 0.0829, 0.1116, NETAI),
    "resnet152-2080ti": Derived(_classifier(resnet152), 32, 224, "2080Ti", 0.091, 0.182, ASC),
    "densenet201-2080ti": Derived(_classifier(densenet201), 32, 224, "2080Ti", 0.073, 0.146, ASC),
    "inception-v4-2080ti": Derived(
        _classifier(inception_v4), 32, 299, "2080Ti", 0.0632, 0.1263, ASC
    ),
    "bert-base-2080ti": Derived(bert_for_pretraining, 64, None, "2080Ti", 0.1018, 0.2037, ASC),
    "densenet161-v100": Derived(
        _classifier(densenet161), 64, 224, "V100", 0.478 / 3, 0.956 / 3, MG
    ),
    "googlenet-k80": Derived(
        _classifier(CaffeGoogLeNet), 64, 224, "K80", 128 / 163.4 / 3, 256 / 163.4 / 3, MG_K80
    ),
    "resnet50-k80": Derived(
        _classifier(resnet50), 32, 224, "K80", 64 / 76.85 / 3, 128 / 76.85 / 3, MG_K80
    ),
}


def derive_shipped(name: str) -> Trace:
    """Build one of the shipped derived traces anew.

    Raises:
        UnknownName: no derived trace of this name.
    """
    if name not in DERIVED:
        raise UnknownName("derived trace", name, DERIVED)
    derived = DERIVED[name]
    size = derived.image_size
    with torch.device("meta"):
        model = derived.make_model().train()
        batch = (
            torch.empty(derived.batch_size, SEQUENCE_LENGTH, dtype=torch.long)
            if size is None
            else torch.empty(derived.batch_size, 3, size, size)
        )
    return derive_trace(
        model,
        (batch,),
        name=name,
        device=derived.device,
        batch_size=derived.batch_size,
        forward_s=derived.forward_s,
        backward_s=derived.backward_s,
        source=derived.source,
    )


def main(folder: str) -> None:
    """Write all derived traces into a folder."""
    for name in DERIVED:
        save_trace(derive_shipped(name), Path(folder) / f"{name}.json")
        print(f"{folder}/{name}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
