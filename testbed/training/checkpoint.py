"""Saving and restoring everything that the next step depends on, so that a resumed run is the run.

A checkpoint is a folder `step-<k>` with one file per rank; it counts only once `complete` stands in
it, written last. Files are written beside their place and renamed into it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

from testbed.base.errors import UsageError
from testbed.control.protocol import UNTIL_LOST_S
from testbed.training.exchange.setup import agree_on
from testbed.training.protocol import Observer, Run, StepRecord, TrainingSession
from testbed.training.replica import Replica, random_state, set_random_state
from testbed.training.sampling import RunningDigest

CHECKPOINT_SCHEMA = "testbed.checkpoint/1"


class Checkpoints(Observer):
    """Saves the state of all ranks every so many steps and at the end; resumes from a saved one.

    Args:
        run: the rank's place in the job.
        replica: its model, optimizer and the like.
        session: what else the next step depends on.
        digest: of all samples so far.
        identity: what a resumed run must have in common with the one that was saved.
        total: steps of the run.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        session: TrainingSession,
        digest: RunningDigest,
        identity: str,
        total: int,
    ) -> None:
        self._run = run
        self._replica = replica
        self._session = session
        self._digest = digest
        self._identity = identity
        self._total = total

    def reads_after(self, done: int) -> bool:
        """See `Observer.reads_after`."""
        config = self._run.config
        due = done == self._total or bool(config.every and done % config.every == 0)
        return config.checkpoint is not None and due

    def after_step(self, record: StepRecord) -> None:
        """See `Observer.after_step`."""
        folder = self._run.config.checkpoint
        if folder is None or not self.reads_after(record.done):
            return
        state = {
            **self._session.state_dict(),
            **capture(self._replica),
            "schema": CHECKPOINT_SCHEMA,
            "step": record.done,
            "run": self._identity,
            "sample_digest": self._digest.value,
        }
        place = save(Path(folder), self._run.rank, state)
        size = self._run.backend.size
        self._run.control.all_gather("checkpoint", b"", UNTIL_LOST_S, members=size)
        if self._run.rank == 0:
            complete(place, size)

    def resume(self) -> int:
        """Go on from a checkpoint, if the run is to; returns the number of the first step.

        Raises:
            UsageError: there is none, or it is of another run, or at its end.
            Disagreement: ranks have checkpoints of different steps.
        """
        source, size = self._run.config.resume_from, self._run.backend.size
        if source is None:
            return 0
        state = load(Path(source), self._run.rank, size)
        if state["run"] != self._identity:
            raise UsageError(
                f"checkpoint {source} belongs to another run: it was made with {state['run']}, and "
                f"this is {self._identity}; resume with the same settings"
            )
        agree_on("checkpoints", [f"step {state['step']}"], self._run.control, size)
        step = int(state["step"])
        if step >= self._total:
            raise UsageError(
                f"checkpoint {source} is at step {step} and the run ends at {self._total}; "
                "raise --steps or --epochs"
            )
        restore(self._replica, state)
        self._session.load_state_dict(state)
        self._digest.value = state["sample_digest"]
        return step


def capture(replica: Replica) -> dict[str, Any]:
    """The state of a replica, and of the random generators."""
    host, there = random_state(replica.device)
    return {
        "model": replica.model.state_dict(),
        "optimizer": replica.optimizer.state_dict(),
        "schedule": replica.schedule.state_dict(),
        "scaler": replica.scaler.state_dict() if replica.scaler is not None else {},
        "random": {
            "torch": host,
            "cuda": [] if there is None else [there],
            "python": random.getstate(),
        },
    }


def restore(replica: Replica, state: dict[str, Any]) -> None:
    """Put the state back that `capture` gave."""
    replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])
    replica.schedule.load_state_dict(state["schedule"])
    if replica.scaler is not None:
        replica.scaler.load_state_dict(state["scaler"])
    there = state["random"]["cuda"]  # checkpoints of before have those of all GPUs that were seen
    own = (replica.device.index or 0) if len(there) > 1 else 0
    generators = state["random"]["torch"], there[own] if there else None
    set_random_state(replica.device, generators)
    version, numbers, spare = state["random"]["python"]
    random.setstate((version, tuple(numbers), spare))


def save(folder: Path, rank: int, state: dict[str, Any]) -> Path:
    """Write one rank's file into `folder/step-<k>`; returns that folder."""
    place = folder / f"step-{state['step']:08d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "complete").unlink(missing_ok=True)  # it is not, while ranks write it anew
    path = place / f"rank-{rank}.pt"
    draft = path.with_suffix(f".{os.getpid()}.draft")
    with draft.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return place


def complete(place: Path, num_ranks: int) -> None:
    """Mark a checkpoint as whole; called by rank 0 after all ranks have saved."""
    draft = place / "complete.draft"
    draft.write_text(f"{num_ranks}\n")
    draft.replace(place / "complete")


def load(folder: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """The newest whole checkpoint of a folder (or the one that the folder itself is).

    Raises:
        UsageError: there is none, or it was made by another number of workers.
    """
    places = [folder] if (folder / "complete").exists() else sorted(folder.glob("step-*"))
    whole = [place for place in places if (place / "complete").exists()]
    if not whole:
        raise UsageError(
            f"--resume-from is {str(folder)!r}, which holds no complete checkpoint; expected a "
            "folder that a run with --checkpoint wrote"
        )
    saved_ranks = int((whole[-1] / "complete").read_text())
    if saved_ranks != num_ranks:
        raise UsageError(
            f"checkpoint {whole[-1]} was made by {saved_ranks} workers; resume with "
            f"--workers {saved_ranks}, not {num_ranks}"
        )
    state = torch.load(whole[-1] / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state
