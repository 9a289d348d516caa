"""From the outcomes of all ranks to one cell; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

import msgspec

from testbed.base.axes import inexact_parts
from testbed.base.config import RunConfig, reproduce
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.types import BSP, IN_STEP, NOTHING_MOVES
from testbed.noise.steady import steady_steps
from testbed.noise.steal_time import LINK_STOLEN
from testbed.records.cell import Accuracy, Cell, CompressionResult, MemoryResult, StepSamples
from testbed.statistics.summary import quantile
from testbed.training.evidence import Sketch, sketch_error
from testbed.training.sampling import RunningDigest

# What one rank brings home.


class Outcome(msgspec.Struct, kw_only=True):
    """What one rank brings home; rank 0 makes the cell from all of them (see `Cell`).

    Attributes:
        reference_error: largest relative difference of a parameter from the reference's; None: not
            compared.
        reference_worst: name of that parameter.
        reference_steps: after so many steps.
        reference_slack: least tolerance for the difference: in another order a compressor's sums
            may be rounded so differently.
        reference_contents: digest of what each worker's samples held in those steps, there.
        reference_buffers: of each worker after its first step, there.
        verified_content: digest of what this rank's samples held in those steps.
        first_buffers: of this rank after its first step.
    """

    rank: int
    started: str = "fresh"
    step_time_s: list[float] = []
    exposed_s: list[float] = []
    stolen: list[float] = []
    outside: list[float] = []
    unsteady: list[bool] = []
    loss: list[float] = []
    staleness: list[int] = []
    sent_bytes: int = 0
    received_bytes: int = 0
    num_helper_processes: int = 0
    peak_memory_bytes: int = 0
    cores_busy: float | None = None
    cores_stolen: float | None = None
    cores_outside: float | None = None
    training_time_s: float = 0.0
    steps: int = 0
    batch_size: int = 0
    sample_digest: str = ""
    content_digest: str = ""
    initial_digest: str = ""
    final_digest: str = ""
    buffer_digest: str = ""
    test_accuracy: float | None = None
    accuracy_curve: list[Accuracy] = []
    reference_error: float | None = None
    reference_worst: str = ""
    reference_steps: int = 0
    reference_slack: float = 0.0
    reference_contents: list[str] = []
    reference_buffers: list[Sketch] = []
    verified_content: str = ""
    first_buffers: Sketch = []
    bit_equal: bool | None = None
    compression: CompressionResult | None = None
    memory: MemoryResult | None = None


# Largest relative difference to the reference that rounding alone explains; float32 after 20 steps.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bf16": 5e-2, "fp16": 5e-2}


def make_cell(
    config: RunConfig,
    outcomes: Sequence[Outcome],
    *,
    plan: Plan,
    predicted_s: float | None,
    unrehearsed_s: float | None = None,
    prediction: str = "",
    link: Link | None,
    data: str,
    consistency: str,
    num_servers: int,
    num_machines: int,
    environment: dict[str, Any],
    opened_as: str = "",
) -> Cell:
    """The record of a finished run.

    Args:
        config: resolved configuration.
        outcomes: of all workers, in rank order.
        plan: that was carried out.
        predicted_s: step time that the model gives; None = no profile.
        unrehearsed_s: the same without what rehearsed steps added to the link; None = nothing.
        prediction: its kind, see `Cell.prediction`.
        link: that it was given; None = no profile.
        data: where the samples came from.
        consistency: of the backend.
        num_servers: dedicated server processes.
        num_machines: distinct hosts.
        environment: of rank 0.
        opened_as: see `Cell.opened_as`.
    """
    first = outcomes[0]
    curve = first.accuracy_curve
    samples = _samples(outcomes, consistency)
    taken, unsteady = samples.cores_taken, samples.unsteady
    steps_s = steady_steps(samples.step_time_s, taken, unsteady)
    median_s = quantile(steps_s, 0.5)
    identical, note = judge(config, outcomes, consistency)
    helpers = sum(o.num_helper_processes for o in outcomes)
    return Cell(
        backend=config.backend,
        opened_as=opened_as,
        workload=config.workload,
        data=data,
        num_workers=len(outcomes),
        num_servers=num_servers,
        num_processes=len(outcomes) + num_servers + helpers,
        num_machines=num_machines,
        steps=first.steps,
        batch_size=first.batch_size,
        step_time_s=median_s,
        step_time_unfiltered_s=quantile(steady_steps(samples.step_time_s, (), unsteady), 0.5),
        step_time_p5_s=quantile(steps_s, 0.05),
        step_time_p95_s=quantile(steps_s, 0.95),
        samples_per_s=_samples_per_s(outcomes, consistency, median_s),
        compute_s=quantile(steady_steps(samples.compute_s, taken, unsteady), 0.5),
        exposed_comm_s=quantile(steady_steps(samples.exposed_comm_s, taken, unsteady), 0.5),
        wire_bytes_per_step=_busiest([o.sent_bytes for o in outcomes], num_servers) / first.steps,
        received_bytes_per_step=_busiest([o.received_bytes for o in outcomes], num_servers)
        / first.steps,
        peak_memory_bytes=max(o.peak_memory_bytes for o in outcomes),
        cores_busy=_largest(o.cores_busy for o in outcomes),
        cores_stolen=_largest(o.cores_stolen for o in outcomes),
        cores_outside=_largest(o.cores_outside for o in outcomes),
        final_loss=first.loss[-1],
        test_accuracy=first.test_accuracy,
        time_to_accuracy_s={
            f"{target:g}": _first_time_s(curve, [(a.accuracy or 0.0) >= target for a in curve])
            for target in config.target_accuracy
        },
        time_to_loss_s={
            f"{target:g}": _first_time_s(curve, [(a.loss or math.inf) <= target for a in curve])
            for target in config.target_loss
        },
        training_time_s=max(o.training_time_s for o in outcomes),
        identical_work=identical,
        identical_work_note=note,
        max_reference_error=first.reference_error,
        sample_digest=_combined(o.sample_digest for o in outcomes),
        content_digest=_combined(o.content_digest for o in outcomes)
        if all(o.content_digest for o in outcomes)
        else "",
        initial_digest=first.initial_digest,
        buffer_digest=first.buffer_digest,
        final_digest=first.final_digest,
        consistency=consistency,
        scheduler=plan.scheduler,
        num_messages=len(plan.messages),
        plan_digest=plan.digest(),
        plan_reason=plan.reason,
        predicted_step_time_s=predicted_s,
        predicted_unrehearsed_s=unrehearsed_s,
        prediction=prediction,
        link=None if link is None else _described(link),
        compression=_compression(outcomes),
        memory=first.memory,
        staleness_max=max((max(o.staleness, default=-1) for o in outcomes), default=-1)
        if any(o.staleness for o in outcomes)
        else None,
        samples=samples,
        accuracy_curve=curve,
        config=config,
        environment=environment,
        command=reproduce(config),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _compression(outcomes: Sequence[Outcome]) -> CompressionResult | None:
    """Rank 0's, with the largest sizes of all ranks."""
    results = [o.compression for o in outcomes if o.compression is not None]
    if not results:
        return None
    return msgspec.structs.replace(
        results[0],
        sent_bytes=max(r.sent_bytes for r in results),
        state_bytes=max(r.state_bytes for r in results),
    )


