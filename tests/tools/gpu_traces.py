"""Records the traces of all workloads on this machine's GPU, one after the other in one process.

    python -m tests.tools.gpu_traces FOLDER             # FOLDER/<workload>.json
    python -m tests.tools.gpu_traces FOLDER --kineto    # one workload, also by torch's profiler

Each is what `testbed profile --device cuda` records.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from testbed.base.config import RunConfig
from testbed.base.files import read_file, save_trace
from testbed.commands.profile import profile_workload
from testbed.profiling.kineto import read_kineto
from testbed.profiling.overhead import training_step
from testbed.training.replica import make_replica
from testbed.workloads.load import load_workload

BATCH_SIZES = {
    **dict.fromkeys(("resnet50", "resnet101", "vgg16:bn=1", "vgg16"), 32),
    **dict.fromkeys(("resnet152", "densenet161", "densenet201", "inception-v4"), 32),
    **dict.fromkeys(("googlenet", "alexnet"), 64),
    **{"bert-base": 32, "bert-large": 8, "gpt2": 8, "byte-gpt": 4},
    **dict.fromkeys(("resnet20", "resnet56", "resnet110"), 128),
    **dict.fromkeys(("digits-cnn", "digits-mlp"), 32),
}
IN_BF16 = ("resnet50", "bert-base", "bert-large", "gpt2")


def record_all(folder: Path) -> None:
    """The most important ones first; what is there is left as it is."""
    wanted = [(name, size, "float32") for name, size in BATCH_SIZES.items()]
    wanted += [(name, BATCH_SIZES[name], "bf16") for name in IN_BF16]
    for name, batch_size, precision in wanted:
        began_s = time.perf_counter()
        given = {"precision": precision}
        config = RunConfig(workload=name, device="cuda", batch_size=batch_size, **given)  # type: ignore[arg-type]
        trace = profile_workload(config, warmup=10, repeats=20)
        stem = name.replace(":bn=1", "bn") + ("" if precision == "float32" else f"-{precision}")
        save_trace(trace, folder / f"{stem}.json")
        totals = trace.extra["recorded"]
        print(
            f"{stem}: forward {1e3 * trace.forward_s:.2f} ms, backward {1e3 * trace.backward_s:.2f}"
            f" ms; without hooks {1e3 * totals['unhooked_forward_s']:.2f} and "
            f"{1e3 * totals['unhooked_backward_s']:.2f}; {time.perf_counter() - began_s:.1f} s",
            flush=True,
        )
        del trace
        torch.cuda.empty_cache()


def record_kineto(folder: Path) -> None:
    """Torch's profiler over five steps of ResNet-50, beside what the recorder says of it."""
    config = RunConfig(workload="resnet50", device="cuda", batch_size=32)
    workload = load_workload(config.workload, seed=1, data_dir=None)
    replica = make_replica(workload, config, total_steps=1)
    replica.model.train()
    step = training_step(replica.loss, replica.to_device(workload.train.batch(range(32))))
    path = folder / "profiler.json"
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        record_shapes=True,
        schedule=schedule(wait=2, warmup=3, active=5),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as recording:
        for _ in range(10):
            replica.optimizer.zero_grad()
            step()
            replica.optimizer.step()
            recording.step()
    named = [(n, p.numel()) for n, p in workload.model.named_parameters() if p.requires_grad]
    imported = read_kineto(read_file(path), str(path), named, 32)
    save_trace(imported, folder / "kineto-resnet50.json")
    measured = profile_workload(config, warmup=10, repeats=20)
    for name, trace in (("torch's profiler", imported), ("recorder", measured)):
        print(f"{name}: {1e3 * trace.forward_s:.2f} ms, {1e3 * trace.backward_s:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kineto", action="store_true")
    given = parser.parse_args()
    (record_kineto if given.kineto else record_all)(given.folder)


if __name__ == "__main__":
    main()
