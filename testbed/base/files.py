"""Files, written whole or not at all; records, traces and links as JSON.

Of traces and links keys that are not known here survive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UnknownName, UsageError
from testbed.base.link import LINK_SCHEMA, PROCESSOR_TIMES, Link, Piece
from testbed.base.trace import TRACE_SCHEMA, Trace, TraceTensor


def to_json(value: Any) -> bytes:
    r"""A record as it is written to a file: JSON, indented by one, with a line feed at the end.

    Example:
        >>> to_json({"a": 1})
        b'{\n "a": 1\n}\n'
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def go_on(point: str) -> None:
    """The default at every named point of a write: nothing happens there."""


def write_atomically(path: Path, data: bytes, *, at: Callable[[str], None] = go_on) -> None:
    """Write a file that others see whole or not at all, even if the machine loses power.

    A link stays, and what it leads to is replaced. What is no regular file (a device, a pipe) and
    what this process has open already (/dev/stdout) is written into.

    Args:
        path: the file; its folder exists.
        data: all of its content.
        at: called with the name of each point that is passed; a test ends the process there.

    Raises:
        OSError: it cannot be written; names `path`. What the file held before is still there.
    """
    try:
        stream = _stream(path)
        if stream is None:
            _replace(Path(os.path.realpath(path)), data, at)
            return
        with stream:
            stream.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _stream(path: Path) -> BinaryIO | None:
    """Where to write what cannot be replaced by another file; None: it can, or is not there."""
    if not os.path.exists(path):
        return None
    number = _opened_as(path)
    if number is not None:
        return os.fdopen(os.dup(number), "wb")
    return None if os.path.isfile(path) else path.open("wb")


def _opened_as(path: Path) -> int | None:
    """The descriptor of this process that an existing path stands for, as /dev/stdout does."""
    own = os.path.realpath("/proc/self/fd")
    while os.path.realpath(path.parent) != own:
        if not os.path.islink(path):
            return None
        path = path.parent / os.readlink(path)
    return int(path.name)


