"""What compressed messages are predicted to take: by hand, and against the dense simulator."""

import json

import msgspec
import pytest

from testbed.base.axes import BACKENDS
from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.link import Link, Piece
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.algorithms import Ring, Server, round_phases_s
from testbed.prediction.break_even import highest_break_even
from testbed.prediction.codec import (
    CodecCost,
    CodecSample,
    RoundCost,
    encode_codecs,
    load_codecs,
    sped_up,
)
from testbed.prediction.compressed import compressed_timeline, message_cost
from testbed.prediction.cross_iteration import predict
from testbed.profiling.codec import measure_codec
from testbed.scheduling.break_even import Predictions
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.under_compressor import CompressedExchange, plan_under

LINK = Link(backend="mpi-ring", num_workers=4, latency_s=6e-3, seconds_per_byte=1.5e-9)


def cost_of(*rounds, compute_s=(0.0, 0.0), compressor="x", ratio=None, num_workers=4):
    sample = CodecSample(num_elements=1000, compute_s=compute_s, rounds=rounds)
    return CodecCost(
        compressor=compressor,
        num_workers=num_workers,
        ratio=ratio,
        samples=(sample, double(sample)),
    )


def double(sample):
    return CodecSample(
        num_elements=2 * sample.num_elements,
        compute_s=tuple(2 * s for s in sample.compute_s),
        rounds=tuple(r.scaled(2, 2) for r in sample.rounds),
    )


def dense():
    return cost_of(RoundCost(form="sum", num_bytes=4000.0), compressor="none")


# alpha = 1 ms, beta = 1 ns of a ring of four; of a server beside each: 3 ms and 1 ns (1.5 / 1.5).
@pytest.mark.parametrize(
    ("form", "algorithm", "merged", "startup_s", "transfer_s"),
    [
        ("sum", Ring(), 0, 6e-3, 1.5e-3),
        ("gather", Ring(), 0, 6e-3, 3e-3),
        ("gather", Ring(), 5e5, 6e-3, 3e-3),  # nobody merges on a ring
        ("gather", Ring(at_once_bytes=1_000_000), 0, 3e-3, 3e-3),
        ("gather", Ring(at_once_bytes=999_999), 0, 6e-3, 3e-3),
        ("deliver", Ring(), 0, 6e-3, 1e-3),
        ("gather", Server(), 1e6, 6e-3, 6e-3),
        ("gather", Server(servers=4, placement="dedicated"), 1e6, 6e-3, 1.5 * 8e-3),
        ("gather", Server(), 0, 6e-3, 3e-3),
        ("deliver", Server(), 0, 6e-3, 1.5e-3),
    ],
)
def test_rounds_by_form(form, algorithm, merged, startup_s, transfer_s):
    each = RoundCost(form=form, num_bytes=1e6, merged_bytes=merged)
    assert round_phases_s(each, LINK, algorithm) == pytest.approx((startup_s, transfer_s))


def test_the_piece_of_a_link_is_that_of_the_wire_bytes():
    pieces = (
        Piece(max_bytes=1e5, latency_s=1e-3, seconds_per_byte=2e-9),
        Piece(latency_s=6e-3, seconds_per_byte=1.5e-9),
    )
    link = msgspec.structs.replace(LINK, pieces=pieces)
    small, large = (RoundCost(form="gather", num_bytes=b) for b in (4e4, 6e4))
    assert round_phases_s(small, link, Ring()) == pytest.approx((1e-3, 8e4 * 2e-9))
    assert round_phases_s(large, link, Ring()) == pytest.approx((6e-3, 1.2e5 * 1.5e-9))


def test_one_worker_sends_nothing():
    alone = msgspec.structs.replace(LINK, num_workers=1)
    cost = message_cost(dense(), 1000, alone, Ring())
    assert (cost.communication_s, cost.wire_bytes) == (0.0, 0.0)


def test_a_cost_of_other_workers_is_refused():
    with pytest.raises(UsageError, match="measured for 2 workers, the link has 4"):
        message_cost(cost_of(num_workers=2), 1000, LINK, Ring())


def test_stages_work_between_rounds_and_merging_add_up():
    rounds = (
        RoundCost(form="sum", num_bytes=100.0),
        RoundCost(form="gather", num_bytes=50.0, merged_bytes=70.0, merge_s=5e-3),
    )
    codec = cost_of(*rounds, compute_s=(1e-3, 2e-3, 3e-3))
    cost = message_cost(codec, 1000, LINK, Server())
    travels_s = sum(sum(round_phases_s(r, LINK, Server())) for r in rounds)
    assert cost.encode_s == 1e-3
    assert cost.decode_s == 3e-3
    assert cost.communication_s == pytest.approx(travels_s + 5e-3 + 2e-3)
    assert cost.sent_bytes == 150
    faster = message_cost(sped_up(codec, 10), 1000, LINK, Server())
    assert faster.communication_s == pytest.approx(travels_s + 7e-4)


