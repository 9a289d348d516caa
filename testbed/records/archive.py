"""A sweep's folder in one file, which another machine reads without unpacking it by hand.

<name>/manifest.json    `testbed.pack/1`: SHA-256 and size of each other file
<name>/sweep.json       and cells/, again/ as in `testbed.records.store`: records, searches,
                        timelines; no logs, locks, scratch files, hostfiles

The bytes depend on the content of the files and the folder's name alone.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.records.cell import CELL_SCHEMA
from testbed.records.memory import SUFFIX as OF_MEMORY
from testbed.records.store import PLAN
from testbed.records.timeline import SUFFIX as OF_TIMELINE

PACK_SCHEMA: Final = "testbed.pack/1"
SUFFIX: Final = ".tar.gz"
MAX_BYTES: Final = 1 << 28  # of all files together, unpacked
MANIFEST: Final = "manifest.json"
_PACKED: Final = (PLAN, f"*{OF_MEMORY}", "cells/*.json", "cells/*.csv", "again/*.json")
_NAME: Final = r"(?!\.)[ -.0-\[\]-~]+"  # ASCII that can be printed, but neither slash nor backslash
_MEMBER: Final = re.compile(
    rf"{re.escape(PLAN)}|{_NAME}{re.escape(OF_MEMORY)}|(cells|again)/{_NAME}", re.ASCII
)
_PATHS: Final = (
    *("workload", "backend", "memory", "data", "trace", "link", "plan", "checkpoint"),
    "resume_from",
)
_OPTION: Final = re.compile(r"(?:^|[:=])(/[^:=]*/)")  # the folder of a path in an option
_BEFORE: Final = r"(?<![\w./~])"  # else it is the middle of a path
_ABSOLUTE: Final = re.compile(rf"{_BEFORE}/(?:[\w.+@~-]+/)+(?=[\w.+@~-])")
MASK: Final = ".../"  # in place of the folders of an absolute path


class Packed(msgspec.Struct, frozen=True):
    """A file of an archive."""

    sha256: str
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.pack/1`: what an archive holds.

    Attributes:
        name: of the folder that was packed.
        masked: how many absolute paths in records were cut to their last name.
        files: path in the folder -> its digest and size.
    """

    schema: Literal["testbed.pack/1"] = PACK_SCHEMA
    name: str
    masked: int = 0
    files: dict[str, Packed]


def pack(folder: Path, *, timelines: bool = True) -> tuple[bytes, Manifest, dict[str, str]]:
    """An archive of a sweep's folder, or of a folder of cells.

    Args:
        folder: that is packed.
        timelines: with what the ranks of each run did, where that was recorded.

    Returns:
        The archive; what it holds; files beside these that were left out -> why.

    Raises:
        UsageError: there is no such folder, it holds no cells, or more than an archive may.
    """
    if not folder.is_dir():
        raise UsageError(
            f"no folder {folder}; give the folder of a sweep, as runs/results/quick-..."
        )
    found, left_out = _collect(folder, timelines)
    if not any(name.startswith("cells/") and _names_cell(name) for name in found):
        raise UsageError(_no_cells(folder, left_out))
    files: dict[str, bytes] = {}
    masked = 0
    for path, data in found.items():
        files[path], count = _portable(data) if path.endswith(".json") else (data, 0)
        masked += count
    _check_size(folder, files)
    listed = {n: Packed(hashlib.sha256(data).hexdigest(), len(data)) for n, data in files.items()}
    name = re.sub(r"[^\w.-]", "_", folder.resolve().name, flags=re.ASCII).lstrip(".") or "sweep"
    manifest = Manifest(name=name, masked=masked, files=listed)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, data in {MANIFEST: to_json(manifest), **files}.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(data)
            try:
                tar.addfile(member, io.BytesIO(data))
            except ValueError as error:
                raise UsageError(f"{folder}: {path} cannot be packed: {error}; rename it") from None
    return gzip.compress(plain.getvalue(), 9, mtime=0), manifest, left_out


