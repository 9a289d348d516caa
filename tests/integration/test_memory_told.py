"""A run that does not fit its budget is refused with one that does."""

import re

import pytest

from tests.harness.runs import testbed

MODEL = ("--workload", "digits-mlp:hidden=512", "--backend", "loopback", "--workers", "4")
SHORT = ("--steps", "3", "--warmup", "2", "--verify-steps", "0")


@pytest.mark.parametrize("compressor", ["topk:ratio=0.1", "ef:units=update+topk:ratio=0.1"])
def test_the_budget_that_a_refusal_tells_is_taken(compressor: str) -> None:
    for memory in ("none", "laysa"):
        run = ("run", *MODEL, *SHORT, "--compressor", compressor, "--memory")
        refused = testbed(*run, memory, "--budget-mb", "13")
        assert refused.status == 2, refused.err
        (told,) = re.findall(r"(?:would do|a step takes) is (\d+) MiB", refused.err)
        way = "laysa" if "with --memory laysa" in refused.err else memory
        assert testbed(*run, way, "--budget-mb", told).status == 0
