"""The log: its index has a line for each entry, which stands in the file that the line names."""

import re
from pathlib import Path

RUNS = Path(__file__).parents[2] / "runs"
ROW = re.compile(
    r"\| (\d{4}-\d\d-\d\d) \| ([^|]+) \| ([^|]+) \| \[([\w-]+)\]\(log/([\w-]+)\.md\) \|"
)
ENTRY = re.compile(r"(?m)^## (\d{4}-\d\d-\d\d): .+$")


def rows():
    lines = (RUNS / "LOG.md").read_text().splitlines()
    first = lines.index("|---|---|---|---|") + 1
    return [ROW.fullmatch(line).groups() for line in lines[first:]]


def test_every_entry_has_a_line_in_the_index():
    written = {
        path.stem: ENTRY.findall(path.read_text()) for path in sorted((RUNS / "log").glob("*.md"))
    }
    listed = {}
    for date, _, _, name, file in rows():
        assert name == file
        listed.setdefault(file, []).append(date)
    assert listed == written
    assert sum(map(len, written.values())) > 30


def test_entries_stand_newest_first():
    dates = [date for date, *_ in rows()]
    assert dates == sorted(dates, reverse=True)
    for path in (RUNS / "log").glob("*.md"):
        found = ENTRY.findall(path.read_text())
        assert found == sorted(found, reverse=True)


def test_links_to_the_log_lead_somewhere():
    for path in (RUNS.parent / "README.md", RUNS / "README.md", *RUNS.glob("*/*.md")):
        for target in re.findall(r"\(([\w./-]*(?:LOG|log/[\w-]+)\.md)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path} links to {target}"
