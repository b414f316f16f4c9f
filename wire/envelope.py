"""Frames of every message: `[header] [body] [raw ...]`, behind the routing ids of ZeroMQ.

The header is a small msgpack array whose first element names the protocol and whose next two
are its version. A decoder here returns a value or raises `ProtocolError`, whatever the bytes,
and allocates at most a fixed multiple of their length: it knows the type that it expects, skips
what it does not know, and never makes room for elements that are only announced (a general
msgpack decoder takes 27 MB for a header of nested empty arrays). `docs/wire.md` describes the
frames.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from llmrt.wire.errors import MessageTooLarge, ProtocolError, VersionMismatch
from llmrt.wire.ids import NO_ATTEMPT, REQUEST_ID_BYTES, Attempt, RequestId

MAGIC = "llmrt"
MAJOR, MINOR = 1, 0

# A header is at most some 150 bytes; the limit leaves room for later minor versions.
MAX_HEADER_BYTES = 1024
# A message of many small structs grows some 40-fold when decoded: 1 MiB is 40 MiB at worst.
MAX_BODY_BYTES = 1 << 20
# Prompts travel as raw frames: 4 M token ids of 4 bytes.
MAX_RAW_BYTES = 16 << 20
MAX_FRAMES = 16
NO_BUDGET = -1
NO_REQUEST = RequestId(b"")

T = TypeVar("T")


# The widths of the fields in the index of a step message.
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]


class _Version(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every major version begins with."""

    magic: str
    major: int
    minor: int


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What a hop needs to route a message without reading its body, as it lies on the wire.

    `budget_ms` is what is left of the request's time, -1 without a limit. `stamps` are
    durations in microseconds, one appended per hop; clocks of two processes never meet.
    """

    magic: str = MAGIC
    major: int = MAJOR
    minor: int = MINOR
    kind: str
    request_id: bytes = NO_REQUEST
    epoch: _U64 = 0
    n: _U32 = 0
    seq: _U32 = 0
    budget_ms: Annotated[int, msgspec.Meta(ge=NO_BUDGET)] = NO_BUDGET
    stamps: tuple[int, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.epoch, self.n)


# Every hop encodes and decodes a header: 0.3 and 0.6 us, against 3 and 7 us with msgpack.
_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(Header)
_VERSION_DECODER = msgspec.msgpack.Decoder(_Version)
# One per type of message; made at first use, which takes longer than decoding.
_BODY_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_ID_SIZES = (0, REQUEST_ID_BYTES)
_NOT_OURS = (msgspec.DecodeError, ValueError, RecursionError)


def encode_header(
    kind: str,
    request_id: bytes = NO_REQUEST,
    *,
    attempt: Attempt = NO_ATTEMPT,
    seq: int = 0,
    budget_ms: int = NO_BUDGET,
    stamps: Sequence[int] = (),
) -> bytes:
    return _ENCODER.encode(
        (MAGIC, MAJOR, MINOR, kind, request_id, attempt.epoch, attempt.n, seq, budget_ms, stamps)
    )


def decode_header(frame: bytes) -> Header:
    """The header in `frame`; raises `ProtocolError`, or `VersionMismatch` for another major."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = _HEADER_DECODER.decode(frame)
    except _NOT_OURS as error:
        _check_version(frame)
        raise ProtocolError(f"no header: {_short(error)}") from None
    if header.magic != MAGIC or header.major != MAJOR:
        _check_version(frame)
    if len(header.request_id) not in _ID_SIZES:
        raise ProtocolError(
            f"request id of {len(header.request_id)} bytes; {REQUEST_ID_BYTES} are expected"
        )
    return header


def encode_body(message: msgspec.Struct) -> bytes:
    """msgpack of a message; raises `MessageTooLarge` above `MAX_BODY_BYTES`."""
    packed = _ENCODER.encode(message)
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
    try:
        return _body_decoder(expected).decode(frame)
    except _NOT_OURS as error:
        raise ProtocolError(f"no {expected.__name__}: {_short(error)}") from None


def check_frames(frames: Sequence[bytes]) -> None:
    """Raise `ProtocolError` if a message has too many frames or one that is too large."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"message of {len(frames)} frames; 1 to {MAX_FRAMES} are allowed")
    longest = max(map(len, frames))
    if longest > MAX_RAW_BYTES:
        raise ProtocolError(f"frame of {longest} bytes; at most {MAX_RAW_BYTES} are allowed")


def frame_at(frames: Sequence[bytes], index: int) -> bytes:
    """A frame that its kind of message must have; raises `ProtocolError` if it is missing."""
    if len(frames) <= index:
        raise ProtocolError(f"message of {len(frames)} frames; at least {index + 1} are expected")
    return frames[index]


def _body_decoder(expected: type[T]) -> msgspec.msgpack.Decoder[T]:
    decoder = _BODY_DECODERS.get(expected)
    if decoder is None:
        decoder = _BODY_DECODERS[expected] = msgspec.msgpack.Decoder(expected)
    return decoder


def _check_version(frame: bytes) -> None:
    """Raise for another protocol or another major version, whose further fields may differ."""
    try:
        version = _VERSION_DECODER.decode(frame)
    except _NOT_OURS:
        raise ProtocolError("the first frame is not an llmrt header") from None
    if version.magic != MAGIC:
        raise ProtocolError("the first frame is not an llmrt header")
    if version.major != MAJOR:
        raise VersionMismatch(
            f"peer speaks protocol {version.major}.{version.minor}, this side {MAJOR}.{MINOR}: "
            "run the same release on both sides"
        )


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
