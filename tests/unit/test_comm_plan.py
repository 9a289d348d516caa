"""Sizes, turns, configurations and bandwidths of the micro-benchmark."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.backends.zmq_ps.placement import place
from testbed.base.axes import BACKENDS
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.spec import split_specs
from testbed.commands.comm import make_config
from testbed.microbench.bandwidth import algbw_bytes_per_s, bus_factor, busbw_bytes_per_s
from testbed.microbench.config import Size, sizes, to_arguments, turns
from testbed.microbench.contestants import bus_factor_of, resolve, together
from testbed.records.comm import CommConfig

OPERATIONS = ("sum", "fold-spread", "gather", "broadcast")


@given(
    low=st.integers(64, 1 << 20),
    times=st.integers(1, 1000),
    factor=st.integers(2, 9),
    workers=st.integers(1, 8),
    dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
    op=st.sampled_from(OPERATIONS),
)
def test_sizes_are_whole_and_within_bounds(low, times, factor, workers, dtype, op):
    config = CommConfig(
        backend=("gloo",),
        min_bytes=low,
        max_bytes=low * times,
        factor=factor,
        workers=workers,
        dtype=dtype,
        op=op,
    )
    found = sizes(config)
    unit = ELEMENT_BYTES[dtype] * (workers if op == "gather" else 1)
    assert found[0].num_bytes == low // unit * unit
    assert all(s.num_bytes == s.count * unit <= config.max_bytes for s in found)
    assert found[-1].num_bytes + unit > config.max_bytes / factor
    assert [s.count for s in found] == sorted({s.count for s in found})


@given(
    num_backends=st.integers(1, 5),
    iters=st.integers(1, 6),
    warmup=st.integers(0, 3),
    check=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_every_backend_has_one_turn_in_every_round(num_backends, iters, warmup, check, seed):
    names = tuple(f"b{i}" for i in range(num_backends))
    config = CommConfig(
        backend=names, iters=iters, warmup=warmup, check=min(check, iters), seed=seed
    )
    order = list(turns(config, Size(64, 16), 100))
    assert order == list(turns(config, Size(64, 16), 100))  # as every rank finds it
    assert [t.step for t in order] == list(range(100, 100 + len(order)))
    for start in range(0, len(order), num_backends):
        round_ = order[start : start + num_backends]
        assert {t.contestant for t in round_} == set(range(num_backends))
        assert {t.timed for t in round_} == {start >= warmup * num_backends}
    timed = Counter(t.contestant for t in order if t.timed)
    checked = Counter(t.contestant for t in order if t.timed and t.checked)
    assert timed == dict.fromkeys(range(num_backends), iters)
    assert checked == Counter({n: config.check for n in range(num_backends) if config.check})


def test_no_backend_always_follows_the_same_other():
    config = CommConfig(backend=("a", "b", "c"), iters=200, warmup=0)
    order = [t.contestant for t in turns(config, Size(64, 16), 0)]
    pairs = Counter(itertools.pairwise(order))
    others = {(x, y) for x in range(3) for y in range(3) if x != y}
    assert others <= set(pairs)
    assert max(pairs[p] for p in others) < 2 * min(pairs[p] for p in others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": ()}, "--backend names none"),
        ({"backend": ("gloo", "gloo")}, "gloo more than once"),
        ({"workers": 0}, "--workers is 0; expected 1"),
        ({"factor": 1}, "--factor is 1; expected 2"),
        ({"iters": 0}, "--iters is 0"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"deadline": 0.0}, "--deadline is 0"),
        ({"check": 21}, "--check is 21 but --iters is 20"),
        ({"min_bytes": 1 << 20, "max_bytes": 1 << 10}, "expected min <= max"),
        ({"min_bytes": 3}, "at least 4: one float32 element"),
        ({"min_bytes": 4, "op": "gather"}, "at least 8: one float32 element from each of 2"),
        ({"workers": 256, "dtype": "uint8"}, "uint8 cannot hold the exact sum"),
    ],
)
def test_a_bad_configuration_says_what_is_expected(changes, message):
    with pytest.raises(UsageError, match=message):
        CommConfig(**({"backend": ("gloo",)} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8"}, "--dtype is 'float8'; expected one of float64"),
        ({"op": "max"}, "--op is 'max'; expected one of sum"),
        ({"device": "tpu"}, "--device is 'tpu'; expected one of cpu"),
    ],
)
def test_a_word_that_is_not_known_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        make_config(
            {"backend": ("gloo",), "dtype": "int32", "op": "sum", "device": "cpu"} | changes, 2
        )


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("loopback", "joins threads of one process"),
        ("none", "moves nothing"),
        ("glo", "did you mean 'gloo'"),
        ("mpi:blokking=1", "no option 'blokking'"),
    ],
)
def test_a_backend_that_cannot_take_part_is_refused(label, message):
    with pytest.raises(UsageError, match=message):
        resolve(["gloo", label])


def test_servers_that_do_not_fit_are_refused_before_anything_is_started():
    (contestant,) = resolve(["zmq-ps:servers=colocated:3"])
    with pytest.raises(UsageError, match="3 servers beside 2 workers"):
        bus_factor_of(contestant, CommConfig(backend=(contestant.text,)))


def test_the_job_is_what_its_most_demanding_backend_needs():
    names = split_specs("gloo,zmq-ps:servers=dedicated:2,mpi,zmq-ps:servers=dedicated:3")
    facts = together(resolve(names)).facts
    assert facts.needs_mpi
    assert facts.num_servers == 3
    assert not together(resolve(["gloo", "zmq-ps"])).facts.needs_mpi


def test_the_arguments_give_the_same_configuration():
    config = CommConfig(
        backend=("mpi:blocking=1", "gloo"),
        workers=3,
        min_bytes=64,
        max_bytes=1 << 22,
        iters=7,
        check=0,
        dtype="bfloat16",
        op="gather",
        threads=2,
    )
    arguments = to_arguments(config)
    words = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert words == {
        "--backend": "mpi:blocking=1,gloo",
        "--workers": "3",
        "--min": "64",
        "--max": str(1 << 22),
        "--iters": "7",
        "--check": "0",
        "--dtype": "bfloat16",
        "--op": "gather",
        "--threads": "2",
    }


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_the_factor_of_a_ring_counts_the_bytes_that_a_worker_sends(num_workers):
    shard = 1 / num_workers
    sent = sum(shard for _ in ("fold", "spread") for _ in range(num_workers - 1))
    of_sum = BACKENDS.resolve("mpi-ring").facts.bus_factor(num_workers)
    assert bus_factor("sum", num_workers, of_sum) == pytest.approx(sent)


@pytest.mark.parametrize("servers", ["colocated", "colocated:2", "dedicated:1", "dedicated:3"])
def test_the_factor_of_a_server_counts_the_bytes_that_placement_moves(servers):
    num_workers, num_elements = 4, 1 << 20
    (contestant,) = resolve([f"zmq-ps:servers={servers}"])
    options = contestant.options
    num_servers = options.num_servers(num_workers)
    sent: Counter[str] = Counter()
    for slice_ in place("w", num_elements, 4, num_servers, options.slice_bytes):
        dedicated = options.num_dedicated > 0
        server = f"s{slice_.server}" if dedicated else f"w{slice_.server}"
        for worker in range(num_workers):
            if server != f"w{worker}":
                sent[f"w{worker}"] += slice_.num_elements  # push
                sent[server] += slice_.num_elements  # pull
    factor = bus_factor_of(contestant, CommConfig(backend=(contestant.text,), workers=num_workers))
    assert factor == pytest.approx(max(sent.values()) / num_elements, rel=1e-3)


def test_bandwidths():
    assert algbw_bytes_per_s(1000, 0.5) == 2000
    assert busbw_bytes_per_s(1000, 0.5, 1.5) == 3000
    with pytest.raises(ValueError, match="expected above 0"):
        algbw_bytes_per_s(1000, 0.0)
