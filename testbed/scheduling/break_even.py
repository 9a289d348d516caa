"""What schedulers and compressors are predicted to gain at bandwidths that nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.base.axes import SCHEDULERS
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.algorithms import Algorithm
from testbed.prediction.break_even import GainRange, gain_range, highest_break_even
from testbed.prediction.codec import CodecCost
from testbed.prediction.compressed import CompressedTimeline
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import Node, at_bandwidth
from testbed.prediction.timeline import Timeline
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.under_compressor import CompressedExchange, is_for_sparse, plan_under


def baselines() -> tuple[str, ...]:
    """The plain methods that others are compared with.

    Example:
        >>> baselines()
        ('sequential', 'wfbp', 'bucket')
    """
    return SCHEDULERS.which(lambda facts: facts.baseline)


def plan_and_predict(spec: str, trace: Trace, link: Link) -> tuple[Plan, Timeline]:
    """A scheduler's plan for this very link, and its timeline there."""
    plan = make_plan(spec, trace, link)
    return plan, predict(plan, trace, link)


@dataclass(frozen=True)
class CompressorGain:
    """Where a compressor gains on the best dense schedule.

    Attributes:
        compressor: specification.
        gain: time of the best dense schedule over the best one under the compressor, less 1, at
            the link's own bandwidth.
        scheduler: the best one under the compressor there.
        below_factor: it gains 1 % or more below this multiple of the link's bandwidth; 0: nowhere;
            infinite: at the highest bandwidth looked at.
    """

    compressor: str
    gain: float
    scheduler: str
    below_factor: float


class Predictions:
    """Predictions for one trace on one link at any bandwidth, each computed once.

    Start-up times stay as they are and the bandwidth is varied. With little bandwidth everything
    takes bytes over bandwidth, with much everything takes the compute time: schedulers gain in
    between, compressors below.

    Args:
        trace: of one worker.
        link: gives start-ups, bandwidth and number of workers.
        algorithm: that its backend runs.
        specs: schedulers, for dense and compressed messages alike; the plain ones are added for
            dense messages. Those that give messages ratios (`lags`, `omgs`) are left out there.
        max_channels: over which its backend spreads compressed fifo messages.
        node: where several ranks share a machine: only the network's bandwidth is varied.
    """

    def __init__(
        self,
        trace: Trace,
        link: Link,
        algorithm: Algorithm,
        specs: Sequence[str],
        max_channels: int = 1,
        node: Node | None = None,
    ) -> None:
        self._trace, self._link, self._algorithm = trace, link, algorithm
        self.specs, self._max_channels, self._node = tuple(specs), max_channels, node
        self._baselines = baselines()
        self._plans: dict[tuple[str, float], Plan] = {}
        self._iteration_s: dict[tuple[str, float], float] = {}
        self._compressed: dict[tuple[str, float, str], CompressedTimeline] = {}

    def gain_range(self, spec: str) -> GainRange:
        """At which bandwidths a scheduler gains 1 % or more on the best plain one."""

        def gain(factor: float) -> float:
            plain_s = min(self.iteration_s(p, factor) for p in self._baselines)
            own_s = self.iteration_s(spec, factor)
            return plain_s / own_s - 1 if own_s > 0 else 0.0

        return gain_range(gain)

    def compressor_gain(self, codec: CodecCost) -> CompressorGain:
        """Below which bandwidth a compressor gains 1 % or more on the best dense schedule."""

        def gain(factor: float) -> float:
            own_s = self.best_compressed(codec, factor)[0]
            return self.best_dense(factor)[0] / own_s - 1 if own_s > 0 else 0.0

        return CompressorGain(
            codec.compressor,
            gain(1.0),
            self.best_compressed(codec)[1],
            highest_break_even(gain),
        )

    def iteration_s(self, spec: str, factor: float) -> float:
        """Iteration time of a scheduler's dense messages, at a multiple of the link's bandwidth."""
        if (spec, factor) not in self._iteration_s:
            found = predict(self._plan(spec, factor), self._trace, self._at(factor))
            self._iteration_s[spec, factor] = found.iteration_s
        return self._iteration_s[spec, factor]

    def compressed(self, spec: str, codec: CodecCost, factor: float = 1.0) -> CompressedTimeline:
        """One scheduler under one compressor, at a multiple of the link's bandwidth.

        Of the scheduler's two plans the faster, spread over channels, as a run does
        (`plan_under`); a core for each of encoding and decoding: a run may have fewer.
        """
        what = (spec, factor, codec.compressor)
        if what not in self._compressed:
            link = self._at(factor)
            dense = self._plan(spec, factor)

            def make(seen: Link) -> Plan:
                return dense if seen is link else make_plan(spec, self._trace, seen)

            how = CompressedExchange(codec, self._algorithm, max_channels=self._max_channels)
            self._compressed[what] = plan_under(make, self._trace, link, how)[1]
        return self._compressed[what]

    def best_dense(self, factor: float = 1.0) -> tuple[float, str]:
        """Iteration time and name of the fastest schedule of dense messages."""
        return min(
            (self.iteration_s(spec, factor), spec)
            for spec in dict.fromkeys((*self.specs, *self._baselines))
            if not is_for_sparse(self._plan(spec, factor))
        )

    def best_compressed(self, codec: CodecCost, factor: float = 1.0) -> tuple[float, str]:
        """Iteration time and name of the fastest schedule under a compressor."""
        fitting = [s for s in self.specs if self.fits(s, codec, factor)]
        specs = fitting or [SCHEDULERS.default]
        return min((self.compressed(s, codec, factor).iteration_s, s) for s in specs)

    def fits(self, spec: str, codec: CodecCost, factor: float = 1.0) -> bool:
        """Whether the compressor can carry out the scheduler's plan: ratios need one with some."""
        return codec.ratio is not None or not is_for_sparse(self._plan(spec, factor))

    def _at(self, factor: float) -> Link:
        return at_bandwidth(self._link, factor, self._node)

    def _plan(self, spec: str, factor: float) -> Plan:
        if (spec, factor) not in self._plans:
            self._plans[spec, factor] = make_plan(spec, self._trace, self._at(factor))
        return self._plans[spec, factor]
