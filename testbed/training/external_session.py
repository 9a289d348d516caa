"""The driver for a framework that exchanges gradients by itself: it only watches and measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from testbed.backends.protocol import ExternalFramework
from testbed.control.protocol import Control


class ExternalSession:
    """One rank's part in a training that another framework makes data-parallel; see `Session`.

    The framework's own wait for messages lies at the end of `loss.backward()`: exposed time is
    what passes between the moment when the last gradient is ready and the optimizer's step.

    Args:
        model: trained; the framework makes all ranks start with rank 0's parameters.
        optimizer: of its parameters.
        peer: opened.
        control: told what this rank does.
        on_resume: called whenever training goes on after it stood waiting for a message.

    Attributes:
        model: what is to be called instead of the model.
        step: number of the step that is being computed.
        staleness: always None: nobody runs ahead.
        release_order: always empty: the framework keeps its order to itself.
    """

    staleness: int | None = None
    compressing: None = None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        peer: ExternalFramework,
        control: Control,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        self.model = peer.wrap(model)
        self.step = 0
        self.release_order: list[str] = []
        self._peer = peer
        self._control = control
        self._on_resume = on_resume
        self._exposed_s = 0.0
        self._last_ready_s: float | None = None
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to the gradients."""
        return self._peer.hold_back()

    def synchronize(self) -> None:
        """The gradients are means already; what passed since the last one was ready was waiting."""
        if self._last_ready_s is None:
            return
        self._exposed_s += time.perf_counter() - self._last_ready_s
        self._last_ready_s = None
        self._peer.count_step()
        self.step += 1
        self._control.set_state(f"computing step {self.step}")
        if self._on_resume is not None:
            self._on_resume()

    def flush(self) -> None:
        """Nothing is ever pending."""

    def take_awaited(self) -> bool:
        """No step leaves anything to the next one."""
        return False

    def take_exposed_s(self) -> float:
        """Seconds that this rank stood waiting since the last call."""
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        return exposed_s

    def resume(self, step: int, ready_names: Sequence[str]) -> None:
        """Go on at a step."""
        self.step = step

    def end_threads(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last_ready_s = time.perf_counter()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.synchronize()
