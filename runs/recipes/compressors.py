"""Every compressor on a server, a ring and Gloo: bytes, times, error and accuracy."""

from __future__ import annotations

from testbed.sweeping.grid import Sweep, expand

# Error feedback stands around those that are biased and keep nothing by themselves; ratios are
# larger than the papers', for networks of a hundred times this one's size. Rates are what each
# needs beside the dense 0.03 with momentum 0.9: `sign` moves every parameter by the rate itself,
# `dgc` carries the momentum, and under it `randomk`, whose residuals wait for 20 steps in the mean,
# does not train at all.
COMPRESSORS = (
    "none",
    "fp16",
    "bf16",
    "ef+topk:ratio=0.01",
    "ef+topk-sampled:ratio=0.01",
    "ef+threshold:value=0.01",
    "ef+gtopk:ratio=0.01",
    "ef+oktopk:ratio=0.01",
    "ef-sign",
    "ef+onebit",
    "qsgd:bits=4,norm=max",
    "terngrad",
    "natural",
    "powersgd:rank=4",
    "acp-sgd:rank=4",
)
OWN_RATE = (
    ("dgc:ratio=0.01,warmup_steps=22", 0.03, 0.0),
    ("sign", 0.001, 0.0),
    ("ef+randomk:ratio=0.05", 0.1, 0.0),
)
BACKENDS = ("zmq-ps", "mpi-ring", "gloo")


def recipe() -> Sweep:
    """All compressors over zmq-ps, mpi-ring and gloo; a small network on real digits."""
    base = {
        "workload": "digits-cnn",
        "workers": 2,
        "epochs": 10,
        "threads": 1,
        "predict": True,
        "target_accuracy": (0.95,),
    }
    cells = expand(base, {"backend": BACKENDS, "compressor": COMPRESSORS})
    for compressor, rate, momentum in OWN_RATE:
        own = {**base, "compressor": compressor, "learning_rate": rate, "momentum": momentum}
        cells += expand(own, {"backend": BACKENDS})
    return Sweep("compressors", cells, repeats=1, summary=recipe.__doc__ or "")
