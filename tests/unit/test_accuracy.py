"""The accuracy study: what it plans, keeps and shows; and that error feedback is worth having."""

import io
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.studies.accuracy.carry_out import complete, held_out, run_trial
from testbed.studies.accuracy.digits import (
    FILE,
    Comparison,
    Method,
    best_setting,
    methods,
    rows,
    to_markdown,
)
from testbed.studies.accuracy.kept import Kept, Record, read_record
from testbed.studies.accuracy.trials import Outcome, Trial
from testbed.training.reference import reference_of
from testbed.workloads.load import load_workload

TINY = Trial(
    method="dense",
    compressor="none",
    learning_rate=0.05,
    momentum=0.9,
    seed=1,
    part="final",
    workers=2,
    epochs=1,
)
COMPARISON = Comparison(
    (
        Method("dense", "none", (0.1, 0.2), (0.0, 0.9)),
        Method("topk", "ef+topk:ratio=0.1", (0.1,), (0.0,), may_lose=1.0),
        Method("off", "topk:ratio=0.1", settings_of="topk"),
    ),
    search_seeds=(9,),
    seeds=(1, 2),
    base=TINY,
)

TWO = Comparison((Method("dense", "none", (0.1,), (0.0,)),), (9,), (1,), TINY)
THREE = Comparison((Method("dense", "none", (0.1,), (0.0,)),), (9,), (1, 2, 3), TINY)


def outcome(trial, accuracy, **changes):
    values = {"loss": 0.1, "steps": 5, "dense_bytes": 400, "sent_bytes": 40.0, "state_bytes": 8}
    return Outcome(trial=trial, accuracy=accuracy, cpu_s=1.0, **{**values, **changes})


