"""A sweep in one file: the same bytes each time, read as the folder is; nothing else is read."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.records import archive
from testbed.records.archive import MANIFEST, as_folder, pack, read_archive
from testbed.records.cell import decode_cell, encode_cell
from testbed.records.report import ReportCell
from testbed.reporting.work import settings_of
from tests.harness.runs import answer
from tests.unit.test_diff import made

RUNS = Path(__file__).parents[2] / "runs"
PAIRS = RUNS / "tables/ddp-pairs"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A stored sweep beside what it left while it ran."""
    folder = tmp_path / "pairs"
    shutil.copytree(PAIRS, folder)
    (folder / "scratch").mkdir()
    for name in (
        "lock",
        "hostfile",
        "cells/x.log",
        "scratch/x.json",
        "cells/.x.partial",
        "log.txt",
    ):
        (folder / name).write_text("left")
    (folder / "cells/x.tuning.csv").write_text("trial\n1\n")
    (folder / "cells/0.timeline.json").write_text("{}")
    (folder / "step.memory.json").write_text("{}")
    (folder / "again").mkdir()
    shutil.copy(next(PAIRS.glob("cells/*.json")), folder / "again")
    return folder


def without_environment(data: bytes) -> object:
    """Which tells the folder of what ranks share: the one thing in these records that is cut."""
    if not data.startswith(b"{"):
        return data
    return {key: value for key, value in json.loads(data).items() if key != "environment"}


def written(path: Path, folder: Path) -> Path:
    path.write_bytes(pack(folder)[0])
    return path


def rewritten(path: Path, change) -> Path:
    """The archive with its members changed: a list of (TarInfo, bytes)."""
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    change(members)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(gzip.compress(plain.getvalue()))
    return path


def test_it_holds_the_records_and_nothing_that_ran(sweep, tmp_path):
    _, files = read_archive(written(tmp_path / "p.tar.gz", sweep))
    stored = {f"cells/{path.name}" for path in PAIRS.glob("cells/*.json")}
    others = {name for name in files if name.startswith("again/")}
    assert files.keys() == stored | others | {
        *("sweep.json", "step.memory.json", "cells/x.tuning.csv", "cells/0.timeline.json"),
    }
    assert len(others) == 1
    for name, data in files.items():
        packed, own = (without_environment(each) for each in (data, (sweep / name).read_bytes()))
        assert packed == own


def test_the_bytes_depend_on_the_content_alone(sweep, tmp_path):
    other = tmp_path / "elsewhere" / "pairs"
    shutil.copytree(sweep, other)
    for path in other.rglob("*.json"):
        path.touch()
        path.chmod(0o600)
    assert pack(sweep)[0] == pack(other)[0]


def test_a_report_and_a_comparison_read_it_as_the_folder(sweep, tmp_path):
    file = str(written(tmp_path / "p.tar.gz", sweep))
    for words in (("--format", "csv"), ("--format", "md")):
        assert answer("report", file, *words) == answer("report", str(sweep), *words)
    told = answer("diff", str(sweep), file)
    assert (told.status, "slower" in told.out.splitlines()[0]) == (0, False)
    key = sorted(path.stem for path in PAIRS.glob("cells/*.json"))[0]
    assert answer("diff", f"{file}:{key}", str(sweep / f"cells/{key}.json")).status == 0
    (sweep / f"cells/{key}.json").unlink()
    lacking = answer("report", str(written(tmp_path / "q.tar.gz", sweep)))
    assert "are missing in the archive" in " ".join(lacking.out.split())


def test_a_forecast_is_held_against_it(tmp_path):
    file = str(written(tmp_path / "p.tar.gz", PAIRS))
    forecast = ("--forecast", str(RUNS / "forecasts/ddp-pairs.json"), "--format", "csv")
    assert answer("report", file, *forecast) == answer("report", str(PAIRS), *forecast)


