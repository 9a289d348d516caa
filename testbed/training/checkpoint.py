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
from testbed.training.replica import Replica

CHECKPOINT_SCHEMA = "testbed.checkpoint/1"


def capture(
    replica: Replica,
    *,
    step: int,
    sample_digest: str,
    order: list[str],
    run: str,
    compression: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of one rank before step `step`.

    Args:
        replica: its model, optimizer and the like.
        step: number of the next step.
        sample_digest: of all samples so far.
        order: what the plan was made from.
        run: names what may resume from it.
        compression: what this rank's compressor keeps, which differs from rank to rank.
    """
    cuda = torch.cuda.get_rng_state_all() if replica.device.type == "cuda" else []
    return {
        "schema": CHECKPOINT_SCHEMA,
        "step": step,
        "run": run,
        "sample_digest": sample_digest,
        "order": order,
        "compression": compression,
        "model": replica.model.state_dict(),
        "optimizer": replica.optimizer.state_dict(),
        "schedule": replica.schedule.state_dict(),
        "scaler": replica.scaler.state_dict() if replica.scaler is not None else {},
        "random": {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()},
    }


def restore(replica: Replica, state: dict[str, Any]) -> None:
    """Put the state back."""
    replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])
    replica.schedule.load_state_dict(state["schedule"])
    if replica.scaler is not None:
        replica.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"]["torch"])
    if replica.device.type == "cuda":
        torch.cuda.set_rng_state_all(state["random"]["cuda"])
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
