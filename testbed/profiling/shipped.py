"""The derived traces that come with the package, and how to derive them again.

    python -m testbed.profiling.shipped models/traces

writes the very files that are there, or says what it cannot build.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from testbed.base.errors import UnknownName
from testbed.base.files import save_trace
from testbed.base.trace import Trace
from testbed.models.densenet import densenet161, densenet201
from testbed.models.googlenet_caffe import CaffeGoogLeNet
from testbed.models.inception_v4 import inception_v4
from testbed.models.resnet import resnet50, resnet101, resnet152
from testbed.models.vgg import vgg16
from testbed.profiling.derive import derive_trace

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