@pytest.mark.parametrize(
    "spec", ["sequential", "wfbp", "mg-wfbp", "bucket", "p3", "pace", "bytescheduler:credit_kib=1"]
)
def test_free_dense_codec_equals_the_dense_simulator(spec):
    """A codec that costs nothing and sums everything is the dense exchange itself."""
    trace = find_trace("resnet50-v100")
    plan = make_plan(spec, trace, LINK)
    found = compressed_timeline(plan, trace, LINK, Ring(), dense())
    expected = predict(plan, trace, LINK)
    # A credit below one message lets one travel at a time, which is the rule modelled here.
    assert found.iteration_s == pytest.approx(expected.iteration_s, rel=1e-9)
    assert found.sent_bytes == pytest.approx(trace.num_bytes)


def tiny_trace():
    tensors = tuple(
        TraceTensor(name=n, num_elements=1000, forward_s=1.0, backward_s=2.0) for n in "abc"
    )
    return Trace(name="tiny", device="cpu", batch_size=1, tensors=tensors)


def test_three_stages_overlap_by_hand():
    """Ready at 2, 4, 6; encode 3, communicate 1, decode 4: encoded 5, 8, 11; sent 6, 9, 12."""
    link = Link(backend="gloo", num_workers=2, latency_s=1.0, seconds_per_byte=0.0)
    codec = cost_of(RoundCost(form="gather", num_bytes=10.0), compute_s=(3.0, 4.0), num_workers=2)
    trace = tiny_trace()
    found = compressed_timeline(make_plan("wfbp", trace, link), trace, link, Ring(), codec)
    assert found.ends_s == (10.0, 14.0, 18.0)
    assert found.iteration_s == 3.0 + 18.0
    assert found.exposed_s == 12.0
    assert found.communication_s == 3.0


def test_one_core_encodes_and_decodes_by_turns_by_hand():
    """As above; encoded 5, 8, sent 6, 9; decoded 12; encoded 15, sent 16; decoded 19, 23."""
    link = Link(backend="gloo", num_workers=2, latency_s=1.0, seconds_per_byte=0.0)
    codec = cost_of(RoundCost(form="gather", num_bytes=10.0), compute_s=(3.0, 4.0), num_workers=2)
    plan = make_plan("wfbp", tiny_trace(), link)
    found = compressed_timeline(plan, tiny_trace(), link, Ring(), codec, one_core=True)
    assert found.ends_s == (12.0, 19.0, 23.0)


def test_on_several_channels_start_ups_overlap_and_bytes_do_not():
    """Encoded 3, 5, 7; start-ups 2, transfers 3 of one wire: there 8, 11, 14; decoded 9, 12, 15."""
    link = Link(backend="gloo", num_workers=2, latency_s=2.0, seconds_per_byte=0.1)
    codec = cost_of(RoundCost(form="gather", num_bytes=30.0), compute_s=(1.0, 1.0), num_workers=2)
    trace = tiny_trace()
    plan = make_plan("wfbp", trace, link)
    messages = tuple(
        msgspec.structs.replace(message, channel=number)
        for number, message in enumerate(plan.messages)
    )
    plan = msgspec.structs.replace(plan, messages=messages, num_channels=3)
    found = compressed_timeline(plan, trace, link, Ring(), codec)
    assert found.ends_s == pytest.approx((9.0, 12.0, 15.0))
    # Under way 3 .. 8, 5 .. 11 and 7 .. 14, one after another it would be 5 + 6 + 7.
    assert found.communication_s == pytest.approx(11.0)


def test_a_message_s_own_ratio_scales_bytes_not_seconds():
    codec = cost_of(RoundCost(form="gather", num_bytes=80.0), compute_s=(3.0, 4.0), ratio=0.01)
    plain = message_cost(codec, 1000, LINK, Ring())
    more = message_cost(codec, 1000, LINK, Ring(), ratio=0.05)
    all_of_it = message_cost(codec, 1000, LINK, Ring(), ratio=1.0)
    assert (plain.sent_bytes, more.sent_bytes, all_of_it.sent_bytes) == (80, 400, 4000)
    assert more.encode_s == plain.encode_s
    with pytest.raises(UsageError, match="has none; take one"):
        message_cost(cost_of(), 1000, LINK, Ring(), ratio=0.5)