def test_paths_of_the_machine_are_cut(tmp_path):
    (tmp_path / "cells").mkdir()
    cell = made(
        1.0,
        error="see /home/someone/x/log.txt, https://a.org/b/c and runs/a/b; 3 Mbit/s",
        config={"data": "/data/cifar/py", "link": "runs/links/gloo.json"},
        environment={"variables": {"OMPI_MCA_x": "/a/b:/c/d"}},
    )
    (tmp_path / "cells/k.json").write_bytes(encode_cell(cell))
    data, manifest, _ = pack(tmp_path)
    (tmp_path / "x.tar.gz").write_bytes(data)
    found = json.loads(read_archive(tmp_path / "x.tar.gz")[1]["cells/k.json"])
    assert found["error"] == "see .../log.txt, https://a.org/b/c and runs/a/b; 3 Mbit/s"
    assert (found["config"]["data"], found["config"]["link"]) == (".../py", "runs/links/gloo.json")
    assert found["environment"]["variables"] == {"OMPI_MCA_x": ".../b:.../d"}
    assert manifest.masked == 4
    spaced = "/home/Jane Doe, (lab)/nets/own.py:build"
    (tmp_path / "cells/k.json").write_bytes(
        encode_cell(made(1.0, error=f"no {spaced}", config={"workload": spaced}))
    )
    (tmp_path / "x.tar.gz").write_bytes(pack(tmp_path)[0])
    found = json.loads(read_archive(tmp_path / "x.tar.gz")[1]["cells/k.json"])
    assert found["config"]["workload"] == ".../own.py:build"
    assert found["error"] == "no .../own.py:build"
    below_root = {"data": "/data", "link": "/tmp/l.json", "checkpoint": "x/tmp/y"}
    backend = "ddp:plan=/home/Jane Doe/p.json,hook=fp16"
    options = encode_cell(made(1.0, config=below_root | {"backend": backend}))
    (tmp_path / "cells/k.json").write_bytes(options)
    (tmp_path / "x.tar.gz").write_bytes(pack(tmp_path)[0])
    packed = read_archive(tmp_path / "x.tar.gz")[1]["cells/k.json"]
    assert decode_cell(packed).backend == "ddp:plan=.../p.json,hook=fp16"
    found = json.loads(packed)["config"]
    assert [found[k] for k in below_root] == ["/data", ".../l.json", "x/tmp/y"]
    (tmp_path / "cells/k.json").write_bytes(encode_cell(cell))
    mine = {"/home/someone/gloo.json": "1d", "/home/someone/40/gloo.json": "4d"}
    plan = {"links": {**mine, "runs/links/gloo.json": "2d"}}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    data, manifest, _ = pack(tmp_path)
    (tmp_path / "x.tar.gz").write_bytes(data)
    found = json.loads(read_archive(tmp_path / "x.tar.gz")[1]["sweep.json"])
    cut = {".../gloo.json": "1d", ".../gloo.json#2": "4d"}
    assert found["links"] == {**cut, "runs/links/gloo.json": "2d"}
    assert manifest.masked == 6


def named(name):
    def change(members):
        members.append((tarfile.TarInfo(name), b"x"))

    return change


def linked(kind):
    def change(members):
        member = tarfile.TarInfo("pairs/cells/link.json")
        member.type, member.linkname = kind, "/etc/passwd"
        members.append((member, b""))

    return change


def sparse(members):
    member = tarfile.TarInfo("pairs/cells/sparse.json")
    member.type = tarfile.GNUTYPE_SPARSE
    members.append((member, b""))


def changed(members):
    place = next(i for i, (m, _) in enumerate(members) if m.name.startswith("pairs/cells/"))
    member, data = members[place]
    members[place] = member, data + b" "


def twice(members):
    members.append(members[-1])


def without_manifest(members):
    members[:] = [each for each in members if not each[0].name.endswith(MANIFEST)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (named("pairs/cells/../../escaped.json"), "which no archive of a sweep holds"),
        (named("/etc/cells/x.json"), "which no archive of a sweep holds"),
        (named("../cells/x.json"), "as the manifest says"),
        (named("pairs/scratch/x.json"), "which no archive of a sweep holds"),
        (named("pairs/cells/.x.json"), "which no archive of a sweep holds"),
        (named("pairs/cells/a\\b.json"), "which no archive of a sweep holds"),
        (named("pairs/cells/a\nb.json"), "which no archive of a sweep holds"),
        (named("pairs/cells/unlisted.json"), "cells/unlisted.json: not as the manifest says"),
        (linked(tarfile.SYMTYPE), "which no archive of a sweep holds"),
        (linked(tarfile.LNKTYPE), "which no archive of a sweep holds"),
        (sparse, "which no archive of a sweep holds"),
        (changed, "is damaged"),
        (twice, "which no archive of a sweep holds"),
        (without_manifest, "make it with `testbed pack`"),
        (lambda members: members.pop(), "is damaged"),
    ],
)
def test_what_no_archive_of_ours_holds_is_refused(change, told, sweep, tmp_path):
    file = rewritten(written(tmp_path / "p.tar.gz", sweep), change)
    with pytest.raises(UsageError, match=told):
        read_archive(file)
    assert {path.name for path in tmp_path.iterdir()} == {"p.tar.gz", "pairs"}


def test_links_are_left_out_and_a_name_that_is_too_long_is_told(sweep, tmp_path):
    first = next(PAIRS.glob("cells/*.json"))
    (sweep / "cells/linked.json").symlink_to(first)
    _, manifest, left_out = pack(sweep)
    assert "cells/linked.json" not in manifest.files
    assert left_out == {"cells/linked.json": "it is a link, or in one; copy it"}
    shutil.copy(first, sweep / f"cells/{'x' * 120}.json")
    with pytest.raises(UsageError, match=r"cannot be packed: .*; rename it"):
        pack(sweep)


def test_a_replayed_trace_is_the_same_in_a_folder_and_its_archive():
    def key(workload):
        config = RunConfig(workload=workload)
        cell = ReportCell(backend="gloo", workload=workload, num_workers=2, config=config)
        return settings_of(cell)

    assert key("replay:/data/traces/own.json") == key("replay:.../own.json")
    assert key("replay:/data/own.json:seed=1") != key("replay:/data/own.json:seed=2")


