"""What reports say of compressed cells: bytes, times, errors, and where compressing should pay.

`python tests/unit/test_reporting_compression.py --rewrite` writes the golden files anew.
"""

import io
import sys
from pathlib import Path

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.records.cell import Cell, CompressionResult, StepSamples
from testbed.records.text import rate_text
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.compression import Bulk, describe_break_evens
from testbed.reporting.forecast import Compared
from testbed.reporting.formats import to_markdown
from testbed.reporting.make import make_report
from testbed.reporting.short import shorten, to_text
from testbed.reporting.terminal import print_report

GOLDEN = Path(__file__).parents[1] / "golden"
# A message of M bytes between two workers: 1 ms and 8 ns a byte, so 1 Gbit/s of each interface.
LINK = {"latency_s": 1e-3, "seconds_per_byte": 8e-9, "num_workers": 2, "backend": "gloo"}
DENSE_BYTES = 10_000_000


def cell(compressor, step_ms, *, sent=DENSE_BYTES, stages_ms=None, repeat=0, **changes):
    compression = None
    if stages_ms is not None:
        encode_s, communication_s, decode_s = (1e-3 * s for s in stages_ms)
        compression = CompressionResult(
            compressor=compressor,
            dense_bytes=DENSE_BYTES,
            sent_bytes=sent,
            encode_s=encode_s,
            communication_s=communication_s,
            decode_s=decode_s,
            relative_error=0.25,
            density=0.01,
            state_bytes=DENSE_BYTES,
        )
    values = {
        "workload": "digits-cnn",
        "num_workers": 2,
        "initial_digest": "1d1d1d1d1d",
        "sample_digest": "5a5a5a5a5a",
        "scheduler": "wfbp",
        "num_messages": 8,
        "step_time_s": step_ms * 1e-3,
        "compute_s": 0.03,
        "wire_bytes_per_step": float(sent),
        "received_bytes_per_step": float(sent),
        "test_accuracy": 0.97,
        "time_to_accuracy_s": {"0.95": 1.5},
        "link": LINK,
        "samples": StepSamples(step_time_s=[step_ms * 1e-3] * 8, compute_s=[0.03] * 8),
        **changes,
    }
    config = RunConfig(backend="gloo", compressor=compressor, repeat=repeat)
    return Cell(backend="gloo", config=config, compression=compression, **values)


def known_cells():
    """Compressing that should pay and does; should not and does; cannot; and the dense cell."""
    return [
        cell("none", 95),
        cell("ef+topk:ratio=0.01", 40, sent=125_000, stages_ms=(5, 9, 2)),
        cell("ef+topk:ratio=0.01", 44, sent=127_000, stages_ms=(7, 11, 4), repeat=1),
        cell("qsgd:bits=8", 60, sent=2_500_000, stages_ms=(110, 29, 4)),
        cell("fp16", 200, sent=DENSE_BYTES, stages_ms=(1, 90, 1)),
    ]


def report_of(cells):
    return make_report(Collected(tuple(Found("folder", c.config.compressor, c) for c in cells), ()))


def golden_texts():
    report = report_of(known_cells())
    out = io.StringIO()
    print_report(report, out)
    return {
        "report_compressed.md": to_markdown(report),
        "report_compressed.txt": out.getvalue(),
        "report_compressed_short.txt": to_text(report),
    }


@pytest.mark.parametrize("name", sorted(golden_texts()))
def test_golden(name):
    assert golden_texts()[name] == (GOLDEN / name).read_text(), "see the top of this file"


def verdicts(cells):
    return {v.compressor: v for v in report_of(cells).compression}


def test_verdicts_by_hand():
    found = verdicts(known_cells())
    topk, qsgd, fp16 = (found[c] for c in ("ef+topk:ratio=0.01", "qsgd:bits=8", "fp16"))
    # Dense: 8 start-ups and 80 ms of bytes, 20 of them hidden: 30 + 68 = 98 ms.
    # topk: 6 + 10 + 3 ms are all hidden: 30 ms.
    assert topk.link_bits_per_s == pytest.approx(1e9)
    assert topk.predicted_gain == pytest.approx(98 / 30 - 1)
    assert topk.measured_gain == pytest.approx(95 / (40 * 44) ** 0.5 - 1)
    assert (topk.pays, topk.agrees) == ("below", True)
    # Where dense takes 30.3 ms: 12.3 ms of bytes at 80 / 12.3 = 6.5 Gbit/s.
    assert topk.below_bits_per_s == pytest.approx(6.5e9, rel=0.05)
    # qsgd: 110 + 33 / 8 ms, 20 hidden: 124 ms.
    assert qsgd.predicted_gain == pytest.approx(98 / (30 + 110 + 33 / 8 - 20) - 1)
    assert qsgd.measured_gain > 0
    assert (qsgd.pays, qsgd.agrees) == ("below", False)
    assert qsgd.below_bits_per_s < 1e9
    # As many bytes as before, and more to do.
    assert (fp16.pays, fp16.below_bits_per_s, fp16.agrees) == ("never", None, True)


