"""Integers as raw little-endian bytes: token ids and block numbers are never msgpack lists."""

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

from llmrt.wire.errors import ProtocolError

U32_BYTES, U64_BYTES = 4, 8


def pack_u32(values: Iterable[int]) -> bytes:
    """4 bytes per value, little-endian. Values must be below 2**32."""
    return _pack("I", values)


def unpack_u32(raw: bytes) -> "array[int]":
    """The values in `raw`; raises `ProtocolError` unless its length is a multiple of 4."""
    return _unpack("I", raw)


def pack_u64(values: Iterable[int]) -> bytes:
    """8 bytes per value, little-endian. Values must be below 2**64."""
    return _pack("Q", values)


def unpack_u64(raw: bytes) -> "array[int]":
    """The values in `raw`; raises `ProtocolError` unless its length is a multiple of 8."""
    return _unpack("Q", raw)


def _pack(typecode: Literal["I", "Q"], values: Iterable[int]) -> bytes:
    if isinstance(values, array) and values.typecode == typecode:
        packed = values
    else:
        # `array` reads bytes as machine values, not as the small integers that they iterate to.
        packed = array(typecode, values if isinstance(values, list | tuple) else list(values))
    if sys.byteorder == "big":
        packed = array(typecode, packed)
        packed.byteswap()
    return packed.tobytes()


def _unpack(typecode: Literal["I", "Q"], raw: bytes) -> "array[int]":
    values = array(typecode)
    if len(raw) % values.itemsize:
        raise ProtocolError(f"{len(raw)} bytes are no array of {values.itemsize}-byte integers")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
