"""A sweep's folder with something for every section of a report's page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from testbed.base.config import RunConfig
from testbed.base.link import Link
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
from testbed.records.cell import (
    Accuracy,
    Cell,
    CompressionResult,
    MemoryResult,
    StepSamples,
    encode_cell,
)
from testbed.records.memory import MemoryCurve, MemoryForecast, MemorySimulation
from testbed.records.timeline import SUFFIX, Timeline, TimelineEvent, encode_timeline

HOSTILE = "</script><x-evil onload=alert(1)>&\"'"
TRACE = Trace.from_backward(
    [2e-3, 3e-3, 1e-3, 2e-3],
    num_elements=[100_000, 50_000, 400_000, 10_000],
    forward_s=[1e-3] * 4,
    dtypes=["float32"] * 4,
)
LINK = Link(backend="gloo", num_workers=2, latency_s=2e-4, seconds_per_byte=4e-9)


def plan() -> Plan:
    """Each gradient by itself, as soon as it is ready."""
    sizes = tuple(t.num_elements for t in TRACE.tensors)
    order = range(len(sizes) - 1, -1, -1)
    parts = [(TensorSlice(tensor=i, start=0, stop=sizes[i]),) for i in order]
    return Plan(
        scheduler="wfbp",
        names=tuple(t.name for t in TRACE.tensors),
        num_elements=sizes,
        dtypes=tuple(t.dtype for t in TRACE.tensors),
        messages=tuple(Message(parts=each) for each in parts),
    )


def timeline(num_steps: int = 3, dilation: float = 1.0, copies: int = 1) -> Timeline:
    """Events of two ranks that did exactly what the simulator says; `copies` of each event."""
    found, events = predict(plan(), TRACE, LINK), []
    for step in range(num_steps):
        for rank in (0, 1):
            begin = step * found.iteration_s
            turn = begin + found.forward_s
            names = [t.name for t in TRACE.tensors]
            told: list[tuple[str, str, float, float, int]] = [
                ("step", f"step {step}", begin, begin + found.iteration_s, -1),
                ("compute", "forward", begin, turn, -1),
                ("compute", "backward", turn, turn + found.backward_s, -1),
            ]
            told += [
                ("ready", name, turn + ready, turn + ready, -1)
                for name, ready in zip(names, TRACE.ready_s(), strict=True)
            ]
            told += [
                ("send", names[s.tensors[0]], turn + s.start_s, turn + s.end_s, number)
                for number, s in enumerate(found.spans)
            ] * copies
            events += [
                TimelineEvent(
                    kind=kind,  # type: ignore[arg-type]
                    name=name,
                    rank=rank,
                    step=step,
                    begin_s=dilation * a,
                    end_s=dilation * b,
                    message=message,
                    channel=0 if kind == "send" else -1,
                )
                for kind, name, a, b, message in told
            ]
    events.sort(key=lambda e: (e.begin_s, -e.end_s))
    return Timeline(
        backend="gloo",
        num_workers=2,
        scheduler="wfbp",
        events=tuple(events),
        plan=plan(),
        link=LINK,
        dilation=dilation,
    )


def cell(backend: str, workers: int, repeat: int = 0, **changes: object) -> Cell:
    """A finished cell, slower by 1 ms with each repeat."""
    step_s = 0.02 + 0.001 * repeat + 0.002 * workers
    config = RunConfig(backend=backend, workers=workers, batch_size=8, steps=5, repeat=repeat)
    config = msgspec.structs.replace(config, **changes.pop("config", {}))  # type: ignore[call-overload]
    values = {
        "data": "synthetic",
        "num_processes": workers,
        "steps": 5,
        "batch_size": 8,
        "step_time_s": step_s,
        "samples_per_s": 8 * workers / step_s,
        "compute_s": 0.015,
        "exposed_comm_s": step_s - 0.015,
        "wire_bytes_per_step": 1e6,
        "peak_memory_bytes": 300_000_000,
        "test_accuracy": 0.5,
        "time_to_accuracy_s": {"0.5": 2.0 + repeat, "0.99": None},
        "accuracy_curve": [
            Accuracy(step=n, time_s=float(n), accuracy=n / 4, loss=2.0 / n) for n in (1, 2)
        ],
        "identical_work": True,
        "predicted_step_time_s": 0.9 * step_s,
        "samples": StepSamples(
            step_time_s=[step_s] * 5,
            compute_s=[0.015] * 5,
            exposed_comm_s=[step_s - 0.015] * 5,
            loss=[1.0] * 5,
        ),
        "command": f"testbed run --backend {backend} --workers {workers}",
        "environment": {"commit": "0123abcd", "cpu": "Example"},
        **changes,
    }
    return Cell(
        backend=backend,
        workload=config.workload,
        num_workers=workers,
        scheduler=config.scheduler,
        config=config,
        **values,  # type: ignore[arg-type]
    )


def write(folder: Path, *, timelines: bool = True) -> Path:
    """Cells of two backends on 2 and 4 workers, compressed, with memory, failed, hostile."""
    spent = CompressionResult(
        compressor="fp16",
        dense_bytes=2_000_000,
        sent_bytes=1_000_000,
        encode_s=0.001,
        communication_s=0.005,
        decode_s=0.002,
    )
    memory = MemoryResult(
        predicted={"weights": 100, "activations": 300}, measured={"weights": 90, "activations": 320}
    )
    made = [cell(b, w, r) for b in ("gloo", "zmq-ps") for w in (2, 4) for r in (0, 1, 2)]
    made += [
        cell("gloo", 2, config={"compressor": "fp16"}, compression=spent),
        cell("gloo", 2, config={"memory": "checkpoint"}, memory=memory),
        cell("mpi", 2, status="failed", step_time_s=None, error=f"broke {HOSTILE}"),
        cell(
            "mpi-ring",
            2,
            command=f"testbed {HOSTILE}",
            plan_reason=HOSTILE,
            data=HOSTILE,
            environment={"commit": HOSTILE},
            config={"cluster": f"nodes=2,{HOSTILE}"},
            dilation=10.0,
            identical_work_note=HOSTILE,
        ),
    ]
    cells = folder / "cells"
    cells.mkdir(parents=True)
    for number, each in enumerate(made):
        (cells / f"{number:03}.json").write_bytes(encode_cell(each))
        if timelines and each.status == "ok":
            found = msgspec.structs.replace(
                timeline(dilation=each.dilation),
                backend=each.backend,
                num_workers=each.num_workers,
                compressor=each.config.compressor,
            )
            (cells / f"{number:03}{SUFFIX}").write_bytes(encode_timeline(found))
    curve = MemoryCurve(
        time_s=[0.0, 1.0, 2.0], levels={"weights": [90, 90, 90], "activations": [0, 300, 10]}
    )
    forecast = MemoryForecast(
        memory="none", batch_size=8, peak={"weights": 90, "activations": 300}, curve=curve
    )
    simulated = MemorySimulation(
        workload=HOSTILE, compressors=["none"], num_workers=1, forecasts=[forecast]
    )
    (folder / "a.memory.json").write_bytes(msgspec.json.encode(simulated))
    return folder
