"""The study `accuracy-compressed`: final accuracy of compressors beside that of dense SGD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from testbed.accuracy.carry_out import FILE, complete, cores, encode_record
from testbed.accuracy.methods import methods
from testbed.accuracy.plan import Comparison
from testbed.accuracy.table import to_markdown
from testbed.sweeping.study import Study


def _files(folder: Path | None = None) -> Mapping[str, str]:
    comparison = Comparison(methods())
    record = complete(comparison, None if folder is None else folder / FILE, cores())
    return {
        FILE.replace(".json", ".md"): to_markdown(comparison, record.outcomes),
        FILE: encode_record(record).decode(),
    }


ACCURACY_COMPRESSED = Study(
    name="accuracy-compressed",
    summary="digits-cnn under each compressor: rates searched, 30 epochs, 6 seeds, beside dense",
    compute=_files,
    go_on=_files,
)
