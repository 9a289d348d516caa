"""The traces that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from testbed.errors import UnknownName, UsageError
from testbed.prediction.files import decode_trace, load_trace
from testbed.prediction.trace import Trace


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
