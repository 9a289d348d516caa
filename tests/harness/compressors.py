"""The compressors under test, and messages to feed them."""

import torch

from testbed.base.axes import COMPRESSORS
from testbed.compression.lockstep import Lockstep
from testbed.compression.protocol import Compressor

WRAPPERS = tuple(name for name in COMPRESSORS if COMPRESSORS.load(name).wraps)
PLAIN = tuple(name for name in COMPRESSORS if name not in WRAPPERS)
MORE = (
    "topk:ratio=0.3",
    "topk-sampled:ratio=0.2",
    "threshold:value=0.5",
    "randomk:ratio=0.1",
    "dgc:ratio=0.05,momentum=0",
    "gtopk:ratio=0.05",
    "oktopk:ratio=0.05,every=3,rebalance=2",
    "sign:vote=0,scaled=1",
    "sign:scaled=1",
    "ef-sign:vote=1,bucket=0",
    "onebit:bucket=0",
    "qsgd:bits=2,bucket=0,norm=max",
    "qsgd:bits=8,bucket=64",
    "terngrad:clip_sigmas=0",
    "powersgd:rank=2,feedback=0",
    "acp-sgd:rank=1",
    "warmup:stage_steps=2+topk:ratio=0.01",
    "by-size:min_elements=100+topk",
)
SPECS = PLAIN + MORE
# 700 elements: a matrix, a convolution, a bias and a scalar.
SHAPES = ((20, 25), (4, 3, 4, 4), (7,), ())


def resolve_compressor(text: str) -> Compressor:
    compressor: Compressor = COMPRESSORS.resolve(text).build()
    return compressor


def keeping(spec):
    """The same compressor with error feedback, where it has none of its own."""
    return spec if resolve_compressor(spec).claims.keeps else f"ef+{spec}"


def job(spec, num_workers, shapes=SHAPES, seed=0):
    """A job of that many ranks."""
    return Lockstep(resolve_compressor(spec), num_workers, seed=seed, shapes=shapes)


def messages(num_workers, step=0, num_elements=700, dtype=torch.float32):
    """One message for each rank: heavy-tailed, all ranks alike in part."""
    draw = torch.Generator().manual_seed(1000 + step)
    common = torch.randn(num_elements, generator=draw, dtype=torch.float64)
    own = torch.randn(num_workers, num_elements, generator=draw, dtype=torch.float64)
    return [((common + row) ** 3 / 3).to(dtype) for row in own]
