"""A link of nominal numbers, `rate=10gbit,latency=50us`: the null model that predictions must beat.

Nothing of it is measured: the rate is a data sheet's, and so is the latency.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Final, Literal

import msgspec

from testbed.base.axes import BACKENDS, COMPRESSORS, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import load_link
from testbed.base.link import Link
from testbed.base.spec import parse_options, parse_spec
from testbed.base.units import parse_rate, parse_seconds
from testbed.prediction.algorithms import (
    Algorithm,
    algorithm_of,
    declared_algorithm,
    parse_algorithm,
)
from testbed.prediction.emulated import Setting, carried
from testbed.prediction.extrapolate import each_piece, extrapolate, run_by

# TCP over IPv4 with time stamps on Ethernet, packets of 1500 bytes: 1448 of them are payload, and
# Ethernet adds 14 bytes of header, 4 of checksum, 8 of preamble and 12 of gap.
HEADERS: Final = 1538 / 1448
# The shaper of an emulated cluster counts Ethernet's 14 bytes, and none of checksum, preamble, gap.
SHAPED_HEADERS: Final = 1514 / 1448
NOMINAL: Final = "nominal"  # key of `Link.extra` that says so


@dataclass(frozen=True)
class Nominal:
    """What a data sheet says of a network.

    Attributes:
        rate: of each interface, each direction, as `10gbit`.
        latency: of one point-to-point message, as `50us`.
        headers: bytes on the wire over bytes of payload.
        workers: n; None = as many as there are.
        backend: whose algorithm exchanges; None = the one that is asked for.
    """

    rate: str
    latency: str
    headers: float = HEADERS
    workers: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if not parse_rate(self.rate) > 0:
            raise UsageError(f"link: rate is {self.rate!r}; expected one above 0, as 10gbit")
        if not 1 <= self.headers < inf:
            raise UsageError(
                f"link: headers is {self.headers:g}; expected bytes on the wire over bytes of "
                f"payload, 1 or more; leave it out for {HEADERS:.3f}"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"link: workers is {self.workers}; expected 1 or more")
        parse_seconds(self.latency)

    def link(self, backend: str, num_workers: int, algorithm: str | None = None) -> Link:
        """The cost of a sum by the algorithm that a backend declares, else by a ring.

            a = startups(n) latency,   b = transfers(n) headers 8 / rate   (see `algorithms`)

        Args:
            backend: that sums.
            num_workers: n; among one worker nothing is sent.
            algorithm: another one, as `parse_algorithm` reads it.

        Example:
            >>> link = Nominal("10gbit", "50us", headers=1.0).link("mpi-ring", 4)
            >>> link.latency_s, link.seconds_per_byte
            (0.0003, 1.2e-09)
        """
        rule = _rule(backend, algorithm)
        transfers = rule.transfers(num_workers) if num_workers > 1 else 0
        startups = num_startups(backend, num_workers, algorithm)
        told = {"rate": self.rate, "latency": self.latency, "headers": self.headers}
        return Link(
            backend=backend,
            num_workers=num_workers,
            latency_s=startups * parse_seconds(self.latency),
            seconds_per_byte=transfers * self.headers * 8 / parse_rate(self.rate),
            extra={NOMINAL: told},
        )


def num_startups(backend: str, num_workers: int, algorithm: str | None = None) -> float:
    """How many messages of a sum wait for each other, by the algorithm that a backend declares.

    See `Nominal.link` for the arguments.

    Example:
        >>> num_startups("mpi-ring", 4), num_startups("gloo", 1)
        (6, 0)
    """
    return _rule(backend, algorithm).startups(num_workers) if num_workers > 1 else 0


def _rule(backend: str, algorithm: str | None) -> Algorithm:
    return parse_algorithm(algorithm or declared_algorithm(backend) or "ring")


def parse_nominal(text: str) -> Nominal | None:
    """The numbers in `rate=10gbit,latency=50us`; None: the text is the name of a file.

    A file whose name begins like this is written with a folder: `./rate=fast.json`.

    Raises:
        UsageError: rate or latency is missing, or a value cannot be used.

    Example:
        >>> parse_nominal("rate=10gbit,latency=50us").latency
        '50us'
        >>> parse_nominal("link.json") is None
        True
    """
    if not re.match(r"[A-Za-z_]+=", text):
        return None
    options = parse_spec(f"link:{text}").options
    if lacking := [name for name in ("rate", "latency") if name not in options]:
        raise UsageError(
            f"link is {text!r}, without {' and '.join(lacking)}; expected rate=10gbit,latency=50us "
            "(nominal numbers) or a testbed.link/1 file"
        )
    return parse_options("link", options, Nominal)


def read_link(
    text: str | Path,
    backend: str | None = None,
    num_workers: int | None = None,
    algorithm: str | None = None,
) -> Link:
    """The link of a file, or of nominal numbers for a backend and a number of workers.

    Args:
        text: what `--link` was given.
        backend: that nominal numbers are for; None = they say, or the default one.
        num_workers: likewise.
        algorithm: that nominal numbers are for; None = the backend's.

    Raises:
        UsageError: the file or the numbers cannot be used, or nothing says how many workers.
    """
    nominal = parse_nominal(str(text))
    if nominal is None:
        return load_link(text)
    count = nominal.workers or num_workers
    if count is None:
        raise UsageError(
            f"link is {str(text)!r}, which does not say among how many workers; add workers=4"
        )
    return nominal.link(nominal.backend or backend or BACKENDS.default, count, algorithm)


def link_among(link: Link, num_workers: int, backend: str) -> Link:
    """The link among another number of workers, by the algorithm that it runs (`extrapolate`).

    A link of the same backend under options by which it runs another algorithm, as with servers in
    other places, is converted (`run_by`).

    Args:
        link: measured or nominal.
        num_workers: n.
        backend: whose algorithm counts where the link's own backend is not known here.

    Raises:
        UsageError: the algorithm is not known, or the link was measured among one worker.
    """
    if num_workers == 1:
        return msgspec.structs.replace(link, num_workers=1)
    own, wanted = BACKENDS.find(link.backend), BACKENDS.find(backend)
    changes = (
        own is not None
        and wanted is not None
        and own.name == wanted.name
        and own.facts.algorithm != wanted.facts.algorithm
        and link.num_workers > 1
    )
    if num_workers == link.num_workers and not changes:
        return link
    algorithm = parse_algorithm(algorithm_of(backend if own is None else link.backend))
    found = extrapolate(link, algorithm, num_workers)
    if not changes:
        return found
    converted = run_by(found, algorithm, parse_algorithm(algorithm_of(backend)))
    return msgspec.structs.replace(converted, backend=backend)


def link_in(link: Link, backend: str, num_workers: int, measured: Setting, asked: Setting) -> Link:
    """A link measured on one emulated cluster as it is on another, among other workers there.

    What hosts and wires need is carried over first (`carried`) and then counted for the workers
    (`link_among`); the other cluster's latency, which is for so many workers already, comes last.
    The wire's part of a byte is what the link's algorithm needs at the nominal rate.

    Raises:
        UsageError: see `carried` and `link_among`.

    Example:
        >>> link = Link(backend="mpi-ring", num_workers=4, latency_s=3e-4, seconds_per_byte=1e-9)
        >>> there = link_in(link, "mpi-ring", 8, Setting(10e9), Setting(10e9, latency_s=14e-3))
        >>> f"{there.latency_s:.4f}"
        '0.0147'
    """
    transfers = _rule(link.backend, None).transfers(link.num_workers)
    wire_s_per_byte = transfers * SHAPED_HEADERS * 8 / measured.rate_bps
    there = carried(link, measured, replace(asked, latency_s=0.0), wire_s_per_byte)
    hosts = link_among(there, num_workers, backend)
    return each_piece(hosts, lambda a, b: (a + asked.latency_s, b))


def kind_of(link: Link) -> Literal["null", "held-out"]:
    """What a prediction on a given link is: `null` where nothing of it was measured.

    A run that measures another part of its own prediction is not held out, see `seen_in_run`.

    Example:
        >>> kind_of(Nominal("10gbit", "50us").link("gloo", 2))
        'null'
    """
    return "null" if NOMINAL in link.extra else "held-out"


def seen_in_run(config: RunConfig) -> bool:
    """Whether a run that predicts measures its own compute (no trace) or its compressor's cost.

    Example:
        >>> configs = [{}, {"trace": "resnet50-v100"}, {"workload": "replay:resnet50-v100"}]
        >>> [seen_in_run(RunConfig(**config)) for config in configs]
        [True, False, False]
        >>> seen_in_run(RunConfig(workload="replay:resnet50-v100", compressor="fp16"))
        True
    """
    workload = WORKLOADS.find(config.workload)
    replayed = workload is not None and workload.facts.stretches
    profiled = not replayed and config.trace is None
    return profiled or not COMPRESSORS.is_default(config)