def _collect(folder: Path, timelines: bool) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files to pack by their names in the archive, and those left out with the reason."""
    found = {path for pattern in _PACKED for path in folder.glob(pattern)}
    if not (folder / "cells").is_dir():  # a folder of cells alone
        found |= set(folder.glob("*.json"))
    files: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for path in sorted(found):
        own = name = path.relative_to(folder).as_posix()
        in_root = name == PLAN or name.endswith(OF_MEMORY)
        name = name if "/" in name or in_root else f"cells/{name}"
        if name.endswith(OF_TIMELINE) and not timelines:
            continue
        why = _objection(folder, path, name)
        data = b"" if why else path.read_bytes()
        if why or (_names_cell(name) and not _is_cell(data)):
            left_out[own] = why or f"it is no whole {CELL_SCHEMA}"
        else:
            files[name] = data
    return files, left_out


def _objection(folder: Path, path: Path, name: str) -> str:
    """Why a file is not even read; empty: nothing speaks against it."""
    if path.is_symlink() or (path.parent != folder and path.parent.is_symlink()):
        return "it is a link, or in one; copy it"
    if not path.is_file():
        return "it is no file"
    if not _MEMBER.fullmatch(name):
        return "its name begins with a dot or has other signs than ASCII's; rename it"
    return ""


def _names_cell(name: str) -> bool:
    """Whether a file of an archive is a cell by its name."""
    in_folder = name.startswith(("cells/", "again/")) and name.endswith(".json")
    return in_folder and not name.endswith((OF_MEMORY, OF_TIMELINE))


class _Head(msgspec.Struct):
    """What is read of a file to know what it is."""

    schema: str = ""


def _is_cell(data: bytes) -> bool:
    try:
        return msgspec.json.decode(data, type=_Head).schema.startswith("testbed.cell/")
    except msgspec.DecodeError:
        return False


def _no_cells(folder: Path, left_out: Mapping[str, str]) -> str:
    """What to tell of a folder without cells of its own."""
    sweeps = sorted(path.parent for path in folder.rglob(PLAN) if path.parent != folder)
    if sweeps:
        names = ", ".join(map(str, sweeps[:3])) + (", ..." if len(sweeps) > 3 else "")
        return (
            f"{folder} holds no cells of its own, but {len(sweeps)} sweep(s): {names}; pack each "
            f"by itself, as testbed pack {sweeps[0]}"
        )
    told = "".join(f"; {name} is left out: {why}" for name, why in list(left_out.items())[:3])
    return f"{folder} holds no cells{told}; give the folder of a sweep that has run"


def _check_size(folder: Path, files: Mapping[str, bytes]) -> None:
    size = sum(map(len, files.values()))
    if size <= MAX_BYTES:
        return
    of_timelines = sum(len(data) for name, data in files.items() if name.endswith(OF_TIMELINE))
    remedy = "copy the folder as it is, which report, diff and rerun read as well"
    if size - of_timelines <= MAX_BYTES:
        remedy = "leave the timelines out with --no-timelines"
    raise UsageError(
        f"{folder} holds {size} bytes of records, {of_timelines} of them timelines; expected at "
        f"most {MAX_BYTES}; {remedy}"
    )


def _folders(record: Any) -> Iterator[str]:
    """The folders of the paths that options have, whatever characters are in their names."""
    if isinstance(record, dict):
        for key, value in record.items():
            if key in _PATHS and isinstance(value, str):
                yield from _OPTION.findall(value)
            else:
                yield from _folders(value)
    for each in record if isinstance(record, list) else ():
        yield from _folders(each)


def _portable(data: bytes) -> tuple[bytes, int]:
    """A record whose absolute paths are cut to their last name, and how many were."""
    try:
        record = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data, 0  # a report names it
    count = 0

    folders = sorted(set(_folders(record)), key=len, reverse=True)
    known = [re.compile(_BEFORE + re.escape(folder)) for folder in folders]

    def cut(value: Any) -> Any:
        nonlocal count
        if isinstance(value, str):
            for pattern in (*known, _ABSOLUTE):
                value, number = pattern.subn(MASK, value)
                count += number
            return value
        if isinstance(value, dict):
            return {key: cut(each) for key, each in value.items()}
        return [cut(each) for each in value] if isinstance(value, list) else value

    record = cut(record)
    if isinstance(record, dict) and isinstance(record.get("links"), dict):
        links: dict[str, Any] = {}
        for path, digest in record["links"].items():
            name = cut(path)
            twins = sum(other.partition("#")[0] == name for other in links)
            links[f"{name}#{twins + 1}" if twins else name] = digest
        record["links"] = links
    return (to_json(record) if count else data), count


def is_archive(path: Path) -> bool:
    """Whether a path is that of an archive of a sweep, by its name."""
    return path.is_file() and path.name.endswith((SUFFIX, ".tgz"))


def read_archive(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """What an archive holds, each file checked against the manifest.

    Nothing is written. Only plain files of the names that `pack` gives are taken.

    Raises:
        UsageError: it is none, is damaged or too large, or holds what no archive of ours holds.
    """
    try:
        with gzip.open(path) as file:
            plain = file.read(2 * MAX_BYTES + 1)
        if len(plain) > 2 * MAX_BYTES:
            raise UsageError(f"{path} unpacks to more than {2 * MAX_BYTES} bytes: it is not read")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            found = dict(_members(path, tar))
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read as an archive of a sweep: {error}") from None
    try:
        manifest = msgspec.json.decode(found.pop(MANIFEST, b""), type=Manifest)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} holds no {MANIFEST} of {PACK_SCHEMA} ({error}); make it with `testbed pack`"
        ) from None
    listed = {n: Packed(hashlib.sha256(data).hexdigest(), len(data)) for n, data in found.items()}
    names = [n for n in {**listed, **manifest.files} if listed.get(n) != manifest.files.get(n)]
    if names:
        raise UsageError(f"{path} is damaged: {', '.join(names[:5])}: not as the manifest says")
    return manifest, found


def _members(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    seen: set[str] = set()
    size = 0
    for member in tar:
        name = PurePosixPath(member.name)
        inner = "/".join(name.parts[1:])
        fits = inner == MANIFEST or _MEMBER.fullmatch(inner)
        plain = member.isreg() and not member.issparse()
        if name.is_absolute() or not (plain and fits) or inner in seen:
            raise UsageError(f"{path} holds {member.name!r}, which no archive of a sweep holds")
        seen.add(inner)
        size += member.size
        if size > MAX_BYTES:
            raise UsageError(f"{path} holds more than {MAX_BYTES} bytes of files: it is not read")
        data = tar.extractfile(member)
        assert data is not None
        yield inner, data.read()


@contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """The folder itself; of an archive one with its files, for as long as the block lasts.

    Raises:
        UsageError: see `read_archive`.
    """
    if not is_archive(path):
        yield path
        return
    _, files = read_archive(path)
    with tempfile.TemporaryDirectory(prefix="testbed-pack-") as place:
        for name, data in files.items():
            file = Path(place) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield Path(place)
