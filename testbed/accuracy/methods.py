"""What is compared: methods, the rates that are searched, and how much each may lose."""

from __future__ import annotations

from dataclasses import dataclass

RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
DENSE = "dense"
TOPK = "topk 1 %, ef"
SIGN = "ef-sign"


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: of the row.
        compressor: its specification.
        steps_to: rates that are searched: how far a steady gradient of 1 moves a parameter in a
            step, so the optimizer's rate is this times (1 - all momentum).
        momenta: of the optimizer; each is searched.
        own_momentum: what the compressor itself carries.
        may_lose: points of accuracy that it may end below dense; None: no bound, it is shown to
            tell what error feedback does.
        settings_of: the method whose best setting it takes, instead of a search of its own: what
            a switch does, all else equal.
    """

    name: str
    compressor: str
    steps_to: tuple[float, ...] = RATES
    momenta: tuple[float, ...] = (0.0, 0.9)
    own_momentum: float = 0.0
    may_lose: float | None = None
    settings_of: str | None = None

    def settings(self) -> list[tuple[float, float]]:
        """(learning rate, momentum) of each searched setting.

        Example:
            >>> Method("sgd", "none", (0.1, 0.2), (0.0, 0.9)).settings()
            [(0.1, 0.0), (0.2, 0.0), (0.01, 0.9), (0.02, 0.9)]
        """
        return [
            (float(f"{step * (1 - momentum) * (1 - self.own_momentum):.6g}"), momentum)
            for momentum in self.momenta
            for step in self.steps_to
        ]


def methods(steps_per_epoch: int = 11) -> tuple[Method, ...]:
    """The comparison, dense first.

    Args:
        steps_per_epoch: of the trials; each warm-up stage of DGC is an epoch, as published.
    """
    dgc = f"dgc:ratio=0.01,momentum=0.9,warmup_steps={steps_per_epoch}"
    return (
        Method(DENSE, "none", may_lose=0.0),
        Method(TOPK, "ef+topk:ratio=0.01", may_lose=1.0),
        Method("dgc 1 %", dgc, momenta=(0.0,), own_momentum=0.9, may_lose=1.0),
        Method("powersgd rank 4", "powersgd:rank=4", may_lose=1.0),
        Method("qsgd 4 bit", "qsgd", may_lose=1.0),
        Method(SIGN, "ef-sign", may_lose=2.0),
        Method("topk 1 %, ef off", "topk:ratio=0.01", settings_of=TOPK),
        Method("ef-sign, ef off", "sign:vote=0,scaled=1", settings_of=SIGN),
        Method("topk 1 %, no ef, own rate", "topk:ratio=0.01"),
        Method("sign, no ef, own rate", "sign:vote=0,scaled=1"),
    )