def test_dense_trials_are_the_reference_run():
    """No compressor: the same parameters as the single-process reference of two workers."""
    trial = msgspec.structs.replace(TINY, epochs=2)
    found = run_trial(trial)
    config = RunConfig(workers=2, epochs=2, batch_size=32, learning_rate=0.05, momentum=0.9, seed=1)
    assert found.steps == 2 * (1437 // 64)
    workload = load_workload(trial.workload, seed=1)
    parameters = reference_of(workload, config, 2, found.steps).parameters
    fresh = load_workload(trial.workload, seed=1)
    for own, value in zip(fresh.model.parameters(), parameters, strict=True):
        own.data.copy_(value)
    batch = fresh.test.batch(range(len(fresh.test)))
    with torch.no_grad():
        right = fresh.num_correct(fresh.model, batch)
    assert found.accuracy == right / len(fresh.test)
    assert found.sent_bytes == found.dense_bytes == 4 * sum(p.numel() for p in parameters)
    assert found.accuracy > 0.5


def test_what_is_held_out_is_of_the_training_samples_and_not_trained_on():
    workload = load_workload("digits-cnn", seed=1)
    split = held_out(workload)
    assert (len(split.train), len(split.test)) == (1150, 287)
    assert set(split.train.places).isdisjoint(split.test.places)
    assert held_out(workload).test.places == split.test.places


def test_a_rate_that_is_too_high_ends_the_run():
    found = run_trial(msgspec.structs.replace(TINY, learning_rate=1e6, momentum=0.0))
    assert found.diverged
    assert found.loss is None
    assert found.steps < 22


def test_models_with_buffers_are_refused():
    with pytest.raises(UsageError, match="has buffers"):
        run_trial(msgspec.structs.replace(TINY, workload="resnet20"))


def test_finals_wait_for_their_search_and_take_the_best_setting():
    search = COMPARISON.search()
    assert [t.method for t in search] == ["dense"] * 4 + ["topk"]
    done = {t: outcome(t, 0.9) for t in search[:3]}
    assert COMPARISON.final(done) == []
    done[search[3]] = outcome(search[3], 0.95)
    done[search[4]] = outcome(search[4], 0.8)
    final = COMPARISON.final(done)
    assert [(t.method, t.seed) for t in final] == [
        (m, s) for m in ("dense", "topk", "off") for s in (1, 2)
    ]
    assert (final[0].learning_rate, final[0].momentum) == (0.02, 0.9)
    assert (final[4].learning_rate, final[4].compressor) == (0.1, "topk:ratio=0.1")


def test_ties_go_to_the_lower_loss_and_never_to_what_diverged():
    a, b, c = COMPARISON.search()[:3]
    tied = [outcome(a, 0.9, loss=0.3), outcome(b, 0.9, loss=0.2)]
    assert best_setting(tied) == b
    assert best_setting([*tied, outcome(c, 0.99, diverged=True, loss=None)]) == b


def test_rows_and_verdicts_by_hand():
    search = {t: outcome(t, 0.9) for t in COMPARISON.search()}
    accuracy = {"dense": (0.98, 0.96), "topk": (0.97, 0.96), "off": (0.5, 0.7)}
    final = {t: outcome(t, accuracy[t.method][t.seed - 1]) for t in COMPARISON.final(search)}
    found = rows(COMPARISON, [*search.values(), *final.values()])
    assert [r.method for r in found] == ["dense", "topk", "off"]
    dense, topk, off = found
    assert dense.difference.mean == 0
    assert topk.difference.mean == pytest.approx(-0.005)
    # Two samples 1 point apart: s / sqrt(2) = 0.5 points, t(0.975, 1) = 12.706.
    assert topk.difference.half_width == pytest.approx(12.706 * 0.005, rel=1e-4)
    assert (topk.verdict, off.verdict) == ("within 1", "no bound")
    text = to_markdown(COMPARISON, [*search.values(), *final.values()])
    assert (
        "| topk | `ef+topk:ratio=0.1` | 0.1 | 0 | 96.50 ± 6.35 | -0.50 ± 6.35 | within 1 |" in text
    )


def test_what_is_kept_is_not_run_again(tmp_path):
    path = tmp_path / FILE
    first = complete(TWO, tmp_path, FILE, 1, io.StringIO())
    assert [o.trial.part for o in first.outcomes] == ["final", "search"]
    assert read_record(path) == first
    assert not list((tmp_path / "claims").iterdir())
    (searched,) = (o for o in first.outcomes if o.trial.part == "search")
    marked = msgspec.structs.replace(searched, accuracy=0.123)
    path.write_bytes(to_json(Record(outcomes=(marked,))))
    again = complete(TWO, tmp_path, FILE, 1, io.StringIO())
    assert {o.trial: o.accuracy for o in again.outcomes} == {
        o.trial: o.accuracy for o in first.outcomes
    }
    path.write_text("{")
    with pytest.raises(UsageError, match=r"is no testbed.accuracy/1"):
        complete(TWO, tmp_path, FILE, 1, io.StringIO())
    path.unlink()
    next((tmp_path / "trials").iterdir()).write_text("{")
    with pytest.raises(UsageError, match="remove it, and it is run again"):
        Kept(tmp_path, FILE).outcomes()


def test_two_processes_share_the_trials_and_find_what_one_does(tmp_path):
    """In an interpreter of its own: multiprocessing keeps a helper process for as long."""
    program = (
        "import sys; from pathlib import Path\n"
        "from testbed.studies.accuracy.carry_out import complete\n"
        "from tests.unit.test_accuracy import THREE\n"
        "if __name__ == '__main__': complete(THREE, Path(sys.argv[1]), 'all.json', 2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
    )
    found = {o.trial: o for o in read_record(tmp_path / "all.json").outcomes}
    assert len(done.stderr.splitlines()) == len(found) == 4  # none was run twice
    again = complete(THREE, None, "all.json", 1, io.StringIO())
    assert {t: o.accuracy for t, o in found.items()} == {
        o.trial: o.accuracy for o in again.outcomes
    }


def test_a_trial_that_another_process_is_at_work_on_is_left_to_it(tmp_path):
    kept = Kept(tmp_path, FILE)
    with kept.claimed(TINY) as ours, kept.claimed(TINY) as theirs:
        assert (ours, theirs) == (True, False)
    with kept.claimed(TINY, wait=True) as ours:  # whoever held it ended without an outcome
        assert ours
        kept.keep(outcome(TINY, 0.9))
    with kept.claimed(TINY) as ours:
        assert not ours
    assert kept.outcomes()[TINY].accuracy == 0.9


def test_the_comparison_names_what_the_issue_asks_for():
    known = methods()
    assert [m.may_lose for m in known] == [0.0, *6 * [1.0], 2.0, *4 * [None]]
    assert math.isclose(known[4].settings()[0][0], 0.005)  # dgc carries the momentum itself
    names = {m.name for m in known}
    assert all(m.settings_of in names for m in known if m.settings_of)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("with_feedback", "without"),
    [("ef+topk:ratio=0.01", "topk:ratio=0.01"), ("ef-sign", "sign:vote=0,scaled=1")],
)
def test_switching_error_feedback_off_hurts(with_feedback, without):
    """All else equal, over two seeds: a clearly higher training loss, each time."""
    for seed in (1, 2):
        base = msgspec.structs.replace(
            TINY, learning_rate=0.1, momentum=0.0, seed=seed, epochs=10, workers=4
        )
        kept, lost = (
            run_trial(msgspec.structs.replace(base, compressor=c)) for c in (with_feedback, without)
        )
        assert lost.loss > 1.3 * kept.loss
