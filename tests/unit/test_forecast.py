"""Forecasts: what is written before cells run, and how they are held against it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import find_trace, save_link
from testbed.base.link import Link
from testbed.base.plan import encode_plan
from testbed.cluster.facts import VARIABLE, write_facts
from testbed.cluster.spec import parse_cluster
from testbed.cluster.topology import Topology, facts_of
from testbed.launch import planning
from testbed.launch.held_out import Known, forecast_cells, link_for, nominal_of
from testbed.prediction.codec import CodecCost, CodecSample, RoundCost, encode_codecs
from testbed.prediction.cross_iteration import predict
from testbed.prediction.nominal import SHAPED_HEADERS, parse_nominal
from testbed.records.cell import Cell
from testbed.records.forecast import (
    MANY,
    Forecast,
    ForecastCell,
    encode_forecast,
    load_forecast,
    sealed,
)
from testbed.records.report import ForecastRow
from testbed.records.store import cell_key
from testbed.reporting.aggregate import Collected, Found
from testbed.reporting.forecast import Compared, compare, describe, scores
from testbed.reporting.formats import to_markdown
from testbed.reporting.make import make_report
from testbed.scheduling.protocol import make_plan
from testbed.workloads.load import load_workload
from tests.harness.runs import answer

BEFORE, WRITTEN, AFTER = (f"2026-01-01T0{hour}:00:00.000+00:00" for hour in (1, 2, 3))


def foreseen(key: str, held_out_s: float | None, null_s: float | None = None) -> ForecastCell:
    return ForecastCell(
        key=key,
        name=f"cell {key}",
        backend="gloo",
        plan_class=MANY,
        plan_digest="p",
        held_out_s=held_out_s,
        null_s=null_s,
        why_not="" if held_out_s else "unknown",
    )


def ran(step_s: float, began: str | None = AFTER, plan: str = "p", **more: Any) -> Cell:
    return Cell(
        backend="gloo",
        workload="w",
        num_workers=2,
        step_time_s=step_s,
        plan_digest=plan,
        environment={**({} if began is None else {"began": began}), **more.pop("environment", {})},
        config=RunConfig(backend="gloo"),
        **more,
    )


def forecast_of(*cells: ForecastCell) -> Forecast:
    return sealed(Forecast(name="toy", written=WRITTEN, cells=cells))


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forecast.json"
    made = forecast_of(foreseen("a", 1.0))
    path.write_bytes(encode_forecast(made))
    assert load_forecast(path) == made
    better = msgspec.structs.replace(made, cells=(foreseen("a", 1.01),))
    path.write_bytes(encode_forecast(better))
    with pytest.raises(UsageError, match="it was changed after it was written"):
        load_forecast(path)
    path.write_bytes(encode_forecast(sealed(better)))
    assert load_forecast(path).digest != made.digest
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"expected 'testbed\.forecast/1'"):
        load_forecast(path)


def test_only_younger_cells_of_the_same_settings_count() -> None:
    made = forecast_of(foreseen("a", 1.0), foreseen("b", 1.0), foreseen("c", None))
    runs = [("a", ran(1.0)), ("a", ran(1.0, plan="q")), ("b", ran(1.0, BEFORE))]
    runs += [("b", ran(1.0, WRITTEN)), ("b", ran(1.0, None)), ("z", ran(1.0)), ("c", ran(1.0))]
    found = compare(made, runs)
    assert [(row.name, row.num_runs) for row in found.rows] == [("cell a", 2)]
    text = "\n".join(found.notes)
    assert f"forecast {made.digest} of toy, written {WRITTEN}" in text
    assert "2 runs began before it was written and are left out: cell b" in text
    assert "1 runs do not tell when they began" in text
    assert "1 runs are not in it (other settings" in text
    assert "not foreseen: cell c: unknown" in text
    assert "1 foreseen cells have not run after it" in text
    assert "1 cells ran another plan" in text
    assert "another plan" not in "\n".join(compare(made, runs[:1]).notes)


def test_a_plan_that_differs_by_rounding_alone_explains_nothing() -> None:
    made = forecast_of(foreseen("a", 1.0))
    rounded = ran(1.5, plan="q", predicted_step_time_s=1.0 + 1e-12)
    other = ran(1.5, plan="q", predicted_step_time_s=1.3)
    assert compare(made, [("a", rounded)]).rows[0].why == ""
    assert compare(made, [("a", other)]).rows[0].why == "another plan was carried out"
    also_missed, hit = ([("a", ran(step_s)), ("a", other)] for step_s in (1.5, 1.0))
    assert compare(made, also_missed).rows[0].why == ""
    assert compare(made, hit).rows[0].why == "another plan was carried out"
    unknown = msgspec.structs.replace(foreseen("a", 1.0), plan_digest="")
    assert compare(forecast_of(unknown), [("a", other)]).rows[0].why == ""


def test_what_lies_between_two_programs_is_no_spread_of_runs() -> None:
    made = forecast_of(foreseen("a", 1.0))
    days = {"one": (2.0, 2.02), "other": (1.0, 1.01)}
    runs = [
        ("a", ran(step_s, environment={"commit": commit, "platform": "Linux"}))
        for commit, steps in days.items()
        for step_s in steps
    ]
    (found,) = compare(made, runs).rows
    assert found.spread == pytest.approx(math.log(1.01) / math.sqrt(2))
    (alone,) = compare(made, [runs[0], runs[2]]).rows
    assert alone.spread is None
    collected = Collected(tuple(Found("here", "a", cell) for _, cell in runs), ())
    told = [note for note in make_report(collected).cautions if "different programs" in note]
    assert len(told) == 1
    assert "2 by commit one on Linux, 2 by commit other on Linux" in told[0]
    same = Collected(tuple(Found("here", "a", cell) for _, cell in runs[:2]), ())
    assert not any("different programs" in note for note in make_report(same).cautions)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (("a=1", "a=2", "a=1"), "(2 as a=1, 1 as a=2;"),
        (("a=1", ""), "(1 as a=1, 1 as not recorded;"),
        (("a=1", "a=1"), ""),
    ],
)
def test_a_report_tells_of_repeats_that_were_opened_otherwise(
    sizes: tuple[str, ...], told: str
) -> None:
    sent = {"a=1": 9.0, "a=2": 8.0, "": 8.0}
    made = [ran(1.0, opened_as=text, wire_bytes_per_step=sent[text]) for text in sizes]
    runs = tuple(Found("here", "a", each) for each in made)
    report = make_report(Collected(runs, ()))
    notes = [note for note in report.cautions if "with other options" in note]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)
    assert report.cells[0].opened_as == ("" if told else "a=1")
    alike = [Found("here", "a", ran(1.0, opened_as=text)) for text in sizes]  # as many bytes
    notes = make_report(Collected(tuple(alike), ())).cautions
    assert not any("with other options" in note for note in notes)


MADE = {"commit": "one", "platform": "Linux", "versions": {"torch": "2.9"}, "variables": {}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": {"torch": "2.10"}}, "1 by commit one on Linux with torch 2.10"),
        ({"variables": {"OMP_DYNAMIC": "true"}}, "1 by commit one on Linux with OMP_DYNAMIC true"),
        ({"cpu": "Y", "torch_threads": 2}, ""),  # the other record does not tell
        ({"variables": {"OMPI_MCA_num_procs": "2", "CUDA_VISIBLE_DEVICES": "1"}}, ""),
    ],
)
def test_a_report_tells_of_other_libraries_and_variables(change: dict[str, Any], told: str) -> None:
    cells = [ran(1.0, environment=MADE), ran(1.1, environment={**MADE, **change})]
    report = make_report(Collected(tuple(Found("here", "a", cell) for cell in cells), ()))
    notes = [note for note in report.cautions if "different programs" in note]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)
    (row,) = compare(forecast_of(foreseen("a", 1.0)), [("a", cell) for cell in cells]).rows
    assert row.num_runs == 2


def test_another_processor_is_told_and_no_spread_of_runs() -> None:
    cells = [ran(t, environment={**MADE, "cpu": cpu}) for t, cpu in ((1.0, "X"), (1.1, "Y"))]
    (row,) = compare(forecast_of(foreseen("a", 1.0)), [("a", cell) for cell in cells]).rows
    assert row.spread is None
    report = make_report(Collected(tuple(Found("here", "a", cell) for cell in cells), ()))
    told = "1 by commit one on Linux with cpu X, 1 by commit one on Linux with cpu Y"
    assert any(told in note for note in report.cautions)


def test_links_that_changed_between_forecast_and_cells_are_told() -> None:
    cells = (foreseen("a", 1.0),)
    made = sealed(
        Forecast(name="toy", written=WRITTEN, cells=cells, links={"g.json": "1", "m.json": "2"})
    )
    run = [("a", ran(1.0))]

    def told(**links: frozenset[str]) -> str:
        named = {f"{name}.json": digests for name, digests in links.items()}
        return "\n".join(compare(made, run, named).notes)

    assert "links of cells that the forecast is of: 1, the same by digest" in told(g=frozenset("1"))
    changed = told(g=frozenset("1"), m=frozenset("23"))
    assert "links that changed between the forecast and its cells: m.json" in changed
    assert "the same by digest" not in changed
    assert "cannot be told: their sweep keeps no digests" in told()
    assert "cannot be told: they name others" in told(other=frozenset("1"))
    assert "cannot be told" not in "\n".join(compare(forecast_of(*cells), run).notes)
    dirty = sealed(msgspec.structs.replace(made, commit="abc-dirty"))
    assert "written by abc-dirty" in "\n".join(compare(dirty, run).notes)


def row(
    plan_class: str, backend: str, errors: tuple[float, float | None], spread: float | None = None
) -> ForecastRow:
    held_out, null = errors
    return ForecastRow(
        name=f"{plan_class} {backend}",
        backend=backend,
        plan_class=plan_class,
        held_out_s=math.exp(held_out),
        null_s=None if null is None else math.exp(null),
        measured_s=1.0,
        num_runs=1 if spread is None else 5,
        spread=spread,
    )


def test_error_and_skill_over_null_by_class_and_backend() -> None:
    rows = [
        row("few messages", "gloo", (0.02, 0.02), 0.01),
        row(MANY, "gloo", (-0.05, -0.2), 0.01),
        row(MANY, "mpi-ring", (0.1, -0.4)),
        row(MANY, "mpi-ring", (0.0, -0.2)),
    ]
    found = {(s.plan_class, s.backend): s for s in scores(rows)}
    assert set(found) == {
        *(("", ""), ("few messages", ""), (MANY, ""), ("", "gloo"), ("", "mpi-ring")),
        *(("few messages", "gloo"), (MANY, "gloo"), (MANY, "mpi-ring")),
    }
    whole = found["", ""]
    assert whole.num_cells == 4
    assert whole.skill == pytest.approx(1 - 0.17 / 0.82)
    assert whole.median == pytest.approx((math.expm1(0.02) - math.expm1(-0.05)) / 2)
    assert whole.skill_low is None  # four cells have too few resamples
    (of_many, *_) = scores(3 * rows)
    assert of_many.skill_low is not None
    assert of_many.skill_high is not None
    assert of_many.skill_low < whole.skill < of_many.skill_high
    assert whole.spread == pytest.approx(0.01)
    assert found["few messages", "gloo"].skill == pytest.approx(0.0)
    assert found[MANY, "mpi-ring"].skill == pytest.approx(1 - 0.1 / 0.6)
    assert found[MANY, "mpi-ring"].spread is None
    assert found[MANY, "mpi-ring"].skill_low is None
    text = "\n".join(describe(rows, scores(rows)))
    assert text.count(": unexplained") == 1
    told = msgspec.structs.replace(rows[1], why="another plan was carried out")
    assert "spread 1.0 %: explained: another plan" in "\n".join(describe([told], []))
    assert "skill = 1 - sum |ln(held-out / measured)| / sum |ln(null / measured)|" in text
    assert "forecast of a message per tensor, mpi-ring (2): held-out 5.3 % in the median" in text
    assert "skill 0.83; one run each" in text
    assert "times the cell's own spread: a message per tensor gloo: -4.9 %, spread 1.0 %" in text
    assert "spread: few messages gloo" not in text


def test_without_nominal_numbers_there_is_no_skill() -> None:
    (score, *_) = scores([row(MANY, "gloo", (0.1, None))])
    assert (score.null_median, score.skill) == (None, None)
    assert "null" not in describe([], [])
    (_, line, *_) = describe([row(MANY, "gloo", (0.1, None))], [score])
    assert line.endswith("at the 90th percentile; one run each")


def test_runs_of_a_cell_are_put_together_in_the_report() -> None:
    made = forecast_of(foreseen("a", 1.1, 2.0))
    cells = [ran(1.0), ran(1.21)]
    compared = compare(made, [("a", cell) for cell in cells])
    (found,) = compared.rows
    assert found.measured_s == pytest.approx(1.1)
    assert found.spread == pytest.approx(math.log(1.21) / math.sqrt(2))
    collected = Collected(tuple(Found("here", "a", cell) for cell in cells), ())
    report = make_report(collected, compared)
    assert report.forecast_cells == [found]
    assert report.forecast[0].skill == pytest.approx(1.0)
    assert "unchanged since, and older than each of the 1 cells" in to_markdown(report)
    assert make_report(collected, Compared((), ())).forecast == []


CONFIG = RunConfig(
    workload="replay:resnet50-v100",
    backend="gloo",
    workers=4,
    cluster="nodes=4,rate=10gbit,dilation=10",
    predict=True,
)
LINK = Link(
    backend="gloo",
    num_workers=4,
    latency_s=1e-3,
    seconds_per_byte=1.3e-9,
    submit_s=1e-4,
    landing_s=1e-4,
)

THERE = {
    "links": [{"node": 1, "up_bps": 10e9, "down_bps": 10e9}],
    "dilation": 10.0,
    "latency": "none",
    "cpu_policy": "batch",
    "cores": "pinned",
    "cores_awake": "yes",
}


def test_a_cell_is_foreseen_as_a_run_of_it_would_predict() -> None:
    (found,) = forecast_cells([CONFIG], Known({"link.json": LINK}))
    trace = load_workload(CONFIG.workload, seed=1).recorded
    plan = make_plan("wfbp", trace, LINK)  # type: ignore[arg-type]
    expected_s = predict(plan, trace, LINK, launches=True).iteration_s  # type: ignore[arg-type]
    assert found.key == cell_key(CONFIG)
    assert (found.plan_class, found.plan_digest) == (MANY, plan.digest())
    assert found.held_out_s == pytest.approx(10 * expected_s)
    nominal = nominal_of(CONFIG.cluster)
    assert nominal is not None
    null = nominal.link("gloo", 4)
    null_s = 10 * predict(plan, trace, null, launches=True).iteration_s  # type: ignore[arg-type]
    assert found.null_s == pytest.approx(null_s)
    assert found.why_not == ""


def test_a_cell_that_carries_out_a_given_plan_is_foreseen_with_that(tmp_path: Path) -> None:
    trace = load_workload(CONFIG.workload, seed=1).recorded
    plan = make_plan("sequential", trace, LINK)  # type: ignore[arg-type]
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(plan))
    given = msgspec.structs.replace(CONFIG, plan=str(path))
    (found,) = forecast_cells([given], Known({"link.json": LINK}))
    assert found.plan_digest == plan.digest()


def test_what_cannot_be_known_before_says_why() -> None:
    def why(config: RunConfig, link: Link = LINK) -> str:
        return forecast_cells([config], Known({"l": link}))[0].why_not

    def changed(**values: object) -> RunConfig:
        return msgspec.structs.replace(CONFIG, **values)

    assert "no link of mpi-ring was given (there is gloo)" in why(changed(backend="mpi-ring"))
    assert "no cost of 'fp16' for 4 workers was given (there is none)" in why(
        changed(compressor="fp16")
    )
    assert "sends nothing" in why(changed(backend="none"))
    assert "digits-mlp computes is measured" in why(changed(workload="digits-mlp", cluster=None))
    assert "no nominal rate" in why(changed(cluster=None))
    given = parse_nominal("rate=1gbit,latency=1ms")
    assert forecast_cells([changed(cluster=None)], Known({"l": LINK}, given))[0].null_s is not None


def cast(workers: int = 4, seconds: float = 1e-3) -> CodecCost:
    samples = tuple(
        CodecSample(
            num_elements=n,
            compute_s=(seconds * n / 1e6, seconds * n / 1e6),
            rounds=(RoundCost(form="sum", num_bytes=2.0 * n),),
        )
        for n in (1, 1_000_000)
    )
    return CodecCost(compressor="fp16", num_workers=workers, samples=samples)


def test_a_compressed_cell_is_foreseen_from_what_its_codec_cost_elsewhere() -> None:
    config = msgspec.structs.replace(CONFIG, compressor="fp16", scheduler="sequential")
    (dense,) = forecast_cells(
        [msgspec.structs.replace(config, compressor="none")], Known({"l": LINK})
    )

    def foreseen_s(**known: object) -> float:
        (found,) = forecast_cells([config], Known({"l": LINK}, **known))  # type: ignore[arg-type]
        assert found.held_out_s is not None, found.why_not
        assert found.null_s is not None
        return found.held_out_s

    costs = {"": (cast(8), cast())}
    with_cores, crowded = (foreseen_s(codecs=costs, num_cores=n) for n in (8, 2))
    num_elements = sum(tensor.num_elements for tensor in find_trace("resnet50-v100").tensors)
    computed_s = 2 * 1e-3 * num_elements / 1e6  # real seconds: dilation stretches no codec
    saved_s = 10 * LINK.seconds_per_byte * 2 * num_elements  # half of the bytes
    assert with_cores == pytest.approx(dense.held_out_s + computed_s - saved_s)  # type: ignore[operator]
    assert crowded == pytest.approx(with_cores + computed_s)  # four ranks take turns on two cores
    own = {**costs, "gloo": (cast(seconds=0.0),)}  # a backend's own costs go before the others
    assert foreseen_s(codecs=own) == pytest.approx(with_cores - computed_s)


def test_the_command_tells_from_which_rate_on_a_compressor_pays(tmp_path: Path) -> None:
    link, codecs = tmp_path / "link.json", tmp_path / "codecs.json"
    save_link(msgspec.structs.replace(LINK, extra={"cluster": THERE}), link)
    codecs.write_bytes(encode_codecs([cast(seconds=4e-3)]))
    base = ("--workload", "replay:resnet50-v100", "--backend", "gloo", "--workers", "4")
    base += ("--scheduler", "sequential", "--codecs", str(codecs))
    base += ("--link", str(link), "--compressor", "none,fp16")
    rates = ("500mbit", "1000mbit", "2000mbit", "4000mbit")
    clusters = [a for rate in rates for a in ("--cluster", f"nodes=4,rate={rate}")]
    told = answer("forecast", *base, *clusters, "-o", str(tmp_path / "forecast.json"))
    assert told.status == 0, told.err
    (line,) = (text for text in told.out.splitlines() if "pays below" in text)
    # What pays at the rates that were asked for, by a gain of 1 % or more, lies below the place.
    made = load_forecast(tmp_path / "forecast.json").cells
    times = {("fp16" in c.name, c.name.partition("rate=")[2]): c.held_out_s for c in made}
    gains = {r: (times[False, r] or 0) / (times[True, r] or 1) - 1.01 for r in rates}
    place = float(line.partition("pays below ")[2].split()[0]) * 1e3 ** ("Gbit" in line)
    below = [r for r in rates if float(r.removesuffix("mbit")) < place]
    assert below
    assert len(below) < len(rates)
    assert [r for r in rates if gains[r] >= 0] == below


def test_the_costs_of_several_files_count_together(tmp_path: Path) -> None:
    one, two, same = (str(tmp_path / f"{name}.json") for name in ("one", "two", "same"))
    costs = [cast(seconds=1e-3), msgspec.structs.replace(cast(seconds=1e-3), compressor="bf16")]
    for path, cost in ((one, costs[0]), (two, costs[1]), (same, costs[0])):
        Path(path).write_bytes(encode_codecs([cost]))
    save_link(LINK, tmp_path / "link.json")
    base = ("--workload", "replay:resnet50-v100", "--backend", "gloo", "--workers", "4")
    base += ("--compressor", "fp16,bf16", "--link", str(tmp_path / "link.json"), "--codecs", one)
    told = answer("forecast", *base, "--codecs", two, "-o", str(tmp_path / "forecast.json"))
    assert told.status == 0, told.err
    assert "no cost of" not in told.out
    told = answer("forecast", *base, "--codecs", same, "-o", str(tmp_path / "again.json"))
    assert told.status == 2
    assert "tells what 'fp16' costs 4 workers, and so does a file before it" in told.err


@pytest.mark.parametrize(("latency", "latency_s"), [("", 0.0), (",latency=1ms", 14e-3)])
def test_a_link_is_carried_to_the_rate_and_the_workers_of_the_cell(
    latency: str, latency_s: float
) -> None:
    link = msgspec.structs.replace(LINK, extra={"cluster": THERE})
    config = msgspec.structs.replace(
        CONFIG, cluster=f"nodes=8,rate=5gbit,dilation=20{latency}", workers=8, scheduler="mg-wfbp"
    )
    found = link_for(config, {"other": LINK, "link": link, "last": link} | {"other": link}, 2)
    assert found.num_workers == 8
    assert found.latency_s == pytest.approx(1e-3 * (14 / 6) / 2 + latency_s)
    wire = 1.5 * SHAPED_HEADERS * 8 / 10e9  # what is more than that is the hosts'
    expected = (wire * 2 + (1.3e-9 - wire) / 2) * (1.75 / 1.5)
    assert found.seconds_per_byte == pytest.approx(expected)
    assert found.submit_s == pytest.approx(1e-4 / 2)
    (cell,) = forecast_cells([config], Known({"link": link}))
    assert cell.plan_class == "few messages"


@pytest.mark.parametrize(("there", "cores"), [("pinned", ""), ("shared", ""), ("shared", "shared")])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_a_run_has_the_link_of_its_forecast(
    nodes: int, there: str, cores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nodes share all cores because these cannot be dealt out evenly among so many."""
    crowded = {**THERE, "node_cores": [[0], [1], [0], [1]]}
    crowded |= {"cores": "shared", "node_cores": None} if there == "shared" else {}
    file = tmp_path / "link.json"
    save_link(msgspec.structs.replace(LINK, extra={"cluster": crowded}), file)
    spec = parse_cluster(f"nodes={nodes},rate=10gbit,dilation=40{cores and ',cores=' + cores}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    facts = facts_of(Topology("t", spec, cores=(0, 1)), tmp_path / "hosts", {}, "yes")
    write_facts(tmp_path / "facts.json", facts)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "facts.json"))
    config = msgspec.structs.replace(CONFIG, cluster=spec.text(), workers=nodes, link=str(file))
    assert planning.link_given(str(file), "gloo", nodes) == link_for(config, {}, 2)


def test_hosts_take_longer_where_more_nodes_share_a_core() -> None:
    crowded = {**THERE, "node_cores": [[0], [1], [0], [1]]}  # two nodes to a core
    link = msgspec.structs.replace(LINK, extra={"cluster": crowded})
    config = msgspec.structs.replace(CONFIG, cluster="nodes=4,rate=10gbit,dilation=10")
    wire = 1.5 * SHAPED_HEADERS * 8 / 10e9
    steps_s = []
    for num_cores, crowd in ((1, 4), (2, 2), (4, 1), (8, 1)):
        found = link_for(config, {"link": link}, num_cores)
        expected = wire + (LINK.seconds_per_byte - wire) * crowd / 2
        assert found.seconds_per_byte == pytest.approx(expected)
        (cell,) = forecast_cells([config], Known({"link": link}, num_cores=num_cores))
        steps_s.append(cell.held_out_s or 0.0)
    assert steps_s[0] > steps_s[1] > steps_s[2] == steps_s[3]
