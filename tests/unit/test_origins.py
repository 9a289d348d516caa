"""Methods are marked: a published rule, a reconstruction of what a paper leaves out, or ours."""

from __future__ import annotations

import importlib
import inspect

import pytest

from testbed.base.axes import COMPRESSORS, MEMORY, SCHEDULERS
from testbed.base.parts import OURS, PUBLISHED, RECONSTRUCTION, Axis
from tests.harness.runs import answer

MARKED = [
    (axis, name)
    for axis in (SCHEDULERS, COMPRESSORS, MEMORY)
    for name in axis.builtin
    if name != "none"
]


@pytest.mark.parametrize(("axis", "name"), MARKED, ids=lambda each: getattr(each, "what", each))
def test_every_method_says_where_it_comes_from(axis: Axis, name: str):
    part = axis.load(name)
    assert part.origin in (PUBLISHED, RECONSTRUCTION, OURS)
    if part.origin == RECONSTRUCTION:
        module = importlib.import_module(axis.builtin[name].partition(":")[0])
        assert "a reconstruction" in " ".join(inspect.getsource(module).split())


def test_the_list_marks_methods():
    said = answer("list", "schedulers").out
    assert "[reconstruction]" in next(line for line in said.splitlines() if " pace " in line)
    assert "[published rule]" in next(line for line in said.splitlines() if " mg-wfbp " in line)
    assert "[ours]" in next(line for line in said.splitlines() if " optimal " in line)


def test_a_chain_has_the_marks_of_its_links():
    assert COMPRESSORS.resolve("by-size+topk").origins == "ours, published rule"
    assert COMPRESSORS.resolve("by-size+topk").tuning == "untuned"
    assert COMPRESSORS.resolve("by-size+topk:ratio=0.5").tuning == "set by hand"
