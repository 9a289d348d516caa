"""The traces that come with the package, and that they are what the models and totals make."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import (
    encode_trace,
    find_trace,
    load_shipped_trace,
    save_trace,
    shipped_traces,
)
from testbed.prediction.cross_iteration import forward_order
from testbed.profiling.shipped import DERIVED, derive_shipped
from tests.harness.synthetic import synthetic_trace
from tests.harness.traces import TRACE_A

TRACES = Path(__file__).parent.parent.parent / "models" / "traces"

# Tensors, parameters, forward and backward time as published.
PUBLISHED = {
    "resnet50-v100": (161, 25_557_032, 0.0633, 0.0648),
    "resnet101-v100": (314, 44_549_160, 0.0856, 0.1064),
    "vgg16bn-v100": (58, 138_365_992, 0.0829, 0.1116),
    "resnet152-2080ti": (467, 60_192_808, 0.091, 0.182),
    "densenet201-2080ti": (604, 20_013_928, 0.073, 0.146),
    "inception-v4-2080ti": (449, 42_679_816, 0.0632, 0.1263),
    "bert-base-2080ti": (206, 110_111_042, 0.1018, 0.2037),
    "googlenet-k80": (128, 13_378_280, 128 / 163.4 / 3, 256 / 163.4 / 3),
    "resnet50-k80": (161, 25_557_032, 64 / 76.85 / 3, 128 / 76.85 / 3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_totals_are_the_published_ones(name):
    num_tensors, num_parameters, forward_s, backward_s = PUBLISHED[name]
    trace = load_shipped_trace(name)
    assert len(trace.tensors) == num_tensors
    assert sum(t.num_elements for t in trace.tensors) == num_parameters
    assert trace.forward_s == pytest.approx(forward_s, abs=1e-12)
    assert trace.backward_s == pytest.approx(backward_s, abs=1e-12)


@pytest.mark.parametrize("name", shipped_traces())
def test_derived_traces_say_so_and_have_a_dag_in_forward_order(name):
    trace = load_shipped_trace(name)
    assert trace.extra["origin"] in ("derived", "measured")
    assert (name in DERIVED) == (trace.extra["origin"] == "derived")
    if name in DERIVED:
        assert "(derived)" in trace.device
        assert trace.extra["source"]
    assert trace.consumers is not None
    assert forward_order(trace) == list(range(len(trace.tensors)))


@pytest.mark.parametrize("name", DERIVED)
def test_a_shipped_trace_is_built_again_bit_for_bit(name):
    if name.startswith("bert") and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert encode_trace(derive_shipped(name)) == (TRACES / f"{name}.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "model"), [("resnet50-v100", "resnet50"), ("resnet152-2080ti", "resnet152")]
)
def test_shares_are_those_of_operations_counted_by_hand(name, model):
    trace = load_shipped_trace(name)
    by_hand = synthetic_trace(model, trace.backward_s)
    off = []
    for ours, theirs in zip(trace.tensors, by_hand.tensors, strict=True):
        assert ours.num_elements == theirs.num_elements
        if ours.backward_s != pytest.approx(theirs.backward_s, rel=2e-3):
            off.append(ours.backward_s / theirs.backward_s)
    # The count by hand takes three normalisations, those before a convolution that halves the
    # image, at half the height and width that they work at.
    assert off == [pytest.approx(4, rel=2e-3)] * 3


def test_a_name_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_trace("resnet50-v100").name == "resnet50-v100"
    assert find_trace(Path("resnet50-v100")).name == "resnet50-v100"
    save_trace(TRACE_A, "resnet50-v100")
    assert find_trace("resnet50-v100").name == "resnet50-v100"
    assert find_trace("./resnet50-v100") == TRACE_A
    assert find_trace(Path("resnet50-v100")) == TRACE_A


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UsageError, match=r"'resnet50': no such file.*resnet50-v100"):
        find_trace("resnet50")
    with pytest.raises(UnknownName, match="did you mean 'resnet50-v100'"):
        load_shipped_trace("resnet50-v10")
    with pytest.raises(UnknownName, match="no derived trace 'x'"):
        derive_shipped("x")
