"""The header of the parameter server: golden bytes, round trips, and every way to be wrong."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.backends.zmq_ps.wire import (
    DTYPES,
    FIXED_BYTES,
    MAX_KEY_BYTES,
    MAX_NOTE_BYTES,
    BadField,
    BadLength,
    BadMagic,
    BadToken,
    BadVersion,
    Flag,
    Header,
    Operation,
    WireError,
    check_payload,
    decode,
    encode,
    token_digest,
    worker_identity,
)
from testbed.base.dtypes import ELEMENT_BYTES

DIGEST = token_digest(b"secret of the job")
U64 = st.integers(0, 2**64 - 1)

GOLDEN = Header(
    operation=Operation.ALL_REDUCE,
    worker=3,
    dtype="float32",
    flags=Flag.PAYLOAD,
    stream=1,
    sequence=7,
    step=11,
    offset=256,
    num_elements=128,
    total_elements=1000,
    key="conv1.weight",
)
GOLDEN_HEX = (
    "54425053"  # magic
    "01010101" + DIGEST.hex() + "0300"  # version, operation, dtype, flags  # worker
    "0000"  # root
    "00000000"  # frame count
    "0100000000000000"  # stream
    "0700000000000000"  # sequence
    "0b00000000000000"  # step
    "0001000000000000"  # offset
    "8000000000000000"  # elements of the slice
    "e803000000000000"  # elements of the tensor
    "0002000000000000"  # payload bytes
    "0000000000000000"  # learning rate
    "0000000000000000"  # version of the parameters
    "0000000000000000"  # staleness
    "0c00"  # key bytes
    "00000000"  # note bytes
    "636f6e76312e776569676874"  # key
)


@st.composite
def headers(draw):
    num_elements = draw(st.integers(0, 2**40))
    offset = draw(st.integers(0, 2**40))
    return Header(
        operation=draw(st.sampled_from(Operation)),
        worker=draw(st.integers(0, 2**16 - 1)),
        root=draw(st.integers(0, 2**16 - 1)),
        flags=draw(st.integers(0, Flag.ALL)),
        dtype=draw(st.sampled_from(DTYPES)),
        frame_count=draw(st.integers(0, 2**32 - 1)),
        stream=draw(U64),
        sequence=draw(U64),
        step=draw(st.integers(-(2**63), 2**63 - 1)),
        offset=offset,
        num_elements=num_elements,
        total_elements=offset + num_elements + draw(st.integers(0, 2**40)),
        learning_rate=draw(st.floats(allow_nan=False)),
        version=draw(U64),
        staleness=draw(U64),
        key=draw(st.text(max_size=50)),
        note=draw(st.binary(max_size=200)),
    )


def test_golden_frame():
    assert encode(GOLDEN, DIGEST).hex() == GOLDEN_HEX
    assert decode(bytes.fromhex(GOLDEN_HEX), DIGEST) == GOLDEN


def test_element_sizes_are_those_of_the_dtypes():
    import torch

    assert all(getattr(torch, name).itemsize == ELEMENT_BYTES[name] for name in DTYPES)


@given(headers())
def test_round_trip(header):
    assert decode(encode(header, DIGEST), DIGEST) == header


@given(st.binary(max_size=400))
def test_noise_is_refused_by_name(noise):
    with pytest.raises(WireError):
        decode(noise, DIGEST)


@given(headers(), st.data())
def test_a_damaged_frame_is_refused_or_still_consistent(header, data):
    frame = bytearray(encode(header, DIGEST))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    try:
        damaged = decode(bytes(frame), DIGEST)
    except WireError:
        return
    assert damaged.offset + damaged.num_elements <= damaged.total_elements
    assert decode(encode(damaged, DIGEST), DIGEST) == damaged or damaged.learning_rate != (
        damaged.learning_rate
    )


@given(headers(), st.data())
def test_a_truncated_frame_is_refused(header, data):
    frame = encode(header, DIGEST)
    with pytest.raises(WireError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))], DIGEST)


def _changed(at, value):
    frame = bytearray(encode(GOLDEN, DIGEST))
    frame[at : at + len(value)] = value
    return bytes(frame)


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", BadMagic),
        (_changed(0, b"HTTP"), BadMagic),
        (_changed(4, b"\x02"), BadVersion),
        (_changed(5, b"\x00"), BadField),
        (_changed(5, b"\xff"), BadField),
        (_changed(6, b"\x07"), BadField),
        (_changed(7, b"\x80"), BadField),
        (_changed(8, b"\x00\x01\x02"), BadToken),
        (_changed(56, struct.pack("<Q", 1000)), BadField),
        (_changed(80, struct.pack("<Q", 511)), BadLength),
        (_changed(FIXED_BYTES, b"\xff\xff"), BadField),
        (encode(GOLDEN, DIGEST)[: FIXED_BYTES - 1], BadLength),
        (encode(GOLDEN, DIGEST)[:-1], BadLength),
        (encode(GOLDEN, DIGEST) + b"x", BadLength),
    ],
)
def test_each_kind_of_damage_has_its_name(frame, error):
    with pytest.raises(error):
        decode(frame, DIGEST)


def test_payload_of_another_length_is_refused():
    check_payload(GOLDEN, 512)
    with pytest.raises(BadLength, match=r"513 bytes; expected 512"):
        check_payload(GOLDEN, 513)


@pytest.mark.parametrize(
    "header",
    [
        Header(Operation.ALL_REDUCE, worker=1 << 16),
        Header(Operation.ALL_REDUCE, worker=0, key="k" * (MAX_KEY_BYTES + 1)),
        Header(Operation.ALL_REDUCE, worker=0, note=b"n" * (MAX_NOTE_BYTES + 1)),
        Header(Operation.ALL_REDUCE, worker=0, dtype="complex64"),
    ],
)
def test_values_that_do_not_fit_are_not_written(header):
    with pytest.raises(BadField):
        encode(header, DIGEST)


def test_identities_differ_by_worker_and_token():
    identities = {worker_identity(token, w) for token in (b"", b"a", b"b") for w in range(50)}
    assert len(identities) == 150
    assert all(len(identity) == 16 for identity in identities)
