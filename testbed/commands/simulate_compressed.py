"""`testbed simulate --compressor`: what compressors cost, and what they then gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import Unavailable, UnknownName, UsageError
from testbed.launch.join import resolve_backend
from testbed.records.store import write_atomically
from testbed.spec import split_specs

if TYPE_CHECKING:
    from msgspec import UnsetType

    from testbed.commands.simulate_inputs import Wanted
    from testbed.prediction.codec import CodecCost
    from testbed.records.compressed import CompressedResult, CompressorPays

MAX_WORKERS = 64  # every rank's turn is taken in this process


def with_codecs(
    wanted: Wanted, compressor: str | None, codecs: Path | None, out: Path | None, speed: float
) -> Wanted:
    """The inputs with each compressor's cost, read or measured for each link's workers.

    Args:
        wanted: without.
        compressor: list of specifications; None: those of the file, if one is given.
        codecs: file of costs measured before.
        out: where to save the costs.
        speed: how many times as fast as measured compressing is to be taken.

    Raises:
        UsageError: a compressor that does not exist or is not in the file; more workers than can
            be played here; options that need a compressor.
    """
    from testbed.prediction.codec import encode_codecs, load_codecs, sped_up

    if compressor is None and codecs is None:
        if out is not None or speed != 1.0:
            raise UsageError(
                "--codecs-out and --codec-speed speak of compressors; give --compressor too"
            )
        return wanted
    counts = tuple(dict.fromkeys(link.num_workers for link in wanted.links))
    known = () if codecs is None else load_codecs(codecs)
    if codecs is None:
        specs = split_specs(compressor or "")
        costs, note = _measured(wanted, specs, counts)
    else:
        specs = split_specs(compressor) if compressor else tuple(c.compressor for c in known)
        costs, note = _chosen(known, tuple(dict.fromkeys(specs)), counts, codecs), f"from {codecs}"
    if out is not None:
        write_atomically(out, encode_codecs(costs))
    return replace(
        wanted,
        codecs=tuple(sped_up(cost, speed) for cost in costs),
        codecs_note=f"Encoding and decoding: {note}, at {speed:g} x that speed, beside backward.",
    )


def _measured(
    wanted: Wanted, specs: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[tuple[CodecCost, ...], str]:
    import torch

    from testbed.prediction.algorithms import Server
    from testbed.profiling.codec import measure_codec

    if not specs:
        raise UsageError("--compressor names none; expected name,name,... as testbed list shows")
    if max(counts) > MAX_WORKERS:
        raise UsageError(
            f"what compressing costs depends on the number of workers and is measured by playing "
            f"them all here, at most {MAX_WORKERS}, not {max(counts)}; lower --workers"
        )
    merges = isinstance(wanted.algorithm, Server)
    costs = tuple(measure_codec(spec, count, merges=merges) for spec in specs for count in counts)
    return costs, f"measured on this machine with {torch.get_num_threads()} threads"


def _chosen(
    known: tuple[CodecCost, ...], specs: tuple[str, ...], counts: tuple[int, ...], path: Path
) -> tuple[CodecCost, ...]:
    found = {(cost.compressor, cost.num_workers): cost for cost in known}
    lacking = [(s, n) for s in specs for n in counts if (s, n) not in found]
    if lacking:
        spec, count = lacking[0]
        held = ", ".join(f"{s} for {n}" for s, n in found) or "nothing"
        raise UsageError(
            f"{path} has no cost of {spec!r} for {count} workers; it has {held}; leave --codecs "
            "out to measure"
        )
    return tuple(found[spec, count] for spec in specs for count in counts)


def compressed_outlook(
    wanted: Wanted,
) -> tuple[tuple[CompressedResult, ...], tuple[CompressorPays, ...] | UnsetType]:
    """Every scheduler under every compressor on every link; and where each pays, if asked for."""
    from msgspec import UNSET

    from testbed.prediction.extrapolate import at_bandwidth
    from testbed.records.compressed import CompressedResult, CompressorPays
    from testbed.scheduling.compressed import Outlook

    results, pays = [], []
    for link in wanted.links:
        channels = max_channels_of(link.backend)
        outlook = Outlook(
            *(wanted.slowest, link, wanted.algorithm, wanted.specs, channels), node=wanted.node
        )
        dense_s, dense_spec = outlook.best_dense()
        for codec in wanted.codecs:
            if codec.num_workers != link.num_workers:
                continue
            for spec in wanted.specs:
                if outlook.fits(spec, codec):
                    found = outlook.compressed(spec, codec)
                    results.append(
                        CompressedResult.of(
                            codec.compressor, spec, link.num_workers, found, dense_s
                        )
                    )
            if not wanted.break_even:
                continue
            worth = outlook.pays(codec)
            below = 0 < worth.below_factor < float("inf")
            pays.append(
                CompressorPays(
                    compressor=codec.compressor,
                    num_workers=link.num_workers,
                    scheduler=worth.scheduler,
                    dense_scheduler=dense_spec,
                    gain=worth.gain,
                    pays="below" if below else "any" if worth.below_factor else "never",
                    seconds_per_byte=(
                        at_bandwidth(link, worth.below_factor, wanted.node).seconds_per_byte
                        if below
                        else None
                    ),
                )
            )
    return tuple(results), tuple(pays) if wanted.break_even else UNSET


def max_channels_of(backend: str) -> int:
    """Over how many channels a backend spreads compressed messages; 1 of one that is not here.

    Args:
        backend: as a link names it, with options.
    """
    try:
        kind, options = resolve_backend(backend)
    except (UnknownName, Unavailable):
        return 1
    return kind.max_channels(options)
