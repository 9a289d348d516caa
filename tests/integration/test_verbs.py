"""Each verb once as a shell starts it; other tests call the command line in their process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testbed.base.files import save_link
from testbed.base.link import Link
from testbed.cli import make_app
from testbed.records.timeline import encode_timeline
from tests.harness.event_logs import make_log
from tests.harness.runs import answer, testbed

ROOT = Path(__file__).parents[2]
# Started as processes by the tests beside this one, for what they do needs ranks or nodes.
STARTED_BESIDE = {"run", "comm", "profile", "cluster", "forecast", "rerun"}
VERBS = {
    "sweep": ("quick", "--dry-run"),
    "list": ("backends",),
    "report": (".",),
    "diff": (".", "."),
    "why": ("cell.timeline.json",),
    "pack": (".", "-o", "packed.tar.gz"),
    "simulate": ("--trace", "resnet50-v100", "--link", "link.json"),
    "plan": ("--for", "ddp", "--trace", "resnet50-v100", "--link", "link.json"),
}


def test_no_verb_is_forgotten() -> None:
    commands = make_app().registered_commands
    names = {c.name or c.callback.__name__ for c in commands if c.callback is not None}
    assert names == set(VERBS) | STARTED_BESIDE


@pytest.mark.parametrize("verb", VERBS)
def test_a_process_does_what_the_call_does(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb in ("report", "diff", "pack"):
        Path("cells").mkdir()
        cells = sorted((ROOT / "runs" / "emulated" / "cells").glob("*.json"))
        shutil.copy(cells[0], "cells")
    if verb == "why":
        Path("cell.timeline.json").write_bytes(encode_timeline(make_log(None, 1).timeline))
    if verb in ("simulate", "plan"):
        link = Link(backend="gloo", num_workers=2, latency_s=1e-4, seconds_per_byte=1e-9)
        save_link(link, Path("link.json"))
    done = testbed(verb, *VERBS[verb])
    assert done.status == 0, done.err
    assert done.out
    assert answer(verb, *VERBS[verb]) == done
