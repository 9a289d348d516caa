"""A study's folder: one file for each training run, shared by all processes that work on it.

<folder>/<record>.json      all outcomes, written when the study is complete (`testbed.accuracy/1`)
<folder>/trials/<key>.json  one outcome, whole or not there at all
<folder>/claims/<key>       locked by the process that is at work on that run
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json, write_atomically
from testbed.studies.accuracy.trials import Outcome, Trial


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.accuracy/1`: all outcomes so far."""

    schema: Literal["testbed.accuracy/1"] = "testbed.accuracy/1"
    outcomes: tuple[Outcome, ...] = ()


def read_record(path: Path) -> Record:
    """What was kept; an empty record where there is no file.

    Raises:
        UsageError: the file is no record of this schema.
    """
    if not path.exists():
        return Record()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no testbed.accuracy/1 ({error}); give a new folder, or one that an earlier "
            "run of this study left"
        ) from error


@dataclass(frozen=True)
class Kept:
    """What is done, and who is at work on what.

    A claim is a lock on a file: it ends with the process that holds it, however that ends.

    Attributes:
        folder: there, or to be made.
        record: name of the file with all outcomes.
    """

    folder: Path
    record: str

    def outcomes(self) -> dict[Trial, Outcome]:
        """All that is done.

        Raises:
            UsageError: a file is damaged.
        """
        found = list(read_record(self.folder / self.record).outcomes)
        for path in sorted(self._trials.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Outcome))
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{path} is no outcome of a trial ({error}); remove it, and it is run again"
                ) from error
        return {outcome.trial: outcome for outcome in found}

    def keep(self, outcome: Outcome) -> None:
        """From now on it counts."""
        self._trials.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(outcome.trial), to_json(outcome))

    def gather(self, outcomes: Iterable[Outcome]) -> Record:
        """All of them as one record, which takes the place of the single files."""
        record = Record(outcomes=tuple(outcomes))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / self.record, to_json(record))
        return record

    @contextmanager
    def claimed(self, trial: Trial, *, wait: bool = False) -> Iterator[bool]:
        """Whether this process is to run the trial, which no other one does meanwhile.

        Args:
            trial: to be run.
            wait: until whoever holds it is done or dead.
        """
        claims = self.folder / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        path = claims / trial.key
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield not self._path(trial).exists()
            if self._path(trial).exists():  # whoever still waits for the lock will find it, too
                path.unlink(missing_ok=True)

    @property
    def _trials(self) -> Path:
        return self.folder / "trials"

    def _path(self, trial: Trial) -> Path:
        return self._trials / f"{trial.key}.json"
