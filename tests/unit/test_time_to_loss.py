"""Seconds to a loss: products, sentences, tables by hand, and the full runs that check them."""

import math

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.recipes.language import recipe
from testbed.records.cell import Accuracy, Cell
from testbed.studies.accuracy.language import ARMS, Arm
from testbed.studies.accuracy.loss import Row
from testbed.studies.accuracy.time_to_loss import (
    TIME_TO_LOSS,
    Options,
    Span,
    full_runs,
    product,
    sentence,
    step_times,
    to_markdown,
    to_target,
)
from testbed.studies.accuracy.trials import Mean, Outcome, Trial
from testbed.sweeping.recipe import load_toml

DENSE, BF16, TOPK = (Arm(n, c) for n, c in (("dense", "none"), ("bf16", "bf16"), ("k", "topk")))
SLOW, FAST = "nodes=4,rate=50mbit", "nodes=4,rate=200mbit"


def row(arm, *to_target):
    curve = ((100, 3.0), (200, 2.0), (300, 1.5))
    outcomes = tuple(
        Outcome(
            trial=Trial(
                method=arm.name,
                compressor=arm.compressor,
                learning_rate=0.1,
                momentum=arm.momentum,
                seed=seed,
                part="final",
                workload="byte-gpt",
                batch_size=4,
                steps=300,
                warmup_steps=20,
                evaluate_every=10,
            ),
            **{"accuracy": 0.5, "loss": 1.0, "steps": 300, "dense_bytes": 4, "sent_bytes": 4.0},
            **{"state_bytes": 0, "cpu_s": 1.0, "curve": curve},
        )
        for seed, _ in enumerate(to_target, start=1)
    )
    return Row(arm, 0.1, Mean(2.0, 0.1), Mean(0.0, 0.0), to_target, outcomes)


def cell(arm, cluster, step_s, repeat=0, **changes):
    config = RunConfig(
        workload="byte-gpt", compressor=arm.compressor, cluster=cluster, workers=4, repeat=repeat
    )
    values = {"backend": "mpi-ring", "workload": "byte-gpt", "num_workers": 4, "config": config}
    return Cell(**values, **{"step_time_s": step_s, **changes})


TABLE = [row(DENSE, 240.0, 240.0), row(BF16, 240.0, 240.0), row(TOPK, 300.0, None)]
LINKS = [
    *(cell(DENSE, SLOW, s, i) for i, s in enumerate((1.0, 1.01, 0.99))),
    *(cell(BF16, SLOW, s, i) for i, s in enumerate((0.5, 0.505, 0.495))),
    cell(TOPK, SLOW, 0.1),
    cell(DENSE, FAST, 0.2),
    cell(BF16, FAST, 0.3),
]


def test_a_product_has_the_widths_of_both_factors():
    found = product([90.0, 100.0, 110.0], [0.9, 1.0, 1.1])
    steps, times = (
        product([90.0, 100.0, 110.0], [1.0, 1.0]),
        product([100.0, 100.0], [0.9, 1.0, 1.1]),
    )
    assert found.seconds == pytest.approx(99.0 * 0.9967, rel=0.01)
    halves = [math.log(each.ends[1] / each.seconds) for each in (found, steps, times)]
    assert halves[0] == pytest.approx(math.hypot(*halves[1:]))
    assert product([100.0], [0.1]) == Span(pytest.approx(10.0), None)


def test_only_arms_that_all_seeds_bring_there_have_seconds():
    found = to_target(TABLE, step_times(LINKS))
    assert {(arm.name, rate) for arm, rate in found} == {
        ("dense", 50e6), ("bf16", 50e6), ("dense", 200e6), ("bf16", 200e6),
    }  # fmt: skip
    assert found[DENSE, 50e6].seconds == pytest.approx(240.0, rel=1e-3)
    assert found[BF16, 50e6].seconds == pytest.approx(120.0, rel=1e-3)


