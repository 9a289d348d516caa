"""`testbed.forecast/1`: step times of a sweep's cells, written down before any of them ran."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from testbed.base.axes import BACKENDS, COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import encode_link, read_file, read_object, to_json
from testbed.base.link import Link
from testbed.prediction.nominal import parse_nominal, read_link

FORECAST_SCHEMA: Final = "testbed.forecast/1"
FEW, MANY, OVERTAKING = "few messages", "a message per tensor", "priority and halves"


def cell_name(config: RunConfig) -> str:
    """What decides the time, for people."""
    known = BACKENDS.find(config.backend)
    framework = known is not None and known.facts.schedule is not None
    told = [config.workload, config.backend, "" if framework else config.scheduler]
    told += ["" if COMPRESSORS.is_default(config) else config.compressor]
    return ", ".join(filter(None, [*told, f"{config.workers} workers", config.cluster]))


class ForecastCell(msgspec.Struct, frozen=True, kw_only=True):
    """What is foreseen of one cell.

    Attributes:
        key: of the cell without a repeat, see `records.store.cell_key`.
        name: see `cell_name`.
        backend: name of the part, without options.
        plan_class: `few messages`; `a message per tensor` (or nearly, in the order in which they
            are ready); `priority and halves`; empty without a plan.
        plan_digest: of the plan that the times are of.
        held_out_s: step time on a link that was fitted before; null: none is foreseen.
        null_s: step time on nominal numbers; null: none were given.
        why_not: why a time is null; empty if none is.
    """

    key: str
    name: str
    backend: str
    plan_class: str = ""
    plan_digest: str = ""
    held_out_s: float | None = None
    null_s: float | None = None
    why_not: str = ""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a sweep. Times are real ones, as those of cells are.

    Attributes:
        name: of the sweep.
        written: when, UTC, as ISO 8601 has it.
        commit: of the source tree.
        links: `link_digest` of each link that times are of, by the name of its file.
        codecs: digest of the costs of compressors, by the backend that they are for; `all`: every
            other one.
        cells: one for each of the sweep.
        digest: of all of the above, see `digest_of`.
    """

    schema: Literal["testbed.forecast/1"] = FORECAST_SCHEMA
    name: str
    written: str
    commit: str | None = None
    links: dict[str, str] = {}
    codecs: dict[str, str] = {}
    cells: tuple[ForecastCell, ...]
    digest: str = ""


def digest_of(forecast: Forecast) -> str:
    """SHA-256 of what a forecast holds without its digest, 32 hexadecimal digits.

    One without costs of compressors has the digest that it had before there was the key.

    Example:
        >>> one = Forecast(name="x", written="2026-01-01T00:00:00+00:00", cells=())
        >>> digest_of(one) == digest_of(sealed(one)), sealed(one).digest == digest_of(one)
        (True, True)
    """
    content = msgspec.to_builtins(msgspec.structs.replace(forecast, digest=""))
    if not forecast.codecs:
        del content["codecs"]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]


def link_digest(link: Link) -> str:
    """SHA-256 of what a link says, however its file is laid out, 32 hexadecimal digits.

    Example:
        >>> one = Link(backend="gloo", num_workers=2, latency_s=1e-4, seconds_per_byte=1e-9)
        >>> link_digest(one) == link_digest(msgspec.structs.replace(one, latency_s=2e-4))
        False
    """
    return hashlib.sha256(encode_link(link)).hexdigest()[:32]


def link_digests(named: Iterable[str | None]) -> dict[str, str]:
    """The digest of each link that is a file, by its name as given, as `Forecast.links` has it.

    Nominal numbers have none, nor has a file that cannot be read: the run that needs it says why.

    Args:
        named: links as `RunConfig.link` names them; None: no link.

    Example:
        >>> link_digests(["rate=10gbit,latency=50us", "no-such-file.json", None])
        {}
    """
    found = {}
    for name in dict.fromkeys(each for each in named if each is not None):
        try:
            if parse_nominal(name) is None:
                found[name] = link_digest(read_link(name))
        except UsageError:
            continue
    return found


def sealed(forecast: Forecast) -> Forecast:
    """The forecast with its digest."""
    return msgspec.structs.replace(forecast, digest=digest_of(forecast))


def encode_forecast(forecast: Forecast) -> bytes:
    """The forecast as indented JSON."""
    return to_json(forecast)


def load_forecast(path: Path) -> Forecast:
    """A forecast from a file.

    Raises:
        UsageError: no such file, no forecast, or it was changed after it was written.
    """
    data = read_file(path)
    read_object(data, FORECAST_SCHEMA, str(path))
    try:
        found = msgspec.json.decode(data, type=Forecast)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no {FORECAST_SCHEMA}: {error}") from error
    if digest_of(found) != found.digest:
        raise UsageError(
            f"{path} has the digest {found.digest!r}, and what it holds has {digest_of(found)!r}: "
            "it was changed after it was written; take it as `testbed forecast` wrote it"
        )
    return found
