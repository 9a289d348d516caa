"""Runs trials side by side, and keeps each outcome as soon as it is there."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Literal, TextIO

import msgspec
import torch

from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.records.store import write_atomically
from testbed.studies.accuracy.plan import Comparison, Outcome, Trial, methods
from testbed.studies.accuracy.table import to_markdown
from testbed.studies.accuracy.training import run_trial
from testbed.sweeping.study import Study

FILE = "accuracy-compressed.json"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.accuracy/1`: all outcomes so far, in the order in which they came."""

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


def complete(
    comparison: Comparison, path: Path | None, num_processes: int, progress: TextIO = sys.stderr
) -> Record:
    """Run what lacks in the record, the searches first.

    Args:
        comparison: what is to be run.
        path: of the record, written after each trial; None: nothing is kept.
        num_processes: trials at a time, each in a process of its own on one thread; 1: in this
            process, on the threads that torch has.
        progress: a line for each trial.
    """
    record = Record() if path is None else read_record(path)
    outcomes = {outcome.trial: outcome for outcome in record.outcomes}

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.trial] = outcome
        if path is not None:
            write_atomically(path, to_json(Record(outcomes=tuple(outcomes.values()))))
        t = outcome.trial
        progress.write(
            f"{len(outcomes):4d} {t.part} {t.method}: rate {t.learning_rate:g}, momentum "
            f"{t.momentum:g}, seed {t.seed}: {outcome.accuracy:.4f} in {outcome.cpu_s:.1f} s\n"
        )
        progress.flush()

    for wanted in (comparison.search, lambda: comparison.final(outcomes)):
        lacking = [trial for trial in wanted() if trial not in outcomes]
        _run_all(lacking, num_processes, keep)
    return Record(outcomes=tuple(outcomes.values()))


def cores() -> int:
    """How many trials run at a time here: the cores that this process may use, at most 2."""
    return min(2, len(os.sched_getaffinity(0)))


def _run_all(trials: Sequence[Trial], num_processes: int, keep: Callable[[Outcome], None]) -> None:
    if num_processes == 1:
        for trial in trials:
            keep(run_trial(trial))
        return
    if not trials:
        return
    # Fresh processes: a fork would copy torch's thread pool in whatever state it is.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(run_trial, trial) for trial in trials]
        try:
            for future in as_completed(futures):
                keep(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# The study `accuracy-compressed`: final accuracy of compressors beside that of dense SGD.


def _files(folder: Path | None = None) -> Mapping[str, str]:
    comparison = Comparison(methods())
    record = complete(comparison, None if folder is None else folder / FILE, cores())
    return {
        FILE.replace(".json", ".md"): to_markdown(comparison, record.outcomes),
        FILE: to_json(record).decode(),
    }


ACCURACY_COMPRESSED = Study(
    name="accuracy-compressed",
    summary="digits-cnn under each compressor: rates searched, 30 epochs, 6 seeds, beside dense",
    compute=_files,
    go_on=_files,
)
