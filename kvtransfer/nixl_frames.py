"""What a worker and its NIXL process say to each other over a socket pair.

worker                                NIXL process
OPEN our arena, the peer's        -->             (the process that serves reads has no peer)
                                  <--  OPENED, or FAILED
READ blocks                       -->
                                  <--  DONE, or FAILED
                                  <--  NOTICED: a peer has read; from the process that serves

A frame is its length (u32, little-endian) and a msgpack body. After FAILED the process ends, and
nothing that it had begun writes any more.
"""

import struct
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct("<I")


class ArenaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An arena as NIXL reaches it: `base` is its address in the process that serves it."""

    agent: str
    metadata: bytes
    base: int
    num_blocks: int
    block_bytes: int
    generation: int


class Open(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The process maps our arena, registers all of it and, to read, connects to `peer`."""

    agent: str
    num_blocks: int
    block_bytes: int
    generation: int
    peer: ArenaAddress | None = None


class Opened(msgspec.Struct, frozen=True, tag=True):
    address: ArenaAddress


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of the peer's arena into ours, then send it `notice`.

    `source` and `target` are block numbers as raw u32 (`llmrt.wire.arrays`).
    """

    source: bytes
    target: bytes
    notice: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """All bytes are there."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Noticed(msgspec.Struct, frozen=True, tag=True):
    notice: bytes


Order = Open | Read
Report = Opened | Done | Failed | Noticed

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_report(body: bytes) -> Report:
    return _reports.decode(body)


def read_order(stream: BinaryIO) -> Order | None:
    """The next order; None if the worker hung up. Blocks."""
    body = _read_body(stream)
    return None if body is None else _orders.decode(body)


def read_report(stream: BinaryIO) -> Report | None:
    """The next report; None if the process ended. Blocks."""
    body = _read_body(stream)
    return None if body is None else _reports.decode(body)


def _read_body(stream: BinaryIO) -> bytes | None:
    raw = stream.read(LENGTH.size)
    if len(raw) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(raw)
    body = stream.read(length)
    return body if len(body) == length else None
