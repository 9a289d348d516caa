"""Sequences of tokens: made up, or windows of one flat file; and words hidden for BERT.

Legend: B samples, L tokens per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from testbed.base.errors import UsageError
from testbed.workloads.samples import SYNTHETIC_POOL, Batch, PooledSamples, as_index
from testbed.workloads.workload import Samples

TOKEN_FILE = "train.bin"
IGNORED = -100  # target of a token that does not count; cross entropy leaves it out by default


class TokenWindows:
    """Windows of L tokens, one after the other, of a file of unsigned 16-bit token numbers.

    The file is mapped, not read: only the windows asked for are loaded.

    Raises:
        UsageError: the file is missing or shorter than one window.
    """

    def __init__(self, folder: Path, length: int, vocabulary_size: int) -> None:
        path = folder / TOKEN_FILE
        size = path.stat().st_size // 2 if path.is_file() else 0
        if size < length:
            raise UsageError(
                f"--data is '{folder}', whose {TOKEN_FILE} has {size} tokens; expected a file of "
                f"at least {length} token numbers, each an unsigned 16-bit little-endian integer"
            )
        self._tokens = np.memmap(path, dtype="<u2", mode="r")
        self._path = path
        self._length = length
        self._vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows [B, L] at these indices."""
        starts = as_index(indices, len(self)).numpy() * self._length
        rows = np.stack([self._tokens[s : s + self._length] for s in starts]).astype(np.int64)
        if rows.max() >= self._vocabulary_size:
            raise UsageError(
                f"'{self._path}' holds token {rows.max()}; the model's vocabulary_size is "
                f"{self._vocabulary_size}; make the file with the model's own tokenizer"
            )
        return (torch.from_numpy(rows),)


class NextToken:
    """Windows of L + 1 tokens as inputs [B, L] and, one further, targets [B, L]."""

    def __init__(self, windows: Samples) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs and targets."""
        (tokens,) = self.windows.batch(indices)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class HiddenTokens:
    """Windows of L tokens of which 15 % are hidden; the model is to find them.

    Which ones depends on the seed and the sample's index alone. Departs from Devlin et al. (2019):
    every chosen token is replaced by the mask token (theirs: 80 %, the rest random or kept), and
    the share is the same in each sample, so that no batch is without a target.
    """

    def __init__(self, windows: Samples, mask_token: int, seed: int) -> None:
        self.windows = windows
        self.mask_token = mask_token
        self.seed = seed

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs [B, L] and targets [B, L], `IGNORED` where nothing is hidden."""
        (tokens,) = self.windows.batch(indices)
        hidden = torch.stack([self._choose(int(i), tokens.shape[1]) for i in indices])
        return (
            tokens.masked_fill(hidden, self.mask_token),
            tokens.masked_fill(~hidden, IGNORED),
        )

    def _choose(self, index: int, length: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + index)
        order = torch.randperm(length, generator=generator, device="cpu")
        return order < max(1, round(0.15 * length))


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the tokens that have a target."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def synthetic_tokens(
    num_samples: int, length: int, vocabulary_size: int, seed: int
) -> PooledSamples:
    """Windows [B, L] of evenly distributed tokens, equal for equal seeds.

    Example:
        >>> synthetic_tokens(1000, 16, 50257, seed=1).batch([0, 999])[0].shape
        torch.Size([2, 16])
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    pool = (min(num_samples, SYNTHETIC_POOL), length)
    tokens = torch.randint(vocabulary_size, pool, generator=generator, device="cpu")
    return PooledSamples(num_samples, tokens)