def _described(link: Link) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(link)
    extra = plain.pop("extra")
    kept = ("missing_s", "in_steps", "stretched", LINK_STOLEN)
    plain |= {key: extra[key] for key in kept if key in extra}
    return plain


def judge(
    config: RunConfig, outcomes: Sequence[Outcome], consistency: str
) -> tuple[bool | None, str]:
    """Whether the cell did the work of every dense synchronous cell, and how that is known."""
    first = outcomes[0]
    if len({o.initial_digest for o in outcomes}) > 1:
        return False, "ranks started from different parameters"
    if consistency == NOTHING_MOVES:
        return False, "no exchange: every worker trains its own model"
    if consistency != BSP:
        return False, f"{consistency}: workers read parameters of different age"
    if len({o.final_digest for o in outcomes}) > 1:
        return False, "ranks ended with different parameters"
    inexact = inexact_parts(config)
    if first.reference_error is None:
        if config.resume_from is not None:
            return None, (
                "ranks agree bit for bit; what goes on from a checkpoint is not compared with a "
                "single process"
            )
        if not inexact:
            return None, "not compared with a single process; ranks agree bit for bit"
        return None, (
            f"ranks agree bit for bit; {' and '.join(inexact.values())} changes what is trained: a "
            f"single process would arrive elsewhere"
        )
    peer, steps = "a single process", f"after {first.reference_steps} steps"
    if inexact:
        peer += f" with {' and '.join(inexact.values())}"
    if differs := _differing_inputs(outcomes, TOLERANCE[config.precision]):
        return False, f"{differs} of {peer}"
    limit = max(TOLERANCE[config.precision], first.reference_slack)
    if not first.reference_error <= limit:
        return False, (
            f"differs from {peer} by {first.reference_error:.1e} {steps}, most in "
            f"{first.reference_worst!r}; rounding explains at most {limit:.0e}"
        )
    how = "bit for bit" if first.bit_equal else f"to {first.reference_error:.1e}"
    return True, f"ranks agree bit for bit; equal to {peer} {how} {steps}"


