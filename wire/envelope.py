"""Frames of every message: `[header] [body] [raw ...]`, behind the routing ids of ZeroMQ.

The header is a small msgpack array whose first element names the protocol and whose next two
are its version. A decoder here returns a value or raises `ProtocolError`, whatever the bytes,
and allocates at most a fixed multiple of their length. `docs/wire.md` describes the frames.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgpack
import msgspec

from llmrt.wire.errors import MessageTooLarge, ProtocolError, VersionMismatch
from llmrt.wire.ids import NO_ATTEMPT, REQUEST_ID_BYTES, Attempt, RequestId

MAGIC = "llmrt"
MAJOR, MINOR = 1, 0

# A header is at most some 150 bytes; the limit leaves room for later minor versions.
MAX_HEADER_BYTES = 1024
# msgpack of one byte per element grows some 70-fold when decoded: 1 MiB is 70 MiB at worst.
MAX_BODY_BYTES = 1 << 20
# Prompts travel as raw frames: 4 M token ids of 4 bytes.
MAX_RAW_BYTES = 16 << 20
MAX_FRAMES = 16
MAX_ELEMENTS = 16384
NO_BUDGET = -1
NO_REQUEST = RequestId(b"")

T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a hop needs to route a message without reading its body.

    `budget_ms` is what is left of the request's time, -1 without a limit. `stamps` are
    durations in microseconds, one appended per hop; clocks of two processes never meet.
    """

    kind: str
    request_id: bytes = NO_REQUEST
    epoch: int = 0
    n: int = 0
    seq: int = 0
    budget_ms: int = NO_BUDGET
    stamps: tuple[int, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.epoch, self.n)


def encode_header(
    kind: str,
    request_id: bytes = NO_REQUEST,
    *,
    attempt: Attempt = NO_ATTEMPT,
    seq: int = 0,
    budget_ms: int = NO_BUDGET,
    stamps: Sequence[int] = (),
) -> bytes:
    packed: bytes = msgpack.packb(
        (MAGIC, MAJOR, MINOR, kind, request_id, attempt.epoch, attempt.n, seq, budget_ms, stamps)
    )
    return packed


def decode_header(frame: bytes) -> Header:
    """The header in `frame`; raises `ProtocolError`, or `VersionMismatch` for another major."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    fields = _unpack(frame)
    if not isinstance(fields, list) or len(fields) < 4 or fields[0] != MAGIC:
        raise ProtocolError("the first frame is not an llmrt header")
    if fields[1] != MAJOR:
        raise VersionMismatch(
            f"peer speaks protocol {fields[1]!r}.{fields[2]!r}, this side {MAJOR}.{MINOR}: "
            "run the same release on both sides"
        )
    header = _convert(fields[3:], Header)
    if len(header.request_id) not in (0, REQUEST_ID_BYTES):
        raise ProtocolError(
            f"request id of {len(header.request_id)} bytes; {REQUEST_ID_BYTES} are expected"
        )
    return header


def encode_body(message: msgspec.Struct) -> bytes:
    """msgpack of a message; raises `MessageTooLarge` above `MAX_BODY_BYTES`."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    if len(packed) > MAX_BODY_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__} takes {len(packed)} bytes; at most {MAX_BODY_BYTES} "
            "are allowed: shorten the messages, or send the prompt as text or token ids"
        )
    return packed


def decode_body(frame: bytes, expected: type[T]) -> T:
    """The message of type `expected` in `frame`; raises `ProtocolError`."""
    if len(frame) > MAX_BODY_BYTES:
        raise ProtocolError(f"body of {len(frame)} bytes; at most {MAX_BODY_BYTES} are allowed")
    return _convert(_unpack(frame), expected)


def check_frames(frames: Sequence[bytes]) -> None:
    """Raise `ProtocolError` if a message has too many frames or one that is too large."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"message of {len(frames)} frames; 1 to {MAX_FRAMES} are allowed")
    longest = max(map(len, frames))
    if longest > MAX_RAW_BYTES:
        raise ProtocolError(f"frame of {longest} bytes; at most {MAX_RAW_BYTES} are allowed")


def _unpack(frame: bytes) -> object:
    try:
        return msgpack.unpackb(
            frame,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            max_ext_len=0,
            strict_map_key=False,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack within its bounds: {_short(error)}") from None


def _convert(fields: object, expected: type[T]) -> T:
    try:
        return msgspec.convert(fields, expected, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"no {expected.__name__}: {_short(error)}") from None


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
