"""Emulated lines as Markdown."""

from __future__ import annotations

from testbed.published.emulated import EmulatedLine, Emulation, Timed, count_emulated
from testbed.published.lines import Verdict


def emulation_to_markdown(emulation: Emulation) -> str:
    """One table: each inequality published, simulated for both numbers of workers, and measured."""
    lines = emulation.lines
    holding, undecided, total = count_emulated(lines)
    left_out = f" {len(lines) - total} could not be emulated here." if total < len(lines) else ""
    parts = [
        "# Published shapes in emulation",
        f"{holding} of {total} emulated inequalities hold, {undecided} are undecided (within what "
        f"the steps of one run vary).{left_out} A gain is a ratio of times: above 1 the first "
        "method is faster. Each method ran once. Made by `testbed sweep paper-shapes`.",
        "*paper* is the simulation of the paper's setting with the constants that its authors "
        "fitted; *here* the simulation of the emulated workers, from trace and link measured in "
        "the same run; *emulated* what real processes took. Times are milliseconds of the emulated "
        "cluster (real ones / dilation), slow / fast.",
        "\n".join([*_HEAD, *(_row(line, _numbers(lines)) for line in lines)]),
        *(f"({number}) {reason}" for reason, number in _numbers(lines).items()),
        "What stands for each setting: links with the start-up and time per byte of the authors' "
        "fit, for one ring all-reduce between the emulated workers.",
        "\n".join(dict.fromkeys(_place(line) for line in lines)),
    ]
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "| setting | quantity | published | paper | | here, ms | gain | | emulated, ms | gain | |",
    "|---|---|---:|---:|---|---:|---:|---|---:|---:|---|",
)


def _row(line: EmulatedLine, numbers: dict[str, int]) -> str:
    mark = f" ({numbers[line.reason]})" if line.reason else ""
    cells = (
        line.setting,
        line.quantity,
        f"{line.published:.4g}",
        f"{line.simulated:.4g}",
        line.simulated_verdict,
        _times(line, "predicted_s"),
        _ratio(line.predicted),
        line.predicted_verdict,
        _times(line, "emulated_s"),
        _ratio(line.emulated),
        f"{_word(line.verdict)}{mark}",
    )
    return f"| {' | '.join(cells)} |"


def _times(line: EmulatedLine, name: str) -> str:
    def text(timed: Timed) -> str:
        return f"{1e3 * getattr(timed, name):.1f}"

    return f"{text(line.slow)} / {text(line.fast)}" if line.slow and line.fast else ""


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _word(verdict: Verdict) -> str:
    return verdict or "not emulated"


def _numbers(lines: tuple[EmulatedLine, ...]) -> dict[str, int]:
    reasons = dict.fromkeys(line.reason for line in lines if line.reason)
    return {reason: number for number, reason in enumerate(reasons, start=1)}


def _place(line: EmulatedLine) -> str:
    theirs = f"the paper's {line.published_workers} workers"
    if line.workers == line.published_workers:
        return f"- {line.setting}: {theirs} on `{line.cluster}`"
    return f"- {line.setting}: {line.workers} workers for {theirs} on `{line.cluster}`"