def test_what_is_no_archive_or_cut_short_is_told(sweep, tmp_path):
    whole = pack(sweep)[0]
    for name, data in {"half": whole[: len(whole) // 2], "none": b"x", "empty": b""}.items():
        file = tmp_path / f"{name}.tar.gz"
        file.write_bytes(data)
        done = answer("report", str(file))
        assert (done.status, str(file) in done.err, "Traceback" in done.err) == (2, True, False)


def test_what_unpacks_to_too_much_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    file = tmp_path / "bomb.tar.gz"
    file.write_bytes(gzip.compress(bytes(3 << 20)))
    with pytest.raises(UsageError, match="it is not read"):
        read_archive(file)


def test_nothing_is_left_of_what_was_read(sweep, tmp_path):
    with as_folder(written(tmp_path / "p.tar.gz", sweep)) as folder:
        assert (folder / "sweep.json").is_file()
    assert not folder.exists()
    with as_folder(sweep) as same:
        assert same == sweep


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no",), "no folder no"),
        (("log",), "holds no cells"),
        (("aa",), "1 sweep(s): aa/bank; pack each by itself, as testbed pack aa/bank"),
        (("links",), "gloo.json is left out: it is no whole testbed.cell/1"),
        (("aa/bank", "-o", "LOG.md/x.tgz"), "there is no folder 'LOG.md'"),
        (("aa/bank", "-o", "x.zip"), "ends in .tar.gz"),
    ],
)
def test_what_cannot_be_packed_is_told(words, told, monkeypatch):
    monkeypatch.chdir(RUNS)
    done = answer("pack", *words)
    assert (done.status, told in done.err) == (2, True), done.err


def test_the_command_names_the_file_after_the_folder(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = answer("pack", "pairs")
    assert done.status == 0, done.err
    assert done.out.startswith("pairs.tar.gz: 53 files")
    assert answer("report", "pairs.tar.gz").status == 0


def test_ordinary_names_are_packed_and_what_is_left_out_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = next(PAIRS.glob("cells/*.json"))
    kept = {"ef+topk.json", "a b=(1),c@2~.json"}
    other = {"é.json", ".x.json", "a\\b.json"}
    Path("alone").mkdir()
    for name in kept | other:
        shutil.copy(cell, Path("alone", name))
    damaged = {"half.json": cell.read_bytes()[:1000], "link.json": b'{"schema": "testbed.link/1"}'}
    damaged |= {"list.json": b"[]", "none.json": b"", "number.json": b'{"schema": 1}'}
    for name, data in damaged.items():
        Path("alone", name).write_bytes(data)
    _, manifest, left_out = pack(Path("alone"))
    assert manifest.files.keys() == {f"cells/{name}" for name in kept}
    assert left_out.keys() == other | damaged.keys()
    done = answer("pack", "alone")
    assert done.status == 0, done.err
    for name, why in left_out.items():
        assert f"{name} is left out: {why}" in done.err
    assert read_archive(Path("alone.tar.gz"))[1].keys() == manifest.files.keys()


def test_of_many_left_out_the_first_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cells").mkdir()
    shutil.copy(next(PAIRS.glob("cells/*.json")), "cells")
    for number in range(12):
        Path(f"cells/x{number:02}.json").write_text("{}")
    lines = answer("pack", ".").err.splitlines()
    assert lines[0].startswith("testbed: cells/x00.json is left out: ")
    assert (len(lines), lines[-1]) == (11, "testbed: 2 more files are left out")


def test_too_much_is_told_with_what_to_do(sweep, tmp_path, monkeypatch):
    (sweep / "cells/0.timeline.json").write_text(f'"{"x" * 1_000_000}"')
    small = sum(packed.num_bytes for packed in pack(sweep, timelines=False)[1].files.values())
    monkeypatch.setattr(archive, "MAX_BYTES", small + 100_000)
    with pytest.raises(UsageError, match="leave the timelines out with --no-timelines"):
        pack(sweep)
    file = tmp_path / "p.tar.gz"
    done = answer("pack", str(sweep), "--no-timelines", "-o", str(file))
    assert done.status == 0, done.err
    names = read_archive(file)[1].keys()
    assert not [name for name in names if name.endswith(".timeline.json")]
    assert len(names) == 52
    monkeypatch.setattr(archive, "MAX_BYTES", small - 1)
    with pytest.raises(UsageError, match="copy the folder as it is"):
        pack(sweep)


def test_an_archive_of_other_content_is_not_written_over(sweep, tmp_path):
    file = tmp_path / "p.tar.gz"
    for _ in range(2):  # the same content again is no harm
        assert answer("pack", str(sweep), "-o", str(file)).status == 0
    before = file.read_bytes()
    (sweep / "cells/x.tuning.csv").write_text("trial\n2\n")
    done = answer("pack", str(sweep), "-o", str(file))
    assert (done.status, "exists and holds something else" in done.err) == (2, True), done.err
    assert file.read_bytes() == before
