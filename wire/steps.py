"""The step message: what one engine step gave to many requests, in one message.

Frames: `[header kind=step] [index] [token ids] [text] [extras]`. The index has one fixed-size row
per request, so that the broker can slice the message without decoding anything else.
"""

import struct
from collections.abc import Iterable, Sequence

import msgspec

from llmrt.wire.arrays import U32_BYTES, pack_u32, unpack_u32
from llmrt.wire.envelope import encode_header
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import Attempt, RequestId

# request id, attempt (epoch, n), sequence number of the first token, number of tokens,
# bytes of text, bytes of extras
_ROW = struct.Struct("<16sQIIIII")
NUM_STEP_FRAMES = 5


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request.

    `seq` is the sequence number of the first of `token_ids` (4 bytes each). `text` is UTF-8 that
    became certain with them, and may lag behind. `extras` is msgpack, for log probabilities.
    """

    request_id: RequestId
    attempt: Attempt
    seq: int
    token_ids: bytes
    text: bytes
    extras: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // U32_BYTES


def encode_step(rows: Iterable[StepRow], *, kind: str = "step") -> list[bytes]:
    rows = list(rows)
    index = b"".join(
        _ROW.pack(
            row.request_id,
            row.attempt.epoch,
            row.attempt.n,
            row.seq,
            row.num_tokens,
            len(row.text),
            len(row.extras),
        )
        for row in rows
    )
    return [
        encode_header(kind),
        index,
        b"".join([row.token_ids for row in rows]),
        b"".join([row.text for row in rows]),
        b"".join([row.extras for row in rows]),
    ]


def decode_step(frames: Sequence[bytes]) -> list[StepRow]:
    """The rows of a step message; `ProtocolError` unless the index accounts for all bytes."""
    if len(frames) != NUM_STEP_FRAMES:
        raise ProtocolError(f"step of {len(frames)} frames; {NUM_STEP_FRAMES} are expected")
    _, index, tokens, text, extras = frames
    if len(index) % _ROW.size:
        raise ProtocolError(f"step index of {len(index)} bytes is no multiple of {_ROW.size}")
    rows = []
    t = x = e = 0
    for request_id, epoch, n, seq, num_tokens, text_bytes, extra_bytes in _ROW.iter_unpack(index):
        t_end, x_end, e_end = t + num_tokens * U32_BYTES, x + text_bytes, e + extra_bytes
        rows.append(
            StepRow(
                RequestId(request_id),
                Attempt(epoch, n),
                seq,
                tokens[t:t_end],
                text[x:x_end],
                extras[e:e_end],
            )
        )
        t, x, e = t_end, x_end, e_end
    if (t, x, e) != (len(tokens), len(text), len(extras)):
        raise ProtocolError(
            f"step index accounts for {t}, {x}, {e} bytes of tokens, text and extras; "
            f"{len(tokens)}, {len(text)}, {len(extras)} came"
        )
    return rows


def token_ids_of(row: StepRow) -> list[int]:
    return unpack_u32(row.token_ids).tolist()


def make_row(
    request_id: RequestId,
    attempt: Attempt,
    seq: int,
    token_ids: Iterable[int],
    text: str,
    extras: bytes = b"",
) -> StepRow:
    return StepRow(request_id, attempt, seq, pack_u32(token_ids), text.encode(), extras)