def test_break_even_of_halved_messages_lies_where_both_take_the_same():
    """Communication rules: dense takes M b, halved M b / 2 + c, so they meet at M b = 2 c."""
    link = Link(backend="gloo", num_workers=2, latency_s=0.0, seconds_per_byte=1e-3)
    codec = cost_of(RoundCost(form="sum", num_bytes=2000.0), compute_s=(0.0, 20.0), num_workers=2)
    tensor = TraceTensor(name="w", num_elements=1000, forward_s=0.0, backward_s=1e-9)
    trace = Trace(name="one", device="cpu", batch_size=1, tensors=(tensor,))
    predictions = Predictions(trace, link, Ring(), ("wfbp",))
    found = predictions.compressor_gain(codec)
    # M b = 4 s; 4 / f = 40 at f = 0.1, and 1 % worth needs a little less bandwidth.
    assert found.below_factor == pytest.approx(0.1, rel=0.06)
    assert found.gain < 0
    assert predictions.best_compressed(codec, found.below_factor)[
        0
    ] * 1.01 <= predictions.best_dense(found.below_factor)[0] * (1 + 1e-12)


def test_predictions_plan_and_spread_as_a_run_does():
    """Start-ups of short messages overlap on channels, and each scheduler has two plans."""
    link = Link(backend="mpi-ring", num_workers=2, latency_s=5e-3, seconds_per_byte=1e-9)
    codec = cost_of(RoundCost(form="gather", num_bytes=10.0), compute_s=(0.0, 0.0), num_workers=2)
    trace = find_trace("resnet50-v100")
    alone, by_turns = (
        Predictions(trace, link, Ring(), ("wfbp", "mg-wfbp"), channels) for channels in (1, 8)
    )
    for spec in ("wfbp", "mg-wfbp"):
        how = CompressedExchange(codec, Ring(), max_channels=8)
        found = plan_under(lambda seen, s=spec: make_plan(s, trace, seen), trace, link, how)[1]
        assert by_turns.compressed(spec, codec) == found
        assert found.iteration_s <= alone.compressed(spec, codec).iteration_s
    one_s, more_s = (o.compressed("wfbp", codec).iteration_s for o in (alone, by_turns))
    assert more_s < 0.9 * one_s


@pytest.mark.parametrize(
    ("backend", "count"),
    [("zmq-ps", 8), ("zmq-ps:servers=dedicated:1", 8), ("gloo", 1)],
)
def test_channels_are_those_of_the_link_s_backend(backend, count):
    assert BACKENDS.resolve(backend).facts.max_channels == count


def test_never_and_always():
    assert highest_break_even(lambda factor: 0.0) == 0.0
    assert highest_break_even(lambda factor: 1.0) == float("inf")


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("spec", ["ef+topk:ratio=0.01", "powersgd", "gtopk:ratio=0.05", "none"])
def test_measured_bytes_are_those_of_the_compressor(spec, merges, tmp_path):
    from testbed.compression.protocol import Context
    from tests.harness.compressors import resolve_compressor

    codec = measure_codec(spec, 3, sizes=(20_000, 2_000), merges=merges, repeats=2)
    compressor = resolve_compressor(spec)
    assert [s.num_elements for s in codec.samples] == [2_000, 20_000]
    for sample in codec.samples:
        assert len(sample.compute_s) == len(sample.rounds) + 1
        assert min(sample.compute_s) > 0
        handed = sum(r.num_bytes for r in sample.rounds)
        bounds = [
            compressor.payload_bytes(int(sample.num_elements), 4, Context(r, 3)) for r in range(3)
        ]
        assert min(b.least for b in bounds) <= handed <= max(b.most for b in bounds)
        merged = [r.merged_bytes for r in sample.rounds]
        assert any(merged) == (merges and "topk:ratio=0.01" in spec)
    assert codec.ratio == {"ef+topk:ratio=0.01": 0.01, "gtopk:ratio=0.05": 0.05}.get(spec)
    path = tmp_path / "codecs.json"
    path.write_bytes(encode_codecs([codec]))
    assert load_codecs(path) == (codec,)


def test_files_that_are_no_costs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_codecs(tmp_path / "none.json")
    (tmp_path / "link.json").write_text(json.dumps({"schema": "testbed.link/1", "costs": []}))
    with pytest.raises(UsageError, match=r"expected a testbed.codecs/1"):
        load_codecs(tmp_path / "link.json")
    with pytest.raises(UsageError, match="expected above 0 and finite"):
        sped_up(dense(), 0)