def test_each_setting_has_its_own_rate_and_its_own_sweep():
    """The slower cluster's rate stood everywhere, and dense cells of another sweep counted."""
    cells = []
    for rate, step_ms in (("1gbit", 95), ("4gbit", 60)):
        link = {**LINK, "seconds_per_byte": 8e-9 if rate == "1gbit" else 2e-9}
        both = [cell("none", step_ms, link=link)]
        both.append(cell("qsgd:bits=8", 60, sent=2_500_000, stages_ms=(110, 29, 4), link=link))
        spec = f"nodes=2,rate={rate}"
        for each in both:
            config = msgspec.structs.replace(each.config, cluster=spec)
            cells.append(msgspec.structs.replace(each, config=config, cluster={"spec": spec}))
    apart = tuple(Found("a", str(number), each) for number, each in enumerate(cells))
    report = make_report(Collected(apart, ()))
    rates = {report.cells[v.place].config.cluster: v.below_bits_per_s for v in report.compression}
    assert len(set(rates.values())) == len(rates) == 2
    told = [
        row[table.headings.index("should pay")]
        for section in shorten(report).sections
        for table in section.tables
        if "should pay" in table.headings
        for row in table.rows
        if "qsgd" in row[0]
    ]
    assert sorted(told) == sorted(f"< {rate_text(rate)}" for rate in rates.values())
    alone = [Found("b" if f.cell.compression else "a", f.group, f.cell) for f in apart]
    assert make_report(Collected(tuple(alone), ())).compression == []


def test_the_link_is_the_dense_cell_s():
    """A compressed cell's own is fitted to short messages, and may tell nothing of bytes."""
    poor = {**LINK, "seconds_per_byte": 0.0}
    cells = [cell("none", 95), cell("fp16", 200, stages_ms=(1, 90, 1), link=poor)]
    assert verdicts(cells)["fp16"].link_bits_per_s == pytest.approx(1e9)


def test_break_even_is_where_the_two_step_times_meet():
    dense, own = Bulk(0.03, 8e-3, 1e7, num_messages=8), Bulk(0.03, 0, 2.5e6, 0.11, 0.004, 8)
    found = verdicts(known_cells())["qsgd:bits=8"]
    wire_byte_s = 8 / found.below_bits_per_s
    ratio = dense.step_s(wire_byte_s) / own.step_s(wire_byte_s)
    assert ratio == pytest.approx(1.01, rel=0.06)
    assert ratio >= 1.01


def test_repeats_are_medians():
    (topk,) = [c for c in report_of(known_cells()).cells if "topk" in c.config.compressor]
    found = topk.compression
    assert (found.encode_s, found.communication_s) == pytest.approx((6e-3, 10e-3))
    assert found.sent_bytes == 126_000


@pytest.mark.parametrize("lacking", ["link", "compute_s", "wire_bytes_per_step"])
def test_nothing_is_said_where_something_was_not_measured(lacking):
    cells = [
        msgspec.structs.replace(
            c, **{lacking: None}, samples=StepSamples(), received_bytes_per_step=None
        )
        for c in known_cells()
    ]
    assert verdicts(cells) == {}


def test_only_dense_cells_of_the_same_work_count():
    cells = known_cells()
    other = msgspec.structs.replace(
        cells[0], config=msgspec.structs.replace(cells[0].config, batch_size=7)
    )
    assert verdicts([other, *cells[1:]]) == {}


def test_times_are_the_cluster_s():
    slow = [
        msgspec.structs.replace(
            c, dilation=10.0, link={**LINK, "latency_s": 1e-4, "seconds_per_byte": 8e-10}
        )
        for c in known_cells()
    ]
    fast = verdicts(slow)["ef+topk:ratio=0.01"]
    plain = verdicts(known_cells())["ef+topk:ratio=0.01"]
    assert fast.predicted_gain == pytest.approx(plain.predicted_gain)
    assert fast.below_bits_per_s == pytest.approx(10 * plain.below_bits_per_s)
    assert "| 0.600 | 1.00 | 0.300 |" in to_markdown(report_of(slow))


def at_rate(mbit, compressor, step_ms, predicted_ms, **changes):
    """A cell on an emulated cluster; 0.1 s of compute, whatever its bytes take beside it."""
    link = {"node": 1, "up_bps": mbit * 1e6, "down_bps": mbit * 1e6}
    cluster = {"spec": f"nodes=2,rate={mbit}mbit", "links": [link, link], **changes}
    stages_ms = None if compressor == "none" else (1.0, 1.0, 1.0)
    found = cell(
        compressor,
        step_ms,
        stages_ms=stages_ms,
        cluster=cluster,
        predicted_step_time_s=predicted_ms * 1e-3,
    )
    found.config = msgspec.structs.replace(found.config, cluster=cluster["spec"])
    return found


def found_break_evens(cells, held_out_s=None):
    compared = None if held_out_s is None else Compared((), (), held_out_s)
    return reported(cells, compared).break_evens


