"""`testbed.cell/1`: everything that one run leaves behind, in one JSON file.

Times are seconds, sizes bytes; the unit is part of each key. A key that could not be measured is
null, never a made-up number.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.config import RunConfig
from testbed.base.files import to_json

CELL_SCHEMA: Final = "testbed.cell/1"


class StepSamples(msgspec.Struct, kw_only=True):
    """One value per measured step (after warm-up) of rank 0, or, where said, of each rank.

    Attributes:
        step_time_s: wall time of the step: mean over ranks; without an exchange the slowest rank.
        compute_s: forward, backward and optimizer of rank 0, without waiting for messages.
        exposed_comm_s: time that rank 0 stood waiting for messages after its backward pass.
        exposed_comm_by_rank_s: mean of the same for each rank.
        loss: training loss of rank 0, every step from the first.
        cores_stolen: share of the cores' time that a virtual machine's host took in each step, of
            the rank that lost most.
        cores_outside: share that processes outside the cell took of them in each step, likewise; 0
            where steps are too short to tell; empty: not recorded.
        unsteady: whether the step is unlike the others: it, or the one before it, waited in some
            rank for updates that it would have left to the next step; or it followed a pause
            (comparing parameters, an evaluation's snapshot, a checkpoint). Medians are over the
            steps that count: the quietest of the steady ones (`steady_steps`).
        staleness: server consistency: clocks that the slowest worker was behind, rank 0, each step.
    """

    step_time_s: list[float] = []
    compute_s: list[float] = []
    exposed_comm_s: list[float] = []
    exposed_comm_by_rank_s: list[float] = []
    loss: list[float] = []
    cores_stolen: list[float] = []
    cores_outside: list[float] = []
    unsteady: list[bool] = []
    staleness: list[int] = []

    @property
    def cores_taken(self) -> list[float]:
        """Share of the cores' time that others took in each step: the host, other processes."""
        if not self.cores_outside:
            return self.cores_stolen
        pairs = zip(self.cores_stolen, self.cores_outside, strict=True)
        return [stolen + outside for stolen, outside in pairs]


class Accuracy(msgspec.Struct, kw_only=True):
    """Test accuracy after so many steps and so much training time (evaluation not counted).

    None where labels are no numbers of classes. The loss of the test samples, too, where a target
    was set for it.
    """

    step: int
    time_s: float
    accuracy: float | None
    loss: float | None = None


class CompressionResult(msgspec.Struct, kw_only=True):
    """What compressing did, per step and rank; times are means over the measured steps of rank 0.

    Attributes:
        compressor: as given.
        dense_bytes: of the gradients, before.
        sent_bytes: handed over to the backend, payloads alone, busiest rank.
        encode_s: sum over messages, until each round could leave.
        communication_s: while any message's round was under way, without waiting for the channel.
        decode_s: sum over messages, from the last answer to the mean.
        relative_error: |mean delivered - true mean| / |true mean|, mean over the first steps (of
            the warm-up, so that comparing costs no measured time); null: not compared.
        density: elements sent / elements.
        state_bytes: kept between steps, largest of all ranks.
        note: what else was done for the compressor.
    """

    compressor: str
    dense_bytes: int
    sent_bytes: int
    encode_s: float
    communication_s: float
    decode_s: float
    relative_error: float | None = None
    density: float | None = None
    state_bytes: int = 0
    note: str = ""


class MemoryResult(msgspec.Struct, kw_only=True):
    """What a step's memory was foreseen to be, and was, on rank 0; bytes of live storages.

    Attributes:
        predicted: at the peak, by category: weights, optimizer, gradients, activations, temporary,
            communication.
        measured: the same in one step of the warm-up; empty: no step was measured.
        layer: at work at the predicted peak.
        floor_bytes: weights, optimizer state and the largest layer's working set.
        moved_bytes: written to the host in a step, and read back: memory, too.
        extra_s: predicted time that a step takes more than with all activations kept.
        resident_bytes: largest anonymous resident set in that step, less what the process held
            before training beside the weights; null: not measured.
        kept_bytes: of these, freed pages that the allocator had not given back to the system;
            null: not known.
        predicted_resident_bytes: predicted peak with what operators hold while they run, without
            pages that are kept.
        arena_bytes: of the one allocation that released buckets lie in, a part of communication.
        arena_fragmentation: share of it that is lost even when most buckets are alive.
        plan: digest of the memory plan.
        why: the plan in words.
        budget_bytes: that it had to fit; null: none.
    """

    predicted: dict[str, int]
    measured: dict[str, int] = {}
    layer: str = ""
    floor_bytes: int = 0
    moved_bytes: int = 0
    extra_s: float = 0.0
    resident_bytes: int | None = None
    kept_bytes: int | None = None
    predicted_resident_bytes: int | None = None
    arena_bytes: int = 0
    arena_fragmentation: float = 0.0
    plan: str = ""
    why: str = ""
    budget_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int:
        """The predicted peak."""
        return sum(self.predicted.values())

    @property
    def measured_bytes(self) -> int | None:
        """The measured peak."""
        return sum(self.measured.values()) if self.measured else None

    @property
    def with_moved_bytes(self) -> int:
        """The measured peak, else the predicted one, and what lies on the host beside it."""
        return (self.measured_bytes or self.predicted_bytes) + self.moved_bytes


class Cell(msgspec.Struct, kw_only=True):
    """One cell of a sweep, finished or failed.

    Attributes:
        status: `ok` or `failed`; a failed cell has `error` and nulls.
        backend: the backend's specification, under the name that the part has today.
        opened_as: the same with the options that it measured when it was opened (mpi-ring: up to
            which size it sums by recursive doubling); empty: it measured none, or is of a record of
            before.
        workload: the workload's specification.
        data: where the samples came from (`synthetic ...` if made up).
        num_workers: training processes.
        num_servers: dedicated server processes (0: none or colocated).
        num_processes: all processes that did work for the cell, colocated servers included.
        num_machines: distinct hosts; those of dedicated servers, too, since 2026-11-25.
        step_time_s: median over measured steps that count (see `StepSamples.unsteady`); of them
            p5 and p95, too. Low and high: 95 % interval over runs; null of one run (older records
            hold one over its steps, which says nothing of other runs).
        step_time_unfiltered_s: the same with the steps that were disturbed from outside.
        samples_per_s: all workers together, from the median step.
        compute_s: median compute time of a step.
        exposed_comm_s: median time per step that communication was not hidden.
        wire_bytes_per_step: payload bytes sent per step by the busiest rank (or dedicated server:
            an equal share of what the workers counted). For mpi, gloo and nccl, whose algorithm is
            not visible, what a ring would send.
        received_bytes_per_step: the same, received.
        peak_memory_bytes: largest resident set of any rank (device memory on a GPU).
        cores_busy: share of their time, from the first measured step to the last, in which the
            cores worked that a rank may use, for this run or anything else; of the busiest rank.
        cores_stolen: share that a virtual machine's host gave to others meanwhile; of the rank
            that lost most.
        cores_outside: share that processes outside the cell took meanwhile, likewise; null: not
            recorded.
        final_loss: training loss of the last step, rank 0.
        test_accuracy: at the end; null without test samples, or where labels are no numbers of
            classes.
        time_to_accuracy_s: target -> training time until it was first reached (null: never, or
            nothing tells an accuracy).
        time_to_loss_s: the same for losses of the test samples.
        identical_work: true if proven: same samples, same start, same parameters on all ranks, and
            equal to a single-process reference that has the run's compressor; false if the work
            differs; null if not checked.
        identical_work_note: in words: what was compared, or why the work differs.
        max_reference_error: largest relative difference to the reference's parameters.
        sample_digest: digest of every sample index of every rank, in order.
        content_digest: digest of what the samples held, likewise: shapes and up to 4096 elements of
            each tensor of a batch; empty: not recorded, as in a resumed run.
        initial_digest: digest of the initial parameters.
        buffer_digest: the same of rank 0's buffers (batch statistics) in the end; empty: not known.
        final_digest: digest of the final parameters of rank 0.
        scheduler: when gradients leave, as given.
        num_messages: messages of one step.
        plan_digest: digest of the plan that all ranks carried out.
        plan_reason: in words, why the scheduler planned so.
        predicted_step_time_s: what trace and link say a step takes (null: no profile was made).
        predicted_unrehearsed_s: the same without what rehearsed steps of the very plan added to the
            link (null: nothing was added). Under plans by priority or in halves the link stays
            fitted to messages of such steps, so that less is taken away than rehearsing gave.
        prediction: what kind it is: `null` (nominal rate and latency), `held-out` (a link that was
            fitted before, nothing of this cell seen), `calibrated` (its link, compute or compressor
            measured in this very cell, with `--rehearse` in steps of its plan); empty without one,
            and in records of before (see `reporting.prediction.kind_of`).
        link: the link that it was predicted with: start-up, time per byte, pieces, slow-down of
            concurrent messages, in the time of the emulated cluster (null: no profile was made);
            missing_s: of each rehearsed step, what its start-up was raised by (their median);
            in_steps: of each rehearsed step its messages' measured over their fitted time;
            stretched: what start-up and time per byte were multiplied by, where those agree;
            cores_stolen: as above, while it was measured.
        compression: bytes, times and error of the compressor; null: none.
        staleness_max: largest staleness that any rank saw (server consistency).
        samples: per-step samples.
        accuracy_curve: evaluations in the order they were made.
        config: the resolved configuration.
        dilation: how many times slower than the emulated cluster everything was; all times here
            are real ones, tables show them divided by it.
        cluster: the emulated cluster: rates asked and set, how latency was made, the kernel; null:
            none.
        environment: commit, versions, hardware, launcher, variables.
        again: where a sweep ran the cell twice, because the host of the virtual machine had taken
            too much of the cores' time: which run this is, and what the other one measured.
        command: shell command that repeats the cell.
        error: for a failed cell: the message.
    """

    schema: Literal["testbed.cell/1"] = CELL_SCHEMA
    status: Literal["ok", "failed"] = "ok"
    backend: str
    opened_as: str = ""
    workload: str
    data: str = ""
    num_workers: int
    num_servers: int = 0
    num_processes: int = 0
    num_machines: int = 1
    steps: int = 0
    batch_size: int = 0
    step_time_s: float | None = None
    step_time_unfiltered_s: float | None = None
    step_time_p5_s: float | None = None
    step_time_p95_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    samples_per_s: float | None = None
    compute_s: float | None = None
    exposed_comm_s: float | None = None
    wire_bytes_per_step: float | None = None
    received_bytes_per_step: float | None = None
    peak_memory_bytes: int | None = None
    cores_busy: float | None = None
    cores_stolen: float | None = None
    cores_outside: float | None = None
    final_loss: float | None = None
    test_accuracy: float | None = None
    time_to_accuracy_s: dict[str, float | None] = {}
    time_to_loss_s: dict[str, float | None] = {}
    training_time_s: float | None = None
    identical_work: bool | None = None
    identical_work_note: str = ""
    max_reference_error: float | None = None
    sample_digest: str = ""
    content_digest: str = ""
    initial_digest: str = ""
    final_digest: str = ""
    buffer_digest: str = ""
    consistency: str = "bsp"
    scheduler: str = ""
    num_messages: int | None = None
    plan_digest: str = ""
    plan_reason: str = ""
    predicted_step_time_s: float | None = None
    predicted_unrehearsed_s: float | None = None
    prediction: str = ""
    link: dict[str, Any] | None = None
    compression: CompressionResult | None = None
    memory: MemoryResult | None = None
    staleness_max: int | None = None
    samples: StepSamples = msgspec.field(default_factory=StepSamples)
    accuracy_curve: list[Accuracy] = []
    config: RunConfig
    dilation: float = 1.0
    cluster: dict[str, Any] | None = None
    environment: dict[str, Any] = {}
    again: str = ""
    command: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        self.backend = BACKENDS.today(self.backend)


def encode_cell(cell: Cell) -> bytes:
    """The cell as indented JSON."""
    return to_json(cell)


def decode_cell(data: bytes) -> Cell:
    """A cell from JSON.

    Raises:
        msgspec.ValidationError: the JSON is no `testbed.cell/1`; the message names the key.
    """
    return msgspec.json.decode(data, type=Cell)
