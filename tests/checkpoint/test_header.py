"""Headers of safetensors files, as bytes: what the format allows is accepted, up to its limits."""

import json

import pytest

from hybridpipe.checkpoint import header
from hybridpipe.checkpoint.header import LENGTH_BYTES, Slot, check_length, decode, encode
from hybridpipe.errors import UserError


def said(**tensors) -> bytes:
    """A header of tensors: (dtype, shape, start, stop)."""
    return json.dumps(
        {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
            for name, (dtype, shape, start, stop) in tensors.items()
        }
    ).encode()


def test_a_header_is_a_multiple_of_eight_bytes_and_says_its_length():
    for name in ("a", "ab", "abc"):
        data, slots = encode([(name, "F16", (3,)), ("wide", "F64", (2, 1))], {"step": "1"})
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        assert length % LENGTH_BYTES == 0 and len(data) == LENGTH_BYTES + length
        assert slots == [Slot("wide", "F64", (2, 1), 0, 16), Slot(name, "F16", (3,), 16, 22)]
        assert decode(data[LENGTH_BYTES:], 22, "file") == (slots, {"step": "1"})
        assert check_length(data[:LENGTH_BYTES], len(data) + 22, "file") == length


def test_a_header_may_be_as_long_as_the_limit(monkeypatch):
    data, _ = encode([("a", "F32", (1,))], {})
    length = len(data) - LENGTH_BYTES
    monkeypatch.setattr(header, "LARGEST_HEADER", length)
    encode([("a", "F32", (1,))], {})
    assert check_length(data[:LENGTH_BYTES], len(data) + 4, "file") == length
    monkeypatch.setattr(header, "LARGEST_HEADER", length - 1)
    with pytest.raises(ValueError, match=f"must have at most {length - 1} bytes, got {length}"):
        encode([("a", "F32", (1,))], {})
    with pytest.raises(UserError, match=f"its header should have {length} bytes"):
        check_length(data[:LENGTH_BYTES], len(data) + 4, "file")


def test_a_header_fits_into_its_file():
    length = (40).to_bytes(LENGTH_BYTES, "little")
    assert check_length(length, LENGTH_BYTES + 40, "file") == 40  # of no tensors
    with pytest.raises(UserError, match="should have 40 bytes, and the file has 47"):
        check_length(length, LENGTH_BYTES + 39, "file")
    with pytest.raises(UserError, match="must be a safetensors file, got 7 bytes"):
        check_length(length[:7], 7, "file")


@pytest.mark.parametrize("shape", [[], [0], [1] * 61, [0, 2**60], [2, 0, 2**59]])
def test_shapes_that_hold_little_are_accepted(shape):
    num_bytes = 0 if 0 in shape else 4
    slots, metadata = decode(said(a=("F32", shape, 0, num_bytes)), num_bytes, "file")
    assert slots == [Slot("a", "F32", tuple(shape), 0, num_bytes)] and metadata == {}


@pytest.mark.parametrize("shape", [[0, 2**61], [2**61], [0, 2**31, 2**30], [2**62, 0]])
def test_shapes_that_overflow_are_refused_though_they_hold_nothing(shape):
    with pytest.raises(UserError, match=r"^file: tensor 'a': shape: is too large for any machine: "):
        decode(said(a=("F32", shape, 0, 0)), 0, "file")


def test_tensors_are_in_the_order_of_their_bytes():
    slots, _ = decode(said(b=("F32", [1], 4, 8), none=("F32", [0], 4, 4), a=("U8", [4], 0, 4)), 8, "file")
    assert [slot.name for slot in slots] == ["a", "none", "b"]
