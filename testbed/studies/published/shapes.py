"""Published inequalities that an emulated cluster can repeat, and the cluster that stands for each.

Authors sum up a network by a start-up time a and a time per byte b of one all-reduce between their
workers, T(M) = a + b M. A ring of n workers on links of rate r takes b = 8 h 2 (n - 1) / (n r),
h = bytes on the wire per byte of payload, so that few workers on a link of

    r = 16 h (n - 1) / (n b)

have the b of many; a is waited before each exchange. The number of workers is not theirs unless
said, and neither is what else depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from testbed.base.config import RunConfig
from testbed.cluster.spec import ClusterSpec
from testbed.studies.published.asc_wfbp import PAPER as ASC_WFBP
from testbed.studies.published.gains import OSF, OSF_GAINS, PACE
from testbed.studies.published.links import EIGHT_NODES, INFINIBAND, K80
from testbed.studies.published.mg_wfbp import PAPER_K80
from testbed.sweeping.grid import Sweep

BACKEND: Final = "mpi-ring"
HEADERS: Final = 1514 / 1448  # Ethernet, IP and TCP with time stamps around 1448 bytes of payload
# What starting an exchange takes here anyhow, undilated; shorter start-ups cannot be made.
OWN_STARTUP_S: Final = 3e-4


@dataclass(frozen=True)
class Setting:
    """A published setting and the cluster that stands for it.

    Attributes:
        trace: of the model.
        published_workers: the paper's number of workers.
        startup_s: a, as its authors fitted it.
        seconds_per_byte: b.
        nodes: emulated hosts.
        ranks_per_node: workers on each.
        dilation: so large that two cores keep up with all links: about 1 Gbit/s each.
        warmup: steps that do not count.
        steps: of the run, those of the warm-up included.
    """

    trace: str
    published_workers: int
    startup_s: float
    seconds_per_byte: float
    nodes: int = 4
    ranks_per_node: int = 1
    dilation: float = 10.0
    warmup: int = 3
    steps: int = 10

    @property
    def workers(self) -> int:
        """Emulated workers."""
        return self.nodes * self.ranks_per_node

    @property
    def cluster(self) -> str:
        """The cluster, as `--cluster` takes it.

        Example:
            >>> Setting("resnet50-v100", 32, 1e-3, 1.25e-9).cluster
            'nodes=4,rate=10038mbit,dilation=10,latency=1000us,latency_by=injected'
        """
        n = self.workers
        rate_bps = 16 * HEADERS * (n - 1) / (n * self.seconds_per_byte)
        spec = ClusterSpec(
            nodes=self.nodes,
            rate=f"{rate_bps / 1e6:.0f}mbit",
            dilation=self.dilation,
            ranks_per_node=self.ranks_per_node,
        )
        if self.startup_s <= OWN_STARTUP_S:
            return spec.text()
        return f"{spec.text()},latency={self.startup_s * 1e6:.0f}us,latency_by=injected"

    def cell(self, scheduler: str) -> RunConfig:
        """The run that measures one scheduler here."""
        return RunConfig(
            workload=f"replay:{self.trace}",
            backend=BACKEND,
            workers=self.workers,
            cluster=self.cluster,
            scheduler=scheduler,
            predict=True,
            steps=self.steps,
            warmup=self.warmup,
            threads=1,
            verify_steps=2,
            deadline=60.0,
        )


@dataclass(frozen=True)
class Shape:
    """One published inequality: `slow` takes more time than `fast`, or `at_least` times as much.

    Attributes:
        paper: of the line among the simulated ones that it repeats.
        setting: of that line.
        quantity: of that line.
        slow: scheduler.
        fast: scheduler.
        here: what stands for the setting.
        at_least: 1 for "faster than"; else the bound that was published.
    """

    paper: str
    setting: str
    quantity: str
    slow: str
    fast: str
    here: Setting
    at_least: float = 1.0


def published_shapes() -> tuple[Shape, ...]:
    """Those with a shipped trace, at most four workers and about a minute per scheduler."""
    # The link is slow enough for a dilation of 8; merging avoids most of 449 start-ups.
    inception = Setting("inception-v4-2080ti", 32, *EIGHT_NODES, dilation=8, warmup=2, steps=7)
    googlenet = Setting(
        "googlenet-k80", 4, *K80[2], nodes=2, ranks_per_node=2, dilation=8, warmup=2, steps=7
    )
    startup_s, per_byte = INFINIBAND[8]
    quarter = Setting("resnet50-v100", 8, startup_s, per_byte / 0.25)
    infiniband = Setting("resnet50-v100", 64, *INFINIBAND[64], dilation=22, warmup=2, steps=7)
    on_ethernet = "inception-v4-2080ti, 10GbE"
    on_k80 = "googlenet-k80, 2 nodes"
    varied = "resnet50-v100, bandwidth varied: 56Gb IB, 8 GPUs, 0.25 x bandwidth"
    whole = "bucket:mib=128,first_mib=128"
    return (
        Shape(ASC_WFBP, on_ethernet, "asc-wfbp over wfbp", "wfbp", "asc-wfbp", inception),
        Shape(ASC_WFBP, on_ethernet, "asc-wfbp over mg-wfbp", "mg-wfbp", "asc-wfbp", inception),
        Shape(ASC_WFBP, on_ethernet, "mg-wfbp over wfbp", "wfbp", "mg-wfbp", inception),
        Shape(PAPER_K80, on_k80, "mg-wfbp over wfbp", "wfbp", "mg-wfbp", googlenet),
        Shape(PAPER_K80, on_k80, "mg-wfbp over sequential", "sequential", "mg-wfbp", googlenet),
        Shape(PACE, varied, "pace over bucket", "bucket", "pace", quarter),
        Shape(
            OSF,
            "resnet50-v100, 56Gb IB, 64 GPUs",
            "osf over a constant buffer of 128 MiB",
            whole,
            "osf",
            infiniband,
            OSF_GAINS[0],
        ),
    )


def sweep_of(shapes: tuple[Shape, ...]) -> Sweep:
    """Every cell that the shapes need, once."""
    cells = {shape.here.cell(s): None for shape in shapes for s in (shape.slow, shape.fast)}
    return Sweep("paper-shapes", tuple(cells), repeats=1, summary="published shapes, emulated")
