"""The instruments that compare this code with an older one tell what differs, and only that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.tools import call_cli, compare_with
from tests.tools.compare_speed import ratio_of
from tests.tools.compare_with import differences_of_folders
from tests.tools.compared_commands import plans, write_links

ROOT = Path(__file__).parent.parent.parent


def folders(tmp_path: Path, old: dict[str, str], new: dict[str, str]) -> tuple[Path, Path]:
    for side, files in (("old", old), ("new", new)):
        (tmp_path / side).mkdir()
        for name, text in files.items():
            (tmp_path / side / name).write_text(text)
    return tmp_path / "old", tmp_path / "new"


@pytest.mark.parametrize(
    ("name", "old", "new", "of_figures"),
    [
        ("a.json", '{"x": [1, 2.50]}', '{"x": [1, 2.5]}', [True]),
        ("a.json", '{"x": 1}', '{"x": 1, "y": 2}', [True]),
        ("a.json", '{"x": null}', '{"x": 0}', [True]),
        ("a.json", '{"why": "merged 3"}', '{"why": "grouped 3"}', [False]),
        ("a.json", '{"backend": "peer:ddp"}', '{"backend": "ddp"}', []),
        ("a.json", '{"encode_s": 1, "compute_s": 2}', '{"encode_s": 1, "compute_s": 3}', []),
        (
            "a.json",
            '{"results": [{"scheduler": "b", "t": 1}, {"scheduler": "a", "t": 2}]}',
            '{"results": [{"scheduler": "a", "t": 2}, {"scheduler": "b", "t": 3}]}',
            [True],
        ),
        ("a.csv", "backend,ms\ngloo,1.5\n", "backend,memory,ms\ngloo,none,1.5\n", []),
        ("a.csv", "backend,ms\ngloo,1.5\n", "backend,ms\ngloo,1.6\n", [True]),
        ("a.txt", "peer:ddp     1.2 ms\n", "ddp     1.2 ms\n", []),
        ("a.txt", "gloo 1.2 ms\nmpi 2 ms", "gloo 1.3 ms\nring 2 ms", [True, False]),
    ],
)
def test_what_counts_as_a_difference(
    name: str, old: str, new: str, of_figures: list[bool], tmp_path: Path
) -> None:
    found = list(differences_of_folders(*folders(tmp_path, {name: old}, {name: new})))
    assert [difference.of_figures for difference in found] == of_figures


def test_a_file_that_one_side_lacks_is_a_difference(tmp_path: Path) -> None:
    found = differences_of_folders(*folders(tmp_path, {"a": "", "b": ""}, {"b": "", "c": ""}))
    assert [(d.where, d.old, d.new) for d in found] == [
        ("a", "a file", None),
        ("c", None, "a file"),
    ]


def test_commands_leave_what_they_printed_and_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    links = write_links(ROOT, tmp_path / "links")
    trace = "vgg16bn-v100"
    wanted = next(c for c in plans([trace], links) if c.name == f"plans/{trace}/slow/mg-wfbp")
    refused = {"name": "refused", "arguments": ["simulate", "--trace", "none"], "inputs": {}}
    (tmp_path / "commands.json").write_text(json.dumps([wanted.raw(), refused]))
    call_cli.main(ROOT, tmp_path / "commands.json", tmp_path / "results")
    folder = tmp_path / "results" / wanted.name
    assert (folder / "status.txt").read_text() == "exit status 0\n"
    assert "mg-wfbp" in (folder / "stdout.txt").read_text()
    assert len(json.loads((folder / "digests.json").read_text())["plan.json"]) == 64
    assert (tmp_path / "results/refused/status.txt").read_text().startswith("exit status 2\n")


def test_another_checkout_than_the_imported_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="use its own Python"):
        call_cli.main(tmp_path, tmp_path / "commands.json", tmp_path / "results")


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_with.main([str(ROOT), "--only", "plan"])
    assert (
        "expected some of plans, compressors, reports, studies, goldens" in capsys.readouterr().err
    )


def test_a_slow_down_within_noise_is_none() -> None:
    old = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert ratio_of(old, [x * 1.1 for x in old]).is_slower
    assert not ratio_of(old, [x * 1.02 for x in old]).is_slower
    assert not ratio_of(old, [1.2, 1.0, 1.3, 0.9, 1.2]).is_slower
