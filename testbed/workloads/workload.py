"""What a workload is: a model, its samples and its loss; it never communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from testbed.base.errors import UsageError

if TYPE_CHECKING:
    import torch

    Batch = tuple[torch.Tensor, ...]


class Samples(Protocol):
    """Samples that can be fetched by index, so that their order can be fixed and digested."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these indices, stacked: usually (inputs, targets)."""
        ...


@dataclass(frozen=True)
class Workload:
    """A model with its data, as the trainer needs it.

    Attributes:
        model: the module to train, built under the caller's seed.
        train: `Samples`, or any map-style torch dataset (it is then collated by torch).
        test: samples that are never trained on, for the accuracy; None where there are none.
        loss: mean loss of a batch: `loss(model, batch) -> scalar`; None = cross entropy of
            `model(batch[0])` against `batch[1]`.
        num_correct: right answers in a batch: `num_correct(model, batch)`; where a sample has
            several answers, the sum of their shares; None = arg max, where outputs are scores of
            classes and labels their numbers, else there is no accuracy.
        batch_size: samples per worker and step, unless the user says otherwise.
        learning_rate: a rate at which the workload trains well with `optimizer`.
        momentum: momentum that belongs to `learning_rate`.
        weight_decay: weight decay that belongs to `learning_rate`.
        on_resume: called when training goes on after it stood waiting for messages; for workloads
            that keep a clock of their own. None = nobody asks.
        for_values: called before the workload is computed only for its values (the single-process
            reference): from then on it need not take its time, and gradients must be memory of
            their own. None = nothing to tell.
        recorded: the `testbed.base.trace.Trace` that it replays; None = it really computes.
        data: where the samples come from, for the table; `synthetic ...` if they are made up.
        name: filled in by the loader.
    """

    model: torch.nn.Module
    train: Any
    test: Any = None
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None
    num_correct: Callable[[torch.nn.Module, Batch], float | None] | None = None
    batch_size: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    on_resume: Callable[[], None] | None = None
    for_values: Callable[[], None] | None = None
    recorded: object = None
    data: str = "user's own"
    name: str = ""


def target_of(batch: Batch) -> torch.Tensor:
    """The second field of a batch, which a criterion compares outputs with.

    Raises:
        UsageError: samples have one field.
    """
    if len(batch) < 2:
        raise UsageError(
            "samples have one field, and the loss compares outputs with a second one; return "
            "samples (input, target), or a loss of your own, loss(model, batch)"
        )
    return batch[1]
