"""A byte-level language model on the source of Python's own standard library: real text everywhere.

The text is what lies beside the interpreter's `os.py`: all `*.py` files of that folder, in the
order of their names. Every tenth file is held out and never trained on. `Workload.data` tells the
version, the number of files and the digest of the text, so that two machines can tell whether they
train on the same.

Legend: B samples, L bytes of context.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from testbed.base.errors import UsageError
from testbed.base.parts import Part
from testbed.base.spec import options_class
from testbed.workloads.samples import Batch, as_index, spread_subset
from testbed.workloads.workload import Workload

from .checks import check_at_least
from .tokens import NextToken, token_loss

NUM_BYTES = 256  # the vocabulary
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class SourceText:
    """The text of a folder of Python sources.

    Attributes:
        train: bytes of the files that are trained on, joined.
        test: bytes of every tenth file.
        num_files: read.
        digest: SHA-256 of all files' sizes and bytes, in order.
    """

    train: npt.NDArray[np.uint8]
    test: npt.NDArray[np.uint8]
    num_files: int
    digest: str


def read_sources(folder: Path) -> SourceText:
    """All `*.py` files of a folder that are no links (a distribution's own are), sorted by name.

    Raises:
        UsageError: there are fewer than ten, as where the library comes in an archive.
    """
    paths = sorted(p for p in folder.glob("*.py") if p.is_file() and not p.is_symlink())
    if len(paths) < HELD_OUT_EVERY:
        raise UsageError(
            f"{folder} holds {len(paths)} Python sources; expected {HELD_OUT_EVERY} or more, the "
            "standard library beside os.py: use an interpreter that is installed with its sources, "
            "or name another folder of *.py files with --data"
        )
    texts = [path.read_bytes() for path in paths]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    rest = [t for i, t in enumerate(texts, start=1) if i % HELD_OUT_EVERY]
    train, test = (np.frombuffer(b"".join(each), np.uint8) for each in (rest, held_out))
    return SourceText(train, test, len(texts), digest.hexdigest())


class ByteWindows:
    """Windows of so many bytes, one after the other, of a text; what is left over is not used."""

    def __init__(self, text: npt.NDArray[np.uint8], length: int) -> None:
        self._rows = text[: len(text) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows [B, L] at these indices."""
        rows = self._rows[as_index(indices, len(self)).numpy()]
        return (torch.from_numpy(rows.astype(np.int64)),)


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), each byte attending to those before it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, L, width] to features."""
        size, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(size, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        changed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return changed


class ByteGpt(nn.Module):
    """A GPT on bytes without buffers or dropout; bytes [B, L] to logits [B, L, 256].

        x = embed(bytes) + position;  num_layers x Block;  norm(x) embed^T

    Args:
        width: of the features, a multiple of `num_heads`.
        num_layers: blocks.
        num_heads: of the attention.
        context: largest L.

    Raises:
        UsageError: a size below 1, or a width that is no multiple of `num_heads`.

    Example:
        >>> model = ByteGpt(width=192, num_layers=2, num_heads=4, context=64)
        >>> sum(parameter.numel() for parameter in model.parameters())
        951552

    Reference:
        Radford et al., 2019, OpenAI (GPT-2). Departs: bytes instead of words, no dropout, a
        thousandth of the size.
    """

    def __init__(self, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                narrow = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers if narrow else 1))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Bytes [B, L] to logits [B, L, 256]."""
        x = self.embed(given) + self.position[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


def share_right(model: nn.Module, batch: Batch) -> float:
    """Sum over the samples of the share of their bytes that are predicted right."""
    given, targets = batch
    return float((model(given).argmax(2) == targets).float().mean(1).sum())


def _build(options: Any, *, data_dir: str | None, seed: int) -> Workload:
    check_at_least("byte-gpt", 1, **vars(options))
    if options.width % options.num_heads:
        raise UsageError(
            f"byte-gpt: width is {options.width}; expected a multiple of num_heads, which is "
            f"{options.num_heads}"
        )
    text = read_sources(Path(data_dir or sysconfig.get_path("stdlib")))
    source = f"Python {platform.python_version()}'s standard library"
    samples = partial(ByteWindows, length=options.context + 1)
    return Workload(
        model=ByteGpt(options.width, options.num_layers, options.num_heads, options.context),
        train=NextToken(samples(text.train)),
        test=spread_subset(NextToken(samples(text.test)), options.num_test),
        loss=token_loss,
        num_correct=share_right,
        batch_size=options.batch_size,
        learning_rate=0.03,
        momentum=0.9,
        data=f"{source if data_dir is None else data_dir}, {text.num_files} files, "
        f"sha256 {text.digest}",
    )


BYTE_GPT = Part(
    name="byte-gpt",
    summary="GPT of a million parameters on the bytes of Python's standard library (real data)",
    build=_build,
    options=options_class(
        width=192, num_layers=2, num_heads=4, context=64, batch_size=4, num_test=128
    ),
)
