"""`testbed.codecs/1`: measured times of compressors on a machine, and the bytes that they send."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json

CODECS_SCHEMA: Final = "testbed.codecs/1"
FormName = Literal["sum", "gather", "deliver"]


class RoundCost(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one message, mean over ranks.

    Attributes:
        form: how it travels.
        num_bytes: own payload; of `deliver` all parts but the one for oneself.
        merged_bytes: of `gather` with a merger: the one payload that a server sends back; else 0.
        merge_s: seconds of the server for that, one payload after another.
        can_cut: the payloads can be cut, so that each server merges a range of a large message.
    """

    form: FormName
    num_bytes: float
    merged_bytes: float = 0.0
    merge_s: float = 0.0
    can_cut: bool = False

    def scaled(self, bytes_factor: float, seconds_factor: float) -> RoundCost:
        """The round with its bytes and seconds multiplied."""
        return msgspec.structs.replace(
            self,
            num_bytes=self.num_bytes * bytes_factor,
            merged_bytes=self.merged_bytes * bytes_factor,
            merge_s=self.merge_s * seconds_factor,
        )


class CodecSample(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a message of one size.

    Attributes:
        num_elements: of the message, 4 bytes each.
        compute_s: of a rank: before the first round (encode), between rounds, and after the last
            one (decode, until the mean is where the values were); one more than there are rounds.
        rounds: in order.
    """

    num_elements: float
    compute_s: tuple[float, ...]
    rounds: tuple[RoundCost, ...]


class CodecCost(msgspec.Struct, frozen=True, kw_only=True):
    """A compressor's cost among n workers, measured at some sizes.

    Attributes:
        compressor: specification.
        num_workers: n that it was measured for: decoding n payloads takes its time.
        device: on which it computed.
        ratio: of a sparse compressor, so that bytes can be reckoned for another; None: it has none.
        samples: by size.
    """

    compressor: str
    num_workers: int
    device: str = "cpu"
    ratio: float | None = None
    samples: tuple[CodecSample, ...]

    def at(self, num_elements: float) -> CodecSample:
        """The cost of a message of any size: linear between the sizes measured.

        Below the smallest: its seconds (start-up work rules there) and bytes in proportion. Above
        the largest: the last two sizes' line. Where two sizes do not have the same rounds, both in
        proportion to the nearer one from below.

        Example:
            >>> def sample(n: int, s: float) -> CodecSample:
            ...     return CodecSample(num_elements=n, compute_s=(s, 0.0),
            ...                        rounds=(RoundCost(form="gather", num_bytes=n / 10),))
            >>> cost = CodecCost(compressor="x", num_workers=2,
            ...                  samples=(sample(1000, 1.0), sample(2000, 2.0)))
            >>> cost.at(1500).compute_s[0], cost.at(4000).compute_s[0], cost.at(10).compute_s[0]
            (1.5, 4.0, 1.0)
            >>> cost.at(1500).rounds[0].num_bytes
            150.0
        """
        sizes = [s.num_elements for s in self.samples]
        place = bisect_left(sizes, num_elements)
        if place == 0:
            return _in_proportion(self.samples[0], num_elements, seconds=False)
        high = min(place, len(sizes) - 1)
        low = high - 1
        if high == 0 or _forms(self.samples[low]) != _forms(self.samples[high]):
            nearest = self.samples[min(place, len(sizes)) - 1]
            return _in_proportion(nearest, num_elements, seconds=True)
        return _between(self.samples[low], self.samples[high], num_elements)


def sped_up(cost: CodecCost, factor: float) -> CodecCost:
    """The cost on a machine that compresses, decompresses and merges `factor` times as fast.

    A cluster that is emulated `dilation` times slower than real still compresses at this machine's
    speed, which in the cluster's time is `dilation` times as fast.

    Raises:
        UsageError: the factor is not finite and above 0.

    Example:
        >>> sample = CodecSample(num_elements=8, compute_s=(1.0, 3.0), rounds=(
        ...     RoundCost(form="sum", num_bytes=4),))
        >>> sped_up(CodecCost(compressor="x", num_workers=2, samples=(sample,)), 2).at(8).compute_s
        (0.5, 1.5)
    """
    if not 0 < factor < float("inf"):
        raise UsageError(f"codec speed is {factor:g}; expected above 0 and finite")
    return msgspec.structs.replace(
        cost,
        samples=tuple(
            CodecSample(
                num_elements=s.num_elements,
                compute_s=tuple(t / factor for t in s.compute_s),
                rounds=tuple(r.scaled(1.0, 1.0 / factor) for r in s.rounds),
            )
            for s in cost.samples
        ),
    )


class Codecs(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a `testbed.codecs/1` file."""

    schema: Literal["testbed.codecs/1"] = CODECS_SCHEMA
    costs: tuple[CodecCost, ...]


def encode_codecs(costs: Sequence[CodecCost]) -> bytes:
    """The costs as indented JSON."""
    return to_json(Codecs(costs=tuple(costs)))


def load_codecs(path: Path) -> tuple[CodecCost, ...]:
    """The costs in a `testbed.codecs/1` file.

    Raises:
        UsageError: no such file, or another schema; names the key.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Codecs).costs
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); give an existing file, as "
            "testbed simulate --codecs-out writes"
        ) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: {error}; expected a {CODECS_SCHEMA} file") from error


def _forms(sample: CodecSample) -> tuple[str, ...]:
    return tuple(r.form for r in sample.rounds)


def _in_proportion(sample: CodecSample, num_elements: float, *, seconds: bool) -> CodecSample:
    factor = num_elements / sample.num_elements
    return CodecSample(
        num_elements=num_elements,
        compute_s=tuple(s * factor if seconds else s for s in sample.compute_s),
        rounds=tuple(r.scaled(factor, factor if seconds else 1.0) for r in sample.rounds),
    )


def _between(low: CodecSample, high: CodecSample, num_elements: float) -> CodecSample:
    share = (num_elements - low.num_elements) / (high.num_elements - low.num_elements)

    def line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    return CodecSample(
        num_elements=num_elements,
        compute_s=tuple(map(line, low.compute_s, high.compute_s)),
        rounds=tuple(
            msgspec.structs.replace(
                a,
                num_bytes=line(a.num_bytes, b.num_bytes),
                merged_bytes=line(a.merged_bytes, b.merged_bytes),
                merge_s=line(a.merge_s, b.merge_s),
            )
            for a, b in zip(low.rounds, high.rounds, strict=True)
        ),
    )