def test_sentences_name_the_first_and_what_is_not_told_apart():
    spans = {DENSE: Span(20.0, (19.0, 21.0)), BF16: Span(10.0, (9.5, 10.5))}
    assert sentence(5e7, spans) == (
        "50 Mbit/s: bf16 is first at the loss, after 10.0 [9.5, 10.5] s; no codec that sends less "
        "beats it."
    )
    clear = {**spans, TOPK: Span(5.0, (4.0, 6.0))}
    assert "k is first" in sentence(5e7, clear)
    assert "it beats bf16, which takes 2.00 times as long." in sentence(5e7, clear)
    close = {**spans, TOPK: Span(9.8, (9.0, 10.6))}
    assert "is not significantly faster than bf16" in sentence(5e7, close)
    assert sentence(5e7, close).endswith("(not told apart from it: bf16).")
    assert "bf16 has no figure" in sentence(5e7, {DENSE: Span(1.0, None)})


def test_the_table_and_the_full_runs_beside_it():
    times = step_times(LINKS)
    points = [(100, 60.0, 3.0), (200, 120.0, 2.0), (300, 180.0, 1.0)]
    curve = [Accuracy(step=n, time_s=t, accuracy=0.5, loss=x) for n, t, x in points]
    full = [cell(BF16, rate, 0.6, accuracy_curve=curve) for rate in (FAST, SLOW)]
    text = to_markdown(Options(), 1.75, TABLE, times, full)
    assert "| k | never | 100.0 | never |  |  |" in text
    assert "50 Mbit/s: bf16 is first" in text
    assert "200 Mbit/s: dense is first" in text
    # Seed 1 is at 1.75 after 250 steps of 0.5 s; the run after 225 steps, 135 s.
    slow = text.index("| bf16 | 50 Mbit/s | 1 | 250 | 225 | 125.0 | 135.0 | -7.4 |")
    assert slow < text.index("| bf16 | 200 Mbit/s | 1 | 250 | 225 | 75.0 | 135.0 | -44.4 |")


def test_a_full_run_belongs_to_the_arm_of_its_momentum():
    plain = Arm("bf16, no momentum", "bf16", momentum=0.0)
    curve = [Accuracy(step=n, time_s=n, accuracy=0.5, loss=x) for n, x in ((100, 3.0), (200, 1.0))]
    ran = cell(BF16, SLOW, 0.6, accuracy_curve=curve)
    config = msgspec.structs.replace(ran.config, momentum=0.0)
    full = [msgspec.structs.replace(ran, config=config)]
    text = to_markdown(Options(), 1.75, [*TABLE, row(plain, 240.0)], step_times(LINKS), full)
    assert "| bf16, no momentum | 50 Mbit/s | 1 |" in text
    assert "| bf16 | 50 Mbit/s | 1 |" not in text


def test_what_lacks_is_told(tmp_path):
    assert "No run of dense" in to_markdown(Options(), None, [], {}, [])
    text = to_markdown(Options(links="there"), 1.75, TABLE, {}, [])
    assert "No step times: there holds no finished cell" in text
    assert "None: runs/compressors/language-full holds no finished run" in text
    study = TIME_TO_LOSS.with_options({"training": str(tmp_path), "links": str(tmp_path)})
    files = study.compute()
    assert "nothing can be told" in files["time-to-loss.md"]
    assert "nothing is known yet" in files["full-runs.toml"]


def test_full_runs_are_a_sweep_of_the_first_and_what_is_beside_it(tmp_path):
    links = [each for each in LINKS if each.config.repeat == 0]
    path = tmp_path / "full-runs.toml"
    path.write_text(full_runs(1.75, TABLE, step_times(LINKS), links))
    cells = load_toml(path).cells
    assert [(c.cluster, c.compressor) for c in cells] == [
        (SLOW, "bf16"), (SLOW, "none"), (FAST, "none"), (FAST, "bf16"),
    ]  # fmt: skip
    for each in cells:
        assert (each.target_loss, each.learning_rate, each.seed) == ((1.75,), 0.1, 1)
        assert (each.steps, each.warmup_steps, each.evaluate_every) == (300, 20, 10)


def test_the_recipe_has_the_arms_of_the_study():
    cells = recipe().cells
    assert {c.compressor for c in cells} == {arm.compressor for arm in ARMS}
    assert len(cells) == 3 * len({arm.compressor for arm in ARMS})
    assert {c.momentum for c in cells if c.compressor.startswith("dgc")} == {0.0}


def test_a_cell_without_a_cluster_is_refused():
    plain = cell(DENSE, SLOW, 1.0)
    config = msgspec.structs.replace(plain.config, cluster=None)
    with pytest.raises(UsageError, match="whose cells have one"):
        step_times([msgspec.structs.replace(plain, config=config)])
