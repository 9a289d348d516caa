"""Loss under compression: the search's rule, the tables by hand, and a small study as a whole."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.errors import UsageError
from testbed.models.language import ByteGpt, read_sources
from testbed.studies.accuracy.carry_out import complete, run_trial
from testbed.studies.accuracy.language import ARMS, OF_MANY, Arm, Comparison, Search
from testbed.studies.accuracy.loss import LOSS_COMPRESSED, rows, steps_to, target_of, to_markdown
from testbed.studies.accuracy.trials import Outcome
from testbed.workloads.load import load_workload

WORKLOAD = "byte-gpt:width=16,num_layers=1,num_heads=2,context=16,num_test=8"
BASE = msgspec.structs.replace(
    Comparison().base, workload=WORKLOAD, steps=50, warmup_steps=2, workers=2, batch_size=2
)
SMALL = Comparison(
    (Arm("dense", "none"), Arm("topk", "topk:ratio=0.1")),
    Search(0.1, budget=3, most=3),
    seeds=(1, 2),
    many=3,
    many_arms=("dense",),
    many_seeds=(1,),
    base=BASE,
)


def outcome(trial, *losses, **changes):
    values = {"steps": trial.steps, "dense_bytes": 400, "sent_bytes": 40.0, "state_bytes": 8}
    every = trial.evaluate_every
    curve = tuple((every * (i + 1), loss) for i, loss in enumerate(losses))
    return Outcome(
        **{"trial": trial, "accuracy": 0.5, "loss": 1.0, "cpu_s": 1.0, "curve": curve}
        | values
        | changes
    )


def searched(loss_of, budget=6, most=9):
    """Rates that a search tries where the loss is a function of the rate."""
    search, losses = Search(0.1, budget, most), {}
    while more := search.next(losses):
        losses |= {rate: loss_of(rate) for rate in more}
    return search, losses


@pytest.mark.parametrize("best", [0.003, 0.02, 0.1, 0.13, 1.0, 2.5])
def test_the_search_ends_around_the_best_rate_wherever_it_is(best):
    search, losses = searched(lambda rate: abs(math.log(rate / best)), most=12)
    found = min(losses, key=losses.get)
    assert len(losses) >= 6
    assert not search.at_edge(losses)
    assert abs(math.log2(found / best)) <= 0.5


def test_all_searches_have_the_budget_and_end_at_most_at_the_bound():
    for best in (0.07, 0.1, 0.3):
        assert len(searched(lambda rate, b=best: abs(math.log(rate / b)))[1]) == 6
    search, losses = searched(lambda rate: rate)
    assert len(losses) == 9
    assert search.at_edge(losses)
    search, losses = searched(lambda rate: math.inf if rate > 0.1 else 1 / rate)
    assert not search.at_edge(losses)
    assert 0.1 <= min(losses, key=losses.get) < 0.2


def test_what_diverged_is_worse_than_any_loss():
    trial = SMALL.wanted({})[0]
    assert outcome(trial, 2.0).judged_loss == 2.0
    assert outcome(trial, 2.0, diverged=True).judged_loss == math.inf
    assert outcome(trial).judged_loss == math.inf


def test_finals_take_the_rate_of_the_search_and_many_workers_come_last():
    done = {}
    assert [t.part for t in SMALL.wanted(done)] == ["search"] * 6
    for trial in SMALL.wanted(done)[:3]:
        done[trial] = outcome(trial, 3.0 + abs(trial.learning_rate - 0.1))
    finals = [t for t in SMALL.wanted(done) if t.part == "final"]
    assert [(t.method, t.workers, t.seed) for t in finals] == [
        ("dense", 2, 1), ("dense", 2, 2), ("dense", 3, 1),
    ]  # fmt: skip
    assert {t.learning_rate for t in finals} == {0.1}
    for trial in SMALL.wanted(done)[3:6]:
        done[trial] = outcome(trial, math.inf if trial.learning_rate > 0.1 else 3.0)
    finals = [t for t in SMALL.wanted(done) if t.part == "final"]
    assert [(t.method, t.workers) for t in finals] == [
        ("dense", 2), ("topk", 2), ("dense", 2), ("topk", 2), ("dense", 3),
    ]  # fmt: skip
    assert [t.learning_rate for t in finals] == [0.1, 0.05, 0.1, 0.05, 0.1]


def test_the_table_tells_what_an_arm_has_otherwise_than_its_authors():
    arms = (Arm("dense", "none"), Arm("odd", "topk:ratio=0.1", departs="no memory"))
    comparison = Comparison(arms, SMALL.search, seeds=(1,), many=0, base=BASE)
    done = {}
    for _ in range(4):  # searches first, then what they allow
        for trial in comparison.wanted(done):
            done.setdefault(trial, outcome(trial, *[3.0 + abs(trial.learning_rate - 0.1)] * 5))
    table = to_markdown(comparison, done).split("## The search")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    (place,) = (i for i, name in enumerate(cells[0]) if name == "other than its authors'")
    assert {row[0]: row[place:] for row in cells[1:]} == {"dense": [], "odd": ["no memory"]}


def test_arms_that_are_not_set_as_published_say_so():
    told = {arm.name: arm.departs for arm in ARMS}
    assert [name for name, departs in told.items() if not departs] == [
        "dense", "dense, no momentum", "bf16", "topk 1 %, ef, no momentum", "powersgd rank 4",
    ]  # fmt: skip
    # Where a published setting is an option's default, a statement and the option agree.
    dgc = next(arm for arm in ARMS if arm.name.startswith("dgc")).compressor
    ratio = COMPRESSORS.resolve(dgc).options.ratio
    assert ratio != COMPRESSORS.resolve("dgc").options.ratio == 0.001
    assert f"{ratio:.0%} sent".replace("%", " %") in told["dgc 1 %"]


def test_steps_to_a_loss_are_linear_between_judgings():
    curve = [(10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0)]
    assert steps_to(curve, 5.0) == 10.0
    assert steps_to(curve, 3.25) == pytest.approx(17.5)
    assert steps_to(curve, 2.75) == pytest.approx(35.0)
    assert steps_to(curve, 1.0) is None


def test_rows_by_hand():
    base = msgspec.structs.replace(BASE, steps=50)
    plan = msgspec.structs.replace
    comparison = Comparison(SMALL.arms, SMALL.search, seeds=(1, 2), many=0, base=base)
    done = {}
    for trial in comparison.wanted(done):
        done[trial] = outcome(trial, 3.0 + abs(trial.learning_rate - 0.1))
    for trial in [t for t in comparison.wanted(done) if t.part == "final"]:
        down = 0.2 * (trial.seed - 1)
        losses = (5.0, 4.0, 3.0 - down, 2.5 - down, 2.0 - down)
        if trial.method == "topk":
            losses = (5.0, 4.5, 4.0, 3.5, 3.0 - down)
        done[trial] = outcome(trial, *losses)
    target, found = rows(comparison, done, 2)
    assert target == pytest.approx(2.4)  # after 40 of 50 steps: 2.5 and 2.3
    dense, topk = found
    assert dense.difference.mean == 0
    assert topk.difference.mean == pytest.approx(1.0)
    assert dense.to_target == (pytest.approx(42.0), pytest.approx(38.0))
    assert topk.to_target == (None, None)
    text = to_markdown(comparison, done)
    assert (
        "| topk | `topk:ratio=0.1` | 0.1 | 0.9 | 2 | 2.9000 ± 1.2706 | 1.0000 ± 0.0000 | never |"
        in text
    )
    assert "Not complete" not in text
    del done[plan(comparison.base, method="topk", compressor="topk:ratio=0.1", seed=2)]
    assert "Not complete: 1 runs lack" in to_markdown(comparison, done)
    assert target_of([], 50) is None


def test_a_small_study_runs_goes_on_and_shows_its_table(tmp_path: Path):
    record = complete(SMALL, tmp_path, "all.json", 1)
    done = {each.trial: each for each in record.outcomes}
    assert len(done) == 6 + 4 + 1
    assert all(SMALL.wanted(done)[i] in done for i in range(11))
    first = next(t for t in done if t.part == "final" and t.compressor == "none")
    assert [step for step, _ in done[first].curve] == [10, 20, 30, 40, 50]
    assert run_trial(first).curve == done[first].curve
    assert "## 3 workers, at the rates found with 2" in to_markdown(SMALL, done)


def test_only_the_table_of_what_is_there(tmp_path: Path):
    study = LOSS_COMPRESSED.with_options({"run": "0", "steps": "50"})
    (text,) = study.go_on(tmp_path).values()
    assert "Not complete: 45 runs lack" in text
    with pytest.raises(UsageError, match="give it with --output"):
        study.compute()
    with pytest.raises(UsageError, match="a multiple of 50"):
        LOSS_COMPRESSED.with_options({"steps": "25"})


def test_every_arm_of_the_issue_is_there_and_each_of_many_is_an_arm():
    text = " ".join(arm.compressor for arm in ARMS)
    for word in ("none", "fp16", "bf16", "ef+topk", "qsgd:bits=2", "qsgd:bits=8", "ef-sign"):
        assert word in text
    assert {"sign, no ef", "onebit, ef", "powersgd rank 4", "dgc 1 %"} <= {a.name for a in ARMS}
    assert set(OF_MANY) <= {arm.name for arm in ARMS}
    assert ARMS[0].compressor == "none"


def test_held_out_files_are_not_trained_on(tmp_path: Path):
    for i in range(20):
        (tmp_path / f"m{i:02d}.py").write_bytes(bytes([65 + i]) * 40)
    (tmp_path / "a_link.py").symlink_to(tmp_path / "m00.py")
    text = read_sources(tmp_path)
    assert set(text.test.tobytes()) == {65 + 9, 65 + 19}
    assert not set(text.test.tobytes()) & set(text.train.tobytes())
    assert text.num_files == 20
    (tmp_path / "m00.py").write_bytes(b"other")
    assert read_sources(tmp_path).digest != text.digest
    options = "width=16,num_layers=1,num_heads=2,context=16,num_test=2"
    workload = load_workload(f"byte-gpt:{options}", seed=1, data_dir=str(tmp_path))
    given, targets = workload.test.batch([0])
    assert torch.equal(given[:, 1:], targets[:, :-1])
    assert "20 files, sha256 " in workload.data


def test_missing_sources_are_told(tmp_path: Path):
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(UsageError, match="holds 1 Python sources; expected 10 or more"):
        read_sources(tmp_path)


def test_the_model_has_about_a_million_parameters_and_looks_at_no_later_byte():
    assert sum(p.numel() for p in load_workload("byte-gpt", seed=1).model.parameters()) == 951_552
    torch.manual_seed(0)
    model = ByteGpt(width=16, num_layers=2, num_heads=2, context=8)
    first = torch.randint(256, (1, 8))
    other = first.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    changed = (model(first) - model(other)).abs().amax(2)[0] > 0
    assert changed.tolist() == [False] * 5 + [True] * 3
    with pytest.raises(UsageError, match="expected a multiple of num_heads"):
        load_workload("byte-gpt:width=10", seed=1)
