"""Integers as raw little-endian bytes: token ids and block numbers are never msgpack lists."""

import sys
from array import array
from collections.abc import Iterable

from llmrt.wire.errors import ProtocolError

U32_BYTES = 4


def pack_u32(values: Iterable[int]) -> bytes:
    """4 bytes per value, little-endian. Values must be below 2**32."""
    if isinstance(values, array) and values.typecode == "I":
        packed = values
    else:
        # `array` reads bytes as machine values, not as the small integers that they iterate to.
        packed = array("I", values if isinstance(values, list | tuple) else list(values))
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(raw: bytes) -> "array[int]":
    """The values in `raw`; raises `ProtocolError` unless its length is a multiple of 4."""
    if len(raw) % U32_BYTES:
        raise ProtocolError(f"{len(raw)} bytes are no array of 4-byte integers")
    values = array("I")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
