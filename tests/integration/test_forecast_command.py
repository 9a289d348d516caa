"""A forecast, the sweep that it is of, and the report that holds one against the other."""

from __future__ import annotations

import json
from pathlib import Path

from testbed.base.files import save_link, save_trace
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.records.forecast import load_forecast
from testbed.records.store import Store
from tests.harness.runs import answer, testbed

RECIPE = """
name = "toy"
repeats = 2
[base]
workload = "replay:{trace}"
link = "{link}"
backend = "gloo"
steps = 8
warmup = 2
verify_steps = 0
threads = 1
predict = true
[axes]
scheduler = ["sequential", "wfbp"]
"""


def test_a_forecast_is_held_against_the_cells_that_ran_after_it(tmp_path: Path) -> None:
    tensors = tuple(
        TraceTensor(name=f"l{i}.weight", num_elements=20_000, forward_s=1e-3, backward_s=2e-3)
        for i in range(6)
    )
    trace, link, recipe = (tmp_path / name for name in ("toy.json", "link.json", "toy.toml"))
    save_trace(Trace(name="toy", device="V100", batch_size=8, tensors=tensors), trace)
    save_link(Link(backend="gloo", num_workers=2, latency_s=3e-4, seconds_per_byte=1e-9), link)
    recipe.write_text(RECIPE.format(trace=trace, link=link))
    forecast, folder = tmp_path / "forecast.json", tmp_path / "cells"
    written = ("forecast", str(recipe), "--null", "rate=10gbit,latency=50us", "-o", str(forecast))

    told = answer(*written)
    assert told.status == 0, told.err
    made = load_forecast(forecast)
    assert made.digest in told.out
    assert [cell.plan_class for cell in made.cells] == ["few messages", "a message per tensor"]
    assert answer(*written).status == 2  # never written over

    done = testbed("sweep", str(recipe), "--output", str(folder))
    assert done.status == 0, done.err
    cells = Store(folder).read_cells().values()
    foreseen = {cell.plan_digest: cell.held_out_s for cell in made.cells}
    # What a run says of itself on the same link is what was foreseen of it, to the last digit.
    assert {(c.plan_digest, c.predicted_step_time_s) for c in cells} == set(foreseen.items())
    assert {cell.prediction for cell in cells} == {"held-out"}

    report = ("report", str(folder), "--forecast", str(forecast), "--format")
    shown = answer(*report, "md")
    assert shown.status == 0, shown.err
    assert f"forecast {made.digest} of toy" in shown.out
    assert "older than each of the 2 cells that it is held against" in shown.out
    assert "forecast of a message per tensor, gloo (1): held-out" in shown.out
    assert "another plan" not in shown.out
    both = json.loads(answer(*report, "json").out)["forecast_cells"]
    assert [row["num_runs"] for row in both] == [2, 2]
    assert all(row["spread"] is not None and row["null_s"] > 0 for row in both)

    other = ("forecast", "--backend", "ddp", "--workload", f"replay:{trace}", "--workers", "2")
    ddp = answer(*other, "--link", f"ddp={link}", "-o", str(tmp_path / "ddp.json"))
    assert "few messages" in ddp.out
    none = answer(*other, "--link", str(link), "-o", str(tmp_path / "none.json"))
    assert "no link of ddp was given (there is gloo)" in none.out

    late = tmp_path / "late.json"
    assert answer(*written[:-1], str(late)).status == 0
    after = answer("report", str(folder), "--forecast", str(late), "--format", "md")
    assert "4 runs began before it was written and are left out" in after.out
    forecast.write_bytes(forecast.read_bytes().replace(made.written.encode(), b"2020-01-01"))
    refused = answer(*report, "md")
    assert refused.status == 2
    assert "it was changed after it was written" in refused.err