def _replace(path: Path, data: bytes, at: Callable[[str], None]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            at("opened")
            file.write(data[: len(data) // 2])
            file.flush()
            at("half-written")
            file.write(data[len(data) // 2 :])
            file.flush()
            at("written")
            os.fsync(file.fileno())
        at("synced")
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    at("renamed")
    sync_folder(path.parent)
    at("done")


def sync_folder(path: Path) -> None:
    """Have the names in a folder outlive a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_file(path: str | Path) -> bytes:
    """The content of a file that was named by the user.

    Raises:
        UsageError: it cannot be read; says why.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); give an existing file"
        ) from None


def read_object(data: bytes, schema: str, where: str) -> dict[str, Any]:
    """A JSON object of a schema, its keys not checked yet.

    Raises:
        UsageError: no JSON, or of another schema; `where` names the source.
    """
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where} is no JSON ({error}); expected a {schema} file") from error
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise UsageError(f"{where}: key 'schema' is {found!r}; expected {schema!r}")
    return raw


def load_trace(path: str | Path) -> Trace:
    """A trace from a `testbed.trace/1` file.

    Raises:
        UsageError: no such file, no JSON, or a key is missing or wrong; names file and key.
    """
    return decode_trace(read_file(path), str(path))


def decode_trace(data: bytes, where: str = "trace") -> Trace:
    """A trace from JSON; `where` names the source in errors.

    Unknown keys of a tensor are kept as a list under the key `tensors` of `Trace.extra`.
    """
    raw = read_object(data, TRACE_SCHEMA, where)
    trace: Trace = _convert(raw, Trace, where, inner={"tensors": TraceTensor})
    problem = _trace_problem(trace)
    if problem:
        raise UsageError(f"{where}: {problem}")
    return trace


def encode_trace(trace: Trace) -> bytes:
    """The trace as indented JSON; the inverse of `decode_trace`."""
    return _encode(TRACE_SCHEMA, trace, inner=("tensors",), optional=("consumers",))


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a `testbed.trace/1` file, see `write_atomically`."""
    write_atomically(Path(path), encode_trace(trace))


def load_link(path: str | Path) -> Link:
    """A link from a `testbed.link/1` file.

    Raises:
        UsageError: no such file, no JSON, or a key is missing or wrong; names file and key.
    """
    return decode_link(read_file(path), str(path))


def decode_link(data: bytes, where: str = "link") -> Link:
    """A link from JSON; `where` names the source in errors.

    Example:
        >>> decode_link(b'{"schema":"testbed.link/1","backend":"gloo","num_workers":2,'
        ...             b'"latency_s":1e-4,"seconds_per_byte":1e-9}').time_s(1000)
        0.000101
    """
    raw = read_object(data, LINK_SCHEMA, where)
    link: Link = _convert(raw, Link, where, inner={"pieces": Piece})
    problem = _link_problem(link)
    if problem:
        raise UsageError(f"{where}: {problem}")
    return link


def encode_link(link: Link) -> bytes:
    """The link as indented JSON; the inverse of `decode_link`."""
    optional = ("concurrency_slowdown", "pieces", *PROCESSOR_TIMES)
    return _encode(LINK_SCHEMA, link, inner=("pieces",), optional=optional)


def save_link(link: Link, path: str | Path) -> None:
    """Write a `testbed.link/1` file, see `write_atomically`."""
    write_atomically(Path(path), encode_link(link))


def _convert(
    raw: dict[str, Any], kind: type[Any], where: str, inner: Mapping[str, type[Any]]
) -> Any:
    """The struct, with every unknown key (also of the lists of structs `inner`) in `extra`."""
    known = set(kind.__struct_fields__) - {"extra"}
    extra = {k: v for k, v in raw.items() if k not in known | {"schema"}}
    for key, struct in inner.items():
        items = raw.get(key)
        found = [_unknown(item, struct) for item in items] if isinstance(items, list) else []
        if any(found):
            extra[key] = found
    try:
        return msgspec.convert({k: raw[k] for k in raw if k in known} | {"extra": extra}, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error} ($ is the whole file)") from error


def _unknown(item: Any, struct: type[Any]) -> dict[str, Any]:
    if not isinstance(item, dict):
        return {}
    return {k: v for k, v in item.items() if k not in struct.__struct_fields__}


def _encode(schema: str, value: Any, inner: tuple[str, ...], optional: tuple[str, ...]) -> bytes:
    raw: dict[str, Any] = {"schema": schema, **msgspec.to_builtins(value)}
    extra = raw.pop("extra")
    for key in inner:
        kept = extra.pop(key, None)
        # A caller may have changed the list: what belonged to its former members is then dropped.
        if kept and len(kept) == len(raw[key] or ()):
            raw[key] = [item | more for item, more in zip(raw[key], kept, strict=True)]
    for key in optional:
        if raw[key] in (None, 0.0):  # not measured
            del raw[key]
    return to_json({**raw, **extra})


def _trace_problem(trace: Trace) -> str | None:
    if not trace.tensors:
        return "key 'tensors' is empty; expected at least one tensor"
    if trace.batch_size < 1:
        return f"key 'batch_size' is {trace.batch_size}; expected 1 or more"
    for index, tensor in enumerate(trace.tensors):
        at = f"tensor {index} ({tensor.name!r})"
        if tensor.dtype not in ELEMENT_BYTES:
            return f"{at}: 'dtype' is {tensor.dtype!r}; expected one of {', '.join(ELEMENT_BYTES)}"
        for key in ("num_elements", "forward_s", "backward_s"):
            if getattr(tensor, key) < 0:
                return f"{at}: {key!r} is {getattr(tensor, key)}; expected 0 or more"
    return _consumers_problem(trace)


def _consumers_problem(trace: Trace) -> str | None:
    count = len(trace.tensors)
    if trace.consumers is None:
        return None
    if len(trace.consumers) != count:
        return (
            f"key 'consumers' has {len(trace.consumers)} entries; expected one per tensor, {count}"
        )
    for index, consumers in enumerate(trace.consumers):
        for other in consumers:
            if not 0 <= other < count:
                return f"consumers of tensor {index}: {other}; expected 0 .. {count - 1}"
    return None


def _link_problem(link: Link) -> str | None:
    if link.num_workers < 1:
        return f"key 'num_workers' is {link.num_workers}; expected 1 or more"
    for key in ("latency_s", "seconds_per_byte", *PROCESSOR_TIMES):
        if getattr(link, key) < 0:
            return f"key {key!r} is {getattr(link, key)}; expected 0 or more"
    slowdown = link.concurrency_slowdown
    if slowdown is not None and (not slowdown or slowdown[0] != 1 or min(slowdown) <= 0):
        return (
            f"key 'concurrency_slowdown' is {list(slowdown)}; expected factors above 0 for "
            "1, 2, ... messages at once, the first of them 1"
        )
    return _pieces_problem(link.pieces)


def _pieces_problem(pieces: tuple[Piece, ...] | None) -> str | None:
    if pieces is None:
        return None
    limits = [float("inf") if p.max_bytes is None else p.max_bytes for p in pieces]
    if not pieces or limits[-1] != float("inf") or sorted(set(limits)) != limits:
        return "key 'pieces': 'max_bytes' must increase and be null in the last piece"
    for index, piece in enumerate(pieces):
        for key in ("latency_s", "seconds_per_byte"):
            if getattr(piece, key) < 0:
                return f"piece {index}: {key!r} is {getattr(piece, key)}; expected 0 or more"
    return None


# The traces that come with the package, by name.


def shipped_traces() -> tuple[str, ...]:
    """The names of the traces that come with the package, sorted.

    Example:
        >>> "resnet50-v100" in shipped_traces()
        True
    """
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_shipped_trace(name: str) -> Trace:
    """A trace that comes with the package.

    Raises:
        UnknownName: none has this name; the message lists those there are.

    Example:
        >>> len(load_shipped_trace("resnet50-v100").tensors)
        161
    """
    known = shipped_traces()
    if name not in known:
        raise UnknownName("shipped trace", name, known)
    return decode_trace(_folder().joinpath(f"{name}.json").read_bytes(), name)


def find_trace(text: str | Path) -> Trace:
    """A trace by the name of a shipped one, or from a `testbed.trace/1` file.

    Text that is a shipped name means the shipped trace, whatever lies in the current folder; write
    `./name` for a file of that name. A `Path` means the file, if there is one.

    Raises:
        UsageError: neither a shipped trace nor a readable file; names both, or what is wrong in it.

    Example:
        >>> find_trace("vgg16bn-v100").batch_size
        32
    """
    known = shipped_traces()
    is_file = Path(text).exists()
    if str(text) in known and not (isinstance(text, Path) and is_file):
        return load_shipped_trace(str(text))
    if not is_file:
        raise UsageError(
            f"trace is {str(text)!r}: no such file, and no trace of this name is shipped; expected "
            f"a testbed.trace/1 file or one of {', '.join(known)}"
        )
    return load_trace(text)


def _folder() -> Traversable:
    return files("testbed.models").joinpath("traces")