def _differing_inputs(outcomes: Sequence[Outcome], limit: float) -> str:
    """Whose samples or buffers are not those of the reference, in words; empty: nobody's."""
    first = outcomes[0]
    for outcome, content in zip(outcomes, first.reference_contents, strict=False):
        if outcome.verified_content != content:
            what = f"sample contents differ: rank {outcome.rank}'s in the first"
            return f"{what} {first.reference_steps} steps are not those"
    for outcome, buffers in zip(outcomes, first.reference_buffers, strict=False):
        error, name = sketch_error(outcome.first_buffers, buffers)
        if error > limit:
            what = f"buffers differ: rank {outcome.rank}'s {name!r} after the first step is"
            return f"{what} {error:.1e} from that"
    return ""


def _samples(outcomes: Sequence[Outcome], consistency: str) -> StepSamples:
    first = outcomes[0]
    pairs = zip(first.step_time_s, first.exposed_s, strict=True)
    # Without any exchange nobody waits: the slowest rank is who the others would wait for.
    combine = max if consistency == NOTHING_MOVES else mean
    return StepSamples(
        # Ranks in step with each other begin and end a little apart, and what one has more of in a
        # step it has less of in the next: the mean is the job's pace, the largest would count that
        # to and fro as time. Ranks that are not in step have a pace each.
        step_time_s=[
            combine(times) for times in zip(*(o.step_time_s for o in outcomes), strict=True)
        ],
        compute_s=[step_s - exposed_s for step_s, exposed_s in pairs],
        exposed_comm_s=first.exposed_s,
        exposed_comm_by_rank_s=[sum(o.exposed_s) / len(o.exposed_s) for o in outcomes],
        loss=first.loss,
        cores_stolen=[max(shares) for shares in zip(*(o.stolen for o in outcomes), strict=True)],
        cores_outside=[max(shares) for shares in zip(*(o.outside for o in outcomes), strict=True)],
        unsteady=[any(each) for each in zip(*(o.unsteady for o in outcomes), strict=True)],
        staleness=first.staleness,
    )


def _samples_per_s(outcomes: Sequence[Outcome], consistency: str, median_s: float) -> float:
    if consistency in IN_STEP:
        return len(outcomes) * outcomes[0].batch_size / median_s
    # Workers that do not wait for each other have a pace each; the job's is the sum.
    return sum(o.batch_size * len(o.step_time_s) / sum(o.step_time_s) for o in outcomes)


def _first_time_s(curve: Sequence[Accuracy], is_there: Sequence[bool]) -> float | None:
    return next((a.time_s for a, there in zip(curve, is_there, strict=True) if there), None)


def _busiest(num_bytes: Sequence[int], num_servers: int) -> float:
    """Bytes at the busiest end: a worker's, or a dedicated server's.

    What workers send, servers receive, and the other way round; slices are balanced over servers
    by bytes, so that each has an equal share of the workers' sum.
    """
    return max(max(num_bytes), sum(num_bytes) / num_servers if num_servers else 0.0)


def _combined(digests: Iterable[str]) -> str:
    chain = RunningDigest()
    for digest in digests:
        chain.add(digest.encode())
    return chain.value
