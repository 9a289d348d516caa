"""Moments on the host, or on a GPU without holding it up; read only after the step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes moments cheaply and tells later what lay between them."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def settle(self) -> None:
        """Wait until all moments taken so far have passed."""
        ...

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another; both must have passed."""
        ...


class HostClock:
    """The host's monotonic clock: right where the host itself computes."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def settle(self) -> None:
        """See `Clock.settle`; what the host did has passed."""

    def between_s(self, start: float, end: float) -> float:
        """See `Clock.between_s`."""
        return end - start


class CudaClock:
    """Events in the GPU's own queue: nothing waits for the device before the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """See `Clock.settle`."""
        torch.cuda.synchronize(self._device)

    def between_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock.between_s`."""
        return float(start.elapsed_time(end)) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """The clock of the device that computes."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
