"""Ways to fetch samples by index: kept in memory, made up, a subset, or from a torch dataset.

All tensors live on the CPU, whatever the default device: a model can be built on `meta` without
losing its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from testbed.base.errors import UsageError
from testbed.workloads.workload import Samples

Batch = tuple[torch.Tensor, ...]

SYNTHETIC_POOL = 64  # distinct synthetic samples; 64 images of 3 x 224 x 224 floats are 38.5 MB


def as_index(indices: Sequence[int], num_samples: int) -> torch.Tensor:
    """Indices as a tensor.

    Raises:
        IndexError: an index is outside 0 .. num_samples - 1.
    """
    index = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= num_samples):
        raise IndexError(
            f"indices run from {int(index.min())} to {int(index.max())}; "
            f"expected 0 .. {num_samples - 1}"
        )
    return index


class TensorSamples:
    """Samples that are rows of tensors in memory; a batch is one index select per tensor.

    The fast path of `DatasetSamples` for `torch.utils.data.TensorDataset`.

    Example:
        >>> samples = TensorSamples(torch.arange(4.0), torch.arange(4))
        >>> samples.batch([2, 0])
        (tensor([2., 0.]), tensor([2, 0]))
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise UsageError(
                f"tensors of samples have lengths {sorted(lengths)}; expected one length for all"
            )
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows at these indices."""
        index = as_index(indices, len(self))
        return tuple(tensor.index_select(0, index) for tensor in self.tensors)


class DatasetSamples:
    """A map-style torch dataset, collated by torch one sample at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these indices, through `default_collate`.

        Raises:
            UsageError: a sample is no tuple of things that become tensors.
        """
        collated = default_collate([self.dataset[int(i)] for i in indices])
        fields = (collated,) if isinstance(collated, torch.Tensor) else collated
        if not isinstance(fields, list | tuple) or not all(
            isinstance(field, torch.Tensor) for field in fields
        ):
            raise UsageError(
                f"samples of {type(self.dataset).__name__} collate to {type(collated).__name__}; "
                "expected tensors; let __getitem__ return a tuple (input, target) of tensors "
                "or numbers"
            )
        return tuple(fields)


class SubsetSamples:
    """Some of the samples of another source, renumbered from 0."""

    def __init__(self, source: Samples, indices: Sequence[int]) -> None:
        self.source = source
        self.indices = tuple(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The chosen samples at these new numbers."""
        return self.source.batch([self.indices[int(i)] for i in indices])


def spread_subset(source: Samples, num_samples: int) -> Samples:
    """`num_samples` of the source at even distances (0 = all of it), so that sorted classes stay.

    Raises:
        UsageError: the source has fewer.
    """
    if num_samples == 0:
        return source
    if num_samples > len(source):
        raise UsageError(f"num_samples is {num_samples}; the data set has {len(source)}")
    return SubsetSamples(source, [i * len(source) // num_samples for i in range(num_samples)])


class PooledSamples:
    """As many samples as asked for out of a small pool: sample i is the pool's row i mod P.

    Making random samples anew in each step would cost more than some models' steps; a pool costs
    one index select.
    """

    def __init__(self, num_samples: int, *pool: torch.Tensor) -> None:
        self.pool = TensorSamples(*pool)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: Sequence[int]) -> Batch:
        """The pool's rows that stand for these indices."""
        rows = as_index(indices, self.num_samples).remainder(len(self.pool))
        return tuple(tensor.index_select(0, rows) for tensor in self.pool.tensors)


def synthetic_images(
    num_samples: int, shape: tuple[int, int, int], num_classes: int, seed: int
) -> PooledSamples:
    """Images of normal noise [C, H, W] with random classes, equal for equal seeds.

    Example:
        >>> images, classes = synthetic_images(1000, (3, 8, 8), 10, seed=1).batch([0, 999])
        >>> images.shape, classes.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2]))
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    pool = min(num_samples, SYNTHETIC_POOL)
    images = torch.randn(pool, *shape, generator=generator, device="cpu", dtype=torch.float32)
    classes = torch.randint(num_classes, (pool,), generator=generator, device="cpu")
    return PooledSamples(num_samples, images, classes)
