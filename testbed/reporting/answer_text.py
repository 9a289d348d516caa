"""What a report answers first, in words: at most three lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from testbed.base.units import rounded
from testbed.records.answer import Answer, Beside, Saving

WIDTH: Final = 100  # characters of a line
MAX_LINES: Final = 3
NAME: Final = 44  # characters of a method's name
HEADING: Final = 20  # the same in a heading
ALONE: Final = "others failed or did other work"  # why only one method is there
SURE_RUNS: Final = 3  # from here on an interval is shown


def lines_of(answer: Answer) -> list[str]:
    """The answer in lines; what matters least is left out where there is no room.

    That the verdict may not hold is never left out: where there is no room for which methods may be
    faster, their number stands behind it.
    """
    clauses = _clauses(answer)
    lines = flow(clauses)
    unranked = _unranked(answer)
    sure = answer.verdict in ("fastest", "tied")
    if sure and unranked and not any(unranked.lower() in line.lower() for line in lines):
        clauses.insert(1, f"{len(answer.unranked)} not ranked may be faster")
        lines = flow(clauses)
    return lines


def flow(clauses: Iterable[str], width: int = WIDTH, max_lines: int = MAX_LINES) -> list[str]:
    """Clauses, each in the first line that has room; what has none in the last line is left out.

    Example:
        >>> flow(["one two", "three four", "five", "six"], width=16, max_lines=2)
        ['One two; five.', 'Three four; six.']
    """
    lines: list[str] = []
    for clause in clauses:
        room = [n for n, line in enumerate(lines) if len(line) + len(clause) + 3 <= width]
        if room:
            lines[room[0]] += f"; {clause}"
        elif len(lines) < max_lines:
            lines.append(clipped(clause[:1].upper() + clause[1:], width - 1))
    return [line if line.endswith("…") else f"{line}." for line in lines]


def _clauses(answer: Answer) -> list[str]:
    """The most important first."""
    told = [_verdict(answer)]
    if answer.verdict == "tied" and answer.resolves is not None:
        told.append(f"the runs resolve {rounded(100 * answer.resolves)} %")
    if answer.next is not None:
        doubt = ", not by their own runs alone" if answer.next.pair_differs is False else ""
        begins = f"{_gain(answer.next, answer)} the next, "
        room = WIDTH - 1 - len(begins) - len(doubt)
        told.append(f"{begins}{clipped(answer.next.name, min(NAME, room))}{doubt}")
    if answer.usual is not None and answer.usual != answer.next:
        told.append(f"{_gain(answer.usual, answer)} {clipped(answer.usual.name)}")
    if answer.bound_s and answer.step_time_s:
        above = answer.step_time_s / answer.bound_s - 1
        bound = f"the bound of {_ms(answer.bound_s)} (no communication)"
        if above >= 0:
            told.append(f"{rounded(100 * above)} % above {bound}")
        elif answer.num_runs >= SURE_RUNS and (answer.high_s or 0.0) >= answer.bound_s:
            told.append(f"not told apart from {bound}")
        else:
            told.append(f"below {bound}: something slowed one of them, measure both again")
    elif answer.exposed_s is not None:
        told.append(f"{_ms(answer.exposed_s)} of it exposed communication (no bound measured)")
    if answer.unranked:
        told.append(_unranked(answer))
    if answer.compressed is not None:
        told.append(_compressed(answer.compressed, answer.test_accuracy))
    if answer.memory is not None:
        told.append(f"least memory: {_saving(answer.memory)}")
    if answer.cheapest is not None and answer.cheapest != answer.memory:
        told.append(f"least time for it: {_saving(answer.cheapest)}")
    if answer.predicted is not None and answer.predicted_s is not None:
        other = "the same" if answer.predicted == answer.best[0] else clipped(answer.predicted)
        which = "" if answer.verdict == "only one" else f" fastest: {other},"
        told.append(f"predicted{which} {_ms(answer.predicted_s)}")
    return told


def _unranked(answer: Answer) -> str:
    """Of the methods that may be faster the first; empty: there are none."""
    if not answer.unranked:
        return ""
    first, *others = answer.unranked
    return f"may be faster, not ranked: {first}" + (f" and {len(others)} more" if others else "")


def _verdict(answer: Answer) -> str:
    if answer.step_time_s is None:
        none = {
            "nothing was exchanged": "no gradients were exchanged",
            "no step time": "no step time is recorded",
        }
        told = none.get(answer.why)
        return (
            f"{told}, so that no method is the fastest" if told else "no method did the same work"
        )
    step = f"{_ms(answer.step_time_s)}{range_text(answer)}"
    best = [clipped(name) for name in answer.best]
    if answer.verdict == "tied":
        return _tied(best, step)
    dense = "" if answer.compressed is None else " dense"
    was = "did work to compare" if answer.why == ALONE else "was run"
    words = {
        "fastest": f"fastest: {best[0]}, {step}",
        "only one": f"only one{dense} method {was}: {best[0]}, {step}",
        "not proven": f"fastest seen, not proven: {best[0]}, {step}: {answer.why}",
    }
    return words[answer.verdict].removesuffix(": one run")


def _tied(names: Sequence[str], step: str) -> str:
    """As many names as a line has room for, the fastest first."""
    for number in range(len(names), 0, -1):
        more = f" and {len(names) - number} more" if number < len(names) else ""
        text = f"tied: {', '.join(names[:number])}{more}, {step}"
        if len(text) < WIDTH:
            break
    return text


def range_text(answer: Answer) -> str:
    """The interval, or the faster and the slower of two runs, and how many runs.

    Example:
        >>> two = Answer(setting="", verdict="tied", low_s=0.163, high_s=0.166, num_runs=2)
        >>> range_text(two)
        ' (163-166, 2 runs)'
    """
    runs = "one run" if answer.num_runs == 1 else f"{answer.num_runs} runs"
    if answer.low_s is None or answer.high_s is None:
        return f" ({runs})"
    low, high = rounded(1e3 * answer.low_s), rounded(1e3 * answer.high_s)
    return f" [{low}, {high}]" if answer.num_runs >= SURE_RUNS else f" ({low}-{high}, {runs})"


def _gain(beside: Beside, answer: Answer) -> str:
    """Whether it is proven is told here where the verdict has not told it."""
    unproven = ", not proven," if answer.verdict in ("fastest", "tied") else ""
    sure = {True: "", False: ", so not significantly,", None: unproven}[beside.differs]
    slower = beside.gain < 0
    text = f"{rounded(100 * abs(beside.gain))} %{sure} {'slower' if slower else 'faster'} than"
    if beside.low is not None and beside.high is not None:
        interval = f"[{rounded(100 * beside.low)}, {rounded(100 * beside.high)}]"
        text = text.replace(" %", f" % {interval}", 1)
    return text


def _compressed(beside: Beside, accuracy: float | None) -> str:
    sure = {True: "", False: ", not significant", None: ", not proven"}[beside.differs]
    step = _ms(beside.step_time_s)
    text = f"lossy: {clipped(beside.name)}, {step}, {faster_text(beside)}{sure}"
    if beside.test_accuracy is None or accuracy is None:
        return text
    own, dense = rounded(100 * beside.test_accuracy), rounded(100 * accuracy)
    return f"{text}, accuracy {own}{' % as dense' if own == dense else f', not {dense} %'}"


def faster_text(beside: Beside) -> str:
    """How much faster or slower it is than the method that it stands beside.

    Example:
        >>> faster_text(Beside(name="", place=0, step_time_s=0.5, gain=-0.5))
        '100 % faster'
    """
    if beside.gain < 0:
        return f"{rounded(100 * (1 / (1 + beside.gain) - 1))} % faster"
    return f"{rounded(100 * beside.gain)} % slower"


def _saving(saving: Saving) -> str:
    text = f"{clipped(saving.name, 34)}, {rounded(1e-6 * saving.peak_bytes)} MB"
    if saving.saves is None or saving.slower is None:
        return text
    step = f"step {'+' if saving.slower > 0 else ''}{rounded(100 * saving.slower)} %"
    few = f" ({saving.num_runs} runs)" if 1 < saving.num_runs < SURE_RUNS else ""
    few = " (one run)" if saving.num_runs == 1 else few
    return f"{text} (-{rounded(100 * saving.saves)} %), {step}{few}"


def clipped(name: str, most: int = NAME) -> str:
    """A method's name in a line that has to be short.

    Example:
        >>> clipped("gloo/bytescheduler:partition_kib=64,credit_kib=256", 40)
        'gloo/bytescheduler:partition_kib=64,cre…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def heading_of(usual: str) -> str:
    """The usual method's name over a column, without its note; a long one is called `usual`.

    Example:
        >>> heading_of("ddp (dilation not checked)"), heading_of("ddp:bucket_mib=7.12,hook=fp16")
        ('ddp', 'usual')
    """
    name = usual.partition(" (")[0]
    return name if len(name) <= HEADING else "usual"


def _ms(seconds: float) -> str:
    return f"{rounded(1e3 * seconds)} ms"
