"""Options and placement of the parameter server: every byte once, balanced by bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.backends.zmq_ps import ZMQ_PS, ZmqPsOptions, busiest_link_bytes
from testbed.backends.zmq_ps.placement import MIN_SHARD_BYTES, place
from testbed.base.errors import UsageError
from testbed.base.spec import parse_options, parse_spec

TENSOR = st.tuples(st.integers(0, 3_000_000), st.sampled_from([1, 2, 4, 8]))
NUM_SERVERS = st.integers(1, 9)
SLICE_BYTES = st.integers(1, 1024).map(lambda kib: kib * 1024)


def loads(slices, element_size, num_servers):
    total = [0] * num_servers
    for piece in slices:
        total[piece.server] += piece.num_elements * element_size
    return total


@given(st.text(max_size=20), TENSOR, NUM_SERVERS, SLICE_BYTES)
def test_every_element_once_in_slices_that_fit(key, tensor, num_servers, slice_bytes):
    num_elements, element_size = tensor
    slices = place(key, num_elements, element_size, num_servers, slice_bytes)
    end = 0
    for piece in sorted(slices, key=lambda s: s.offset):
        assert piece.offset == end
        assert piece.num_elements * element_size <= slice_bytes
        assert 0 <= piece.server < num_servers
        end += piece.num_elements
    assert end == num_elements
    assert len(slices) == 1 or all(piece.num_elements for piece in slices)


@given(st.text(max_size=20), TENSOR, NUM_SERVERS, SLICE_BYTES)
def test_no_server_has_more_than_its_share_and_one_slice(key, tensor, num_servers, slice_bytes):
    num_elements, element_size = tensor
    slices = place(key, num_elements, element_size, num_servers, slice_bytes)
    num_bytes = num_elements * element_size
    most = max(loads(slices, element_size, num_servers))
    assert most <= num_bytes / num_servers + slice_bytes
    if num_bytes >= num_servers * MIN_SHARD_BYTES:
        assert most < num_bytes / num_servers + element_size


@given(st.integers(1, 6), SLICE_BYTES)
def test_one_tensor_larger_than_all_others_together_does_not_tip_the_scales(servers, slice_bytes):
    tensors = {"small.1": 50_000, "embedding": 5_000_000, "small.2": 70_001}
    total = [0] * servers
    for key, num_elements in tensors.items():
        for server, load in enumerate(
            loads(place(key, num_elements, 4, servers, slice_bytes), 4, servers)
        ):
            total[server] += load
    assert max(total) < 4 * sum(tensors.values()) / servers + 4 * len(tensors)


def test_small_tensors_stay_whole_and_spread_over_the_servers():
    slices = [place(f"bias.{i}", 100, 4, 4, 1 << 20) for i in range(200)]
    assert all(len(pieces) == 1 for pieces in slices)
    assert {pieces[0].server for pieces in slices} == {0, 1, 2, 3}


def test_consecutive_slices_go_to_different_servers():
    slices = place("w", 1 << 20, 4, 4, 64 * 1024)
    assert all(a.server != b.server for a, b in pairwise(slices))


@pytest.mark.parametrize(
    ("servers", "num_workers", "expected"),
    [
        ("colocated", 1, 0),
        ("colocated", 4, 1.5),
        ("colocated:1", 4, 3),
        ("colocated:2", 4, 2),
        ("dedicated:1", 4, 4),
        ("dedicated:2", 4, 2),
        ("dedicated:8", 4, 1),
    ],
)
def test_busiest_link(servers, num_workers, expected):
    options = ZmqPsOptions(servers=servers)
    assert busiest_link_bytes(100.0, num_workers, options) == pytest.approx(100 * expected)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_default_bus_factor_is_that_of_a_ring(num_workers):
    assert ZMQ_PS.facts(ZmqPsOptions()).bus_factor(num_workers) == pytest.approx(
        2 * (num_workers - 1) / num_workers
    )


def test_options_are_read_from_a_specification():
    spec = parse_spec("zmq-ps:servers=dedicated:3,consistency=ssp:4,slice-kib=64")
    options = parse_options(spec.name, spec.options, ZmqPsOptions)
    assert options == ZmqPsOptions("dedicated:3", "ssp:4", None, 64)
    assert options.update_on_server
    assert (options.staleness, options.num_servers(5), options.slice_bytes) == (4, 3, 65536)
    assert ZMQ_PS.facts(options).num_servers == 3
    assert ZMQ_PS.facts(options).consistency == "ssp:4"


def test_defaults_are_one_server_per_worker_in_step():
    options = ZmqPsOptions()
    assert (options.num_servers(4), options.num_dedicated, options.staleness) == (4, 0, 0)
    assert not options.update_on_server
    assert ZmqPsOptions(consistency="async").staleness is None
    assert ZmqPsOptions(update="server").update_on_server


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"servers": "dedicated"}, "expected colocated"),
        ({"servers": "colocated:0"}, "expected colocated"),
        ({"servers": "remote:2"}, "expected colocated"),
        ({"consistency": "ssp"}, "expected bsp"),
        ({"consistency": "ssp:-1"}, "expected bsp"),
        ({"consistency": "async", "update": "worker"}, "use update=server"),
        ({"consistency": "ssp:2", "update": "worker"}, "use update=server"),
        ({"update": "client"}, "expected worker or server"),
        ({"slice_kib": 0}, "expected 1 to"),
    ],
)
def test_bad_options_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        ZmqPsOptions(**values)


def test_more_colocated_servers_than_workers_are_refused():
    with pytest.raises(UsageError, match="ask for fewer"):
        ZmqPsOptions(servers="colocated:3").num_servers(2)
