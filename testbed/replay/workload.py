"""`replay:TRACE`: builds the workload that replays a trace."""

from __future__ import annotations

import time

import torch

from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.replay.layout import owned
from testbed.replay.model import ComputeCursor, RecordedModel
from testbed.workloads.samples import TensorSamples
from testbed.workloads.workload import Workload

NUM_SAMPLES = 65_536


def build_replay(trace: str, *, dilation: float, data_dir: str | None, seed: int) -> Workload:
    """The workload that replays a trace.

    A sample is a number between 0.5 and 1.5; the mean of a worker's samples scales its gradients,
    so that the usual proofs (order of samples, equality with a single process) hold here too.

    Args:
        trace: a shipped trace's name, or a `testbed.trace/1` file.
        dilation: how many times longer than recorded everything takes.
        data_dir: must be None.
        seed: of the samples and values.

    Raises:
        UsageError: no such trace, one that cannot be replayed, or a data folder.
    """
    if data_dir is not None:
        raise UsageError(f"--data is {data_dir!r}, but a replayed trace has no data; leave it out")
    recorded = owned(find_trace(trace))
    cursor = ComputeCursor(time.perf_counter, time.sleep)
    model = RecordedModel(recorded.stretched(dilation), cursor, seed)

    def for_values() -> None:
        cursor.stop_waiting()
        model.tape.keeps_buffers = False

    generator = torch.Generator("cpu").manual_seed(seed)
    return Workload(
        model=model,
        train=TensorSamples(torch.rand(NUM_SAMPLES, generator=generator, device="cpu") + 0.5),
        loss=lambda called, batch: called(batch[0]),
        batch_size=recorded.batch_size,
        learning_rate=0.01,
        # No trace records the optimizer, so that it is the one that costs the least.
        momentum=0.0,
        on_resume=cursor.resume,
        for_values=for_values,
        recorded=recorded,
        data=f"replayed {recorded.name} of {recorded.device}",
    )
