"""Compares what this checkout computes and prints with what an older one does, to the last digit.

    python -m tests.tools.compare_with ../old [../new] [--only plans,reports] [--keep FOLDER]

Both checkouts have a virtual environment with `testbed` in `.venv`; without a second one this
checkout is the newer. Five parts, each a set of `testbed` commands that both carry out on the same
inputs (`compared_commands`), in one process each (`call_cli`):

* `plans`: plans, their digests, predicted and exposed times of every scheduler on every shipped
  trace and some links; algorithms, break-evens, factors.
* `compressors`: predictions under every compressor, with costs that the older checkout measured;
  rounds and bytes of every compressor.
* `reports`: `testbed report` of every folder of records under `runs/`, in every format; the runs
  and keys of every recipe and committed sweep.
* `studies`: the verdicts and figures of `paper-shapes`, and committed records of studies.
* `goldens`: the files under `tests/golden`, without running anything.

Numbers are compared as they are written. What may differ stands in `RENAMED` and `ADDED`;
everything else is told and makes the exit status 1. Files that two commands wrote, but for
`digests.json`, are compared as JSON by key or, if they are text, line by line; runs of spaces and
dashes count as one, since the width of a column follows from the longest word in it. Results that
name their scheduler are matched by it: in which order `all` lists them is no figure.

About 10 CPU-minutes for each checkout, both at a time; most of it for `plans`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.tools import call_cli, compared_commands
from tests.tools.compared_commands import Command

RENAMED: tuple[tuple[str, str], ...] = (
    (r"peer:ddp", "ddp"),  # the backend
    (r"\bpeer:(?=\s)", ""),  # where a narrow column wraps it
    (r"\bpeer(?=\s+\d)|^peer$", "ddp"),  # its name without options, at an error of prediction
    (r"(--backend ddp .* --json )\w{16}", r"\1KEY"),  # the digest of the configuration's words
)
"""Patterns of older words -> newer words, replaced on both sides: records keep what they said."""

ADDED: Mapping[str, str] = {"start_deadline": "120.0", "memory": "none"}
"""JSON keys and CSV columns that the older checkout does not know, with the value they may have."""

MATCHED = ("num_workers", "compressor", "scheduler")
"""JSON keys by which results of schedulers are matched."""

MEASURED = frozenset({"compute_s", "merge_s"})
"""JSON keys of seconds that were measured; they are compared nowhere."""

PARTS = ("plans", "compressors", "reports", "studies", "goldens")
TIMEOUT_S = 3600.0
SHOWN = 4  # differences of one kind that are told in full
SHOWN_CHARACTERS = 240  # of a text that differs, around the first difference
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Difference:
    """One place in which two results differ.

    Attributes:
        where: file, and place in it.
        old: what the older checkout has there; None: nothing.
        new: what the newer has.
    """

    where: str
    old: str | None
    new: str | None

    @property
    def of_figures(self) -> bool:
        """Whether a number differs; else only words do."""
        return self.old is None or self.new is None or _numbers(self.old) != _numbers(self.new)

    def __str__(self) -> str:
        kind = "FIGURES" if self.of_figures else "words"
        pairs = zip(self.old or "", self.new or "", strict=False)
        begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        old, new = _short(self.old, begin), _short(self.new, begin)
        return f"{kind}: {self.where}\n    old: {old}\n    new: {new}"


def _short(text: str | None, begin: int) -> str:
    if text is None:
        return "(nothing)"
    start = max(0, begin - SHOWN_CHARACTERS // 4)
    stop = start + SHOWN_CHARACTERS
    return f"{'... ' * (start > 0)}{text[start:stop]}{' ...' * (len(text) > stop)}"


def _numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


def renamed(text: str) -> str:
    """A text with the newer words."""
    for old, new in RENAMED:
        text = re.sub(old, new, text)
    return text


def differences_of_text(old: str, new: str, where: str) -> Iterator[Difference]:
    """Line by line, after renaming; columns may have other widths.

    Example:
        >>> [str(d).split(chr(10))[0] for d in differences_of_text("a  1.5", "a 1.50", "x")]
        ['FIGURES: x:1']
    """
    olds, news = (
        [re.sub(r"[-\u2500\u2501]{2,}", "--", re.sub(r"\s+", " ", line)).strip() for line in lines]
        for lines in (renamed(old).splitlines(), renamed(new).splitlines())
    )
    for index in range(max(len(olds), len(news))):
        ours = olds[index] if index < len(olds) else None
        theirs = news[index] if index < len(news) else None
        if ours != theirs:
            yield Difference(f"{where}:{index + 1}", ours, theirs)


def differences_of_tables(old: str, new: str, where: str) -> Iterator[Difference]:
    """Tables and notes that are wrapped into a width: the same numbers in order, the same words.

    A word of another length wraps the words around it anew, within its cell of the table.

    Example:
        >>> list(differences_of_tables("peer: ddp 1.5\\nddp   [1, 2]", "ddp ddp 1.5\\n[1, 2]", "x"))
        []
    """
    olds, news = (
        re.sub(r"[-\u2500\u2501]{2,}", " ", text).split() for text in map(renamed, (old, new))
    )
    numbers = [_numbers(" ".join(words)) for words in (olds, news)]
    if sorted(olds) != sorted(news) or numbers[0] != numbers[1]:
        yield from differences_of_text(old, new, where)


def differences_of_json(old: Any, new: Any, where: str) -> Iterator[Difference]:
    """Key by key; numbers are strings here, as they are written in the files.

    Example:
        >>> old, new = {"a": "1.5", "compute_s": "2"}, {"a": "1.50", "compute_s": "3"}
        >>> [d.where for d in differences_of_json(old, new, "x")]
        ['x.a']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        old, new = ({renamed(k): value for k, value in side.items()} for side in (old, new))
        added = [k for k in new if k not in old and ADDED.get(k) != new[k]]
        for key in [*old, *added]:
            if key in MEASURED and key in old and key in new:
                continue
            yield from differences_of_json(old.get(key), new.get(key), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences_of_json(one, other, f"{where}[{index}]")
    elif (renamed(old) if isinstance(old, str) else old) != (
        renamed(new) if isinstance(new, str) else new
    ):
        yield Difference(where, _written(old), _written(new))


def _written(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def differences_of_folders(old: Path, new: Path, only: str = "*") -> Iterator[Difference]:
    """All files below two folders whose names match a pattern."""
    names = {p.relative_to(f) for f in (old, new) for p in f.rglob(only) if p.is_file()}
    for name in sorted(names):
        one, other = old / name, new / name
        if not one.is_file() or not other.is_file():
            there = "a file" if one.is_file() else None
            yield Difference(str(name), there, None if there else "a file")
        elif one.read_bytes() != other.read_bytes():
            yield from _differences_of_files(one, other, str(name))


def _differences_of_files(old: Path, new: Path, name: str) -> Iterator[Difference]:
    if name.endswith(".json"):
        yield from differences_of_json(_read_json(old), _read_json(new), name)
    elif name.endswith(".csv"):
        yield from differences_of_json(_read_csv(old), _read_csv(new), name)
    elif name.endswith(".table"):
        yield from differences_of_tables(old.read_text(), new.read_text(), name)
    else:
        yield from differences_of_text(old.read_text(), new.read_text(), name)


def _read_csv(path: Path) -> list[dict[str, str]]:
    """A row each, by the names of the columns."""
    return list(csv.DictReader(io.StringIO(path.read_text())))


def _read_json(path: Path) -> Any:
    """With numbers as they are written; results that name their scheduler sorted by it."""
    return json.loads(
        path.read_text(),
        object_hook=_in_order,
        parse_float=str,
        parse_int=str,
        parse_constant=str,
    )


def _in_order(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: sorted(inner, key=lambda result: [result.get(name, "") for name in MATCHED])
        if isinstance(inner, list) and all(_names_scheduler(each) for each in inner)
        else inner
        for key, inner in value.items()
    }


def _names_scheduler(value: Any) -> bool:
    return isinstance(value, dict) and "scheduler" in value


class Comparison:
    """Carries commands out in both checkouts and tells what differs.

    Args:
        old: the older checkout.
        new: the newer one.
        folder: for results; empty.
    """

    def __init__(self, old: Path, new: Path, folder: Path) -> None:
        self.old, self.new = old, new
        self._folder = folder
        self.num_differences = 0

    def part(self, name: str) -> None:
        """Compare one of `PARTS`."""
        if name == "goldens":
            self._tell("goldens", differences_of_folders(*self._goldens()))
            return
        links = compared_commands.write_links(self.old, self._folder / f"links-{name}")
        traces = compared_commands.traces_of(self.old)
        if name == "plans":
            self._compare("plans", compared_commands.plans(traces, links))
        elif name == "compressors":
            codecs = self._compare(
                "codecs", compared_commands.codec_costs(traces[0], links), only="codecs.json"
            )
            paths = (codecs / "codecs").glob("*/codecs.json")
            costs = {path.parent.name: str(path) for path in sorted(paths)}
            self._compare("compressed", compared_commands.compressed(traces, links, costs))
        elif name == "reports":
            self._compare("reports", compared_commands.reports(self.old))
            self._compare("sweeps", compared_commands.sweeps(self.old))
        else:
            self._compare("studies", compared_commands.studies(self.old))

    def _goldens(self) -> tuple[Path, Path]:
        return self.old / "tests/golden", self.new / "tests/golden"

    def _compare(self, title: str, commands: Iterable[Command], only: str = "*") -> Path:
        """Both checkouts at a time; returns the older one's results."""
        given = list(commands)
        file = self._folder / f"{title}.json"
        file.write_text(json.dumps([command.raw() for command in given]))
        results = [self._folder / side / title for side in ("old", "new")]
        with contextlib.ExitStack() as ending:
            started = [
                ending.enter_context(_started(checkout, file, folder))
                for checkout, folder in zip((self.old, self.new), results, strict=True)
            ]
            for process in started:
                if process.wait(TIMEOUT_S):
                    sys.exit(f"{title}: exit status {process.returncode} of {process.args!r}")
        self._tell(title, _of_commands(given, results, only))
        self._count(title, results)
        return results[0]

    def _tell(self, title: str, found: Iterable[Difference]) -> None:
        """Print the differences, those that occur often only as their number."""
        seen: Counter[str] = Counter()
        for difference in found:
            self.num_differences += 1
            group = re.sub(r"\[\d+\]|:\d+$", "[]", difference.where)
            seen[group] += 1
            if seen[group] <= SHOWN:
                print(f"{title}: {difference}")
        for group, number in seen.items():
            if number > SHOWN:
                print(f"{title}: {number - SHOWN} more in {group}")
        print(f"{title}: {sum(seen.values())} differences", flush=True)

    def _count(self, title: str, results: Sequence[Path]) -> None:
        """What was compared, in figures: commands, plans, predictions, verdicts."""
        old, new = results
        status = [p.read_text() for p in old.rglob("status.txt")]
        failed = sum(not text.startswith("exit status 0\n") for text in status)
        print(f"{title}: {len(status)} commands carried out; the older checkout refused {failed}")
        digests = [_read_digests(folder) for folder in (old, new)]
        if digests[0]:
            equal = sum(digests[1].get(name) == digest for name, digest in digests[0].items())
            distinct = len(set(digests[0].values()))
            print(f"{title}: {len(digests[0])} plans, {distinct} distinct; {equal} digests equal")
        times = [list(_values(folder, ("iteration_s", "exposed_s"))) for folder in (old, new)]
        if times[0]:
            same = sum(one == other for one, other in zip(*times, strict=False))
            print(f"{title}: {len(times[0])} predicted and exposed times; {same} equal")
        verdicts = [
            list(filter(None, _values(folder / "studies/paper-shapes", ("verdict",))))
            for folder in results
        ]
        if verdicts[0]:
            same = sum(one == other for one, other in zip(*verdicts, strict=False))
            passed = verdicts[0].count("holds")
            print(f"{title}: {len(verdicts[0])} verdicts, {passed} hold; {same} equal")


def _of_commands(
    commands: Sequence[Command], results: Sequence[Path], only: str
) -> Iterator[Difference]:
    for command in commands:
        old, new = (folder / command.name for folder in results)
        for found in differences_of_folders(old, new, only):
            yield Difference(f"{command.name}/{found.where}", found.old, found.new)


def _read_digests(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in folder.rglob("digests.json"):
        read = json.loads(path.read_text())
        found |= {f"{path.parent.relative_to(folder)}/{name}": read[name] for name in read}
    return found


def _values(folder: Path, keys: Sequence[str]) -> Iterator[Any]:
    """The values of some keys in all JSON files that are no plans, in a fixed order."""
    for path in sorted(folder.rglob("*.json")):
        if not path.name.startswith(("plan", "digests")):
            yield from _found(_read_json(path), keys)


def _found(value: Any, keys: Sequence[str]) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (value[key] for key in keys if key in value)
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _found(inner, keys)


@contextlib.contextmanager
def _started(checkout: Path, commands: Path, results: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The commands under way in one checkout; whatever ends this script ends them too."""
    python = checkout / ".venv/bin/python"
    environment = {**os.environ, "COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = [str(python), "-P", call_cli.__file__, str(checkout), str(commands), str(results)]
    process = subprocess.Popen(arguments, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 0: nothing differs, 1: something does."""
    signal.signal(signal.SIGTERM, _end)
    here = Path(__file__).parent.parent.parent
    parser = argparse.ArgumentParser(prog="compare_with", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="older checkout, with its .venv")
    parser.add_argument("new", type=Path, nargs="?", default=here, help="newer one [this]")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas [all]")
    parser.add_argument("--keep", type=Path, help="empty folder that keeps all results")
    given = parser.parse_args(arguments)
    parts = given.only.split(",")
    if wrong := set(parts) - set(PARTS):
        parser.error(f"--only has {', '.join(sorted(wrong))}; expected some of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(given.old.resolve(), given.new.resolve(), folder)
        for part in parts:
            comparison.part(part)
    print(f"{comparison.num_differences} differences in all")
    return 1 if comparison.num_differences else 0


if __name__ == "__main__":
    sys.exit(main())
