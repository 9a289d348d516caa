"""What `testbed run` refuses before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.commands.checks import check_inputs
from tests.harness.runs import answer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"link": "nope.json"}, "--link is 'nope.json', but there is no such file"),
        ({"plan": "nope.json"}, "--plan is 'nope.json', but there is no such file"),
        ({"trace": "nope"}, "'nope': no such file"),
        ({"slow": "rank=2,delay=1ms"}, r"--slow names rank 2, .* 2 workers; expected 0 .. 1"),
        ({"slow": "rank=two,delay=1ms"}, "--slow is 'rank=two,delay=1ms'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(given: dict[str, str], words: str) -> None:
    config = msgspec.structs.replace(RunConfig(), **given)
    with pytest.raises(UsageError, match=words):
        check_inputs(config, 2)


@pytest.mark.parametrize("given", [{}, {"predict": True, "link": "link.json"}])
def test_a_rehearsal_is_of_a_prediction_that_measures_its_link(given: dict[str, Any]) -> None:
    assert RunConfig(predict=True, rehearse=True).rehearse
    with pytest.raises(UsageError, match="expected --predict and no --link beside it"):
        RunConfig(rehearse=True, **given)


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    file.write_text("{}")
    config = RunConfig(link=str(file), trace="resnet50-v100", slow="rank=1,delay=1ms")
    check_inputs(config, 2)
    # A launcher may bring more ranks than the default.
    check_inputs(msgspec.structs.replace(config, slow="rank=7,delay=1ms"), None)


def test_one_file_is_not_asked_for_twice(tmp_path):
    file = str(tmp_path / "cell.json")
    done = answer("run", "--backend", "loopback", "--json", file, "--timeline", file)
    assert done.status == 2
    assert "expected two files" in done.err