def reported(cells, compared=None):
    apart = tuple(Found("folder", str(number), each) for number, each in enumerate(cells))
    return make_report(Collected(apart, ()), compared)


def test_break_evens_are_found_between_rates_as_measured_and_as_predicted():
    # Dense: 100 ms and 1 ms for each 1 / Gbit/s; compressed 202 (predicted 152), whatever the rate.
    # So it gains 1 % where 100 + x = 1.01 * 202 = 204.02, and as predicted 153.52.
    rates = [2, 4, 8, 20]
    cells = [at_rate(mbit, "none", 100 + 1000 / mbit, 100 + 1000 / mbit) for mbit in rates]
    cells += [at_rate(mbit, "qsgd", 202, 152) for mbit in rates]
    (found,) = found_break_evens(cells)
    assert found.compressor == "qsgd"
    assert (found.measured, found.predicted) == ("below", "below")
    assert found.measured_bits_per_s == pytest.approx(1e9 / 104.02)
    assert found.predicted_bits_per_s == pytest.approx(1e9 / 53.52)
    assert found.rates_bits_per_s == (2e6, 20e6)
    assert found.cluster == "nodes=2"


def test_break_evens_of_a_forecast_stand_beside_the_measured_ones():
    # Dense 100 + x ms, x = 1 ms / (Gbit/s); measured 202 (x = 104.02), by the forecast 152 (53.52),
    # all of its times ten times as long, as those of a cluster of dilation 10 are.
    rates = [2, 4, 8, 20]
    cells = [at_rate(mbit, "none", 100 + 1000 / mbit, 1) for mbit in rates]
    cells += [at_rate(mbit, "qsgd", 202, 9) for mbit in rates]
    foreseen = [*((100 + 1000 / mbit) / 100 for mbit in rates), *([1.52] * 4)]
    held_out_s = dict(zip((each.config for each in cells), foreseen, strict=True))
    (found,) = found_break_evens(cells, held_out_s)
    assert found.foreseen == "below"
    assert found.foreseen_bits_per_s == pytest.approx(1e9 / 53.52)
    (line,) = describe_break_evens([found])
    assert line.endswith("below 18.7 Mbit/s as the forecast has it (+94.4 %)")
    texts = [to_text(reported(cells, Compared((), (), h))) for h in (held_out_s, {})]
    heads = [next(h.split() for h in t.splitlines() if " pays " in h) for t in texts]
    assert ("forecast" in heads[0], "predicted" in heads[0]) == (True, False)
    assert ("forecast" in heads[1], "predicted" in heads[1]) == (False, True)
    held_out_s.pop(cells[-1].config)
    (found,) = found_break_evens(cells, held_out_s)
    assert (found.foreseen, found.foreseen_bits_per_s) == (None, None)


@pytest.mark.parametrize(
    ("step_ms", "pays", "words"),
    [
        (99, "every", "at every rate from 2 Mbit/s to 20 Mbit/s as measured"),
        (2000, "none", "at no rate from 2 Mbit/s to 20 Mbit/s as measured"),
    ],
)
def test_what_always_or_never_pays_has_no_break_even_and_says_which(step_ms, pays, words):
    cells = [at_rate(mbit, "none", 100 + 1000 / mbit, 1) for mbit in (2, 20)]
    cells += [at_rate(mbit, "qsgd", step_ms, 1) for mbit in (2, 20)]
    (found,) = found_break_evens(cells)
    assert (found.measured, found.measured_bits_per_s) == (pays, None)
    assert words in describe_break_evens([found])[0]


def test_gain_and_loss_that_take_turns_have_no_break_even():
    cells = [at_rate(mbit, "none", 100, 100) for mbit in (2, 4, 8)]
    cells += [at_rate(m, "qsgd", ms, ms) for m, ms in [(2, 200), (4, 50), (8, 200)]]
    (found,) = found_break_evens(cells)
    assert (found.measured, found.measured_bits_per_s) == ("unclear", None)


def test_one_rate_or_uneven_links_or_no_dense_cells_give_no_break_even():
    uneven = {"links": [{"up_bps": 1e9, "down_bps": 1e9}, {"up_bps": 1e8, "down_bps": 1e9}]}
    assert not found_break_evens([at_rate(2, "none", 9, 9), at_rate(2, "qsgd", 8, 8)])
    assert not found_break_evens([at_rate(m, "qsgd", 8, 8) for m in (2, 4)])
    others = [at_rate(m, c, 8, 8) for m in (2, 4) for c in ("none", "qsgd")]
    for each in others[::2]:
        each.config = msgspec.structs.replace(each.config, batch_size=64)
    assert not found_break_evens(others)  # dense and compressed steps of other batches
    both = [at_rate(m, c, 8, 8, **uneven) for m in (2, 4) for c in ("none", "qsgd")]
    assert not found_break_evens(both)


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python tests/unit/test_reporting_compression.py --rewrite")
    for golden_name, golden_text in golden_texts().items():
        (GOLDEN / golden_name).write_text(golden_text)
