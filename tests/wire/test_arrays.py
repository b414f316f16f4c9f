"""Integers as raw little-endian bytes."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.wire.arrays import pack_u32, unpack_u32
from llmrt.wire.errors import ProtocolError


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_values_survive_the_way(values: list[int]) -> None:
    raw = pack_u32(values)
    assert raw == b"".join(value.to_bytes(4, "little") for value in values)
    assert unpack_u32(raw).tolist() == values


@given(st.lists(st.integers(0, 255)))
def test_every_iterable_gives_its_values(values: list[int]) -> None:
    """Also bytes, which `array` would read as machine values."""
    expected = pack_u32(values)
    for same in (
        tuple(values),
        bytes(values),
        array("B", values),
        array("I", values),
        iter(values),
    ):
        assert pack_u32(same) == expected


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_out_of_range_are_our_own_fault(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


@given(st.binary(max_size=64).filter(lambda raw: len(raw) % 4))
def test_a_torn_array_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="no array"):
        unpack_u32(raw)
