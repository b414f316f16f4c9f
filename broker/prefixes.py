"""Which worker has seen the start of a prompt: chains of hashes over its bytes. Pure.

The broker has no tokenizer. The bytes of a text, of token ids, or of a chat's turns one after the
other are cut into pieces, and each piece is hashed together with all before it: a longer chat
begins with the pieces of a shorter one. A worker is taken to hold what it was sent last, as much of
it as its arena has room for. Where it has not, a prompt is computed that need not be; nothing else.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from llmrt.wire.messages import ChatMessage

# Some 128 tokens: less is computed sooner than it is worth thinking about.
PIECE_BYTES = 512
# Of longer prompts only the start counts.
MAX_PIECES = 256
_HASH_BYTES = 8
# Of English text, and of token ids.
_BYTES_PER_TOKEN = 4
_MIN_PIECES = 64


class _Chat(msgspec.Struct):
    """What of a request's body is a part of its prompt."""

    messages: tuple[ChatMessage, ...] = ()


_CHAT = msgspec.msgpack.Decoder(_Chat)


def prompt_pieces(frames: Sequence[bytes]) -> tuple[bytes, ...]:
    """Hashes of the full pieces of a prompt, whose `frames` are the body and the raw prompt."""
    prompt = frames[1] if len(frames) > 1 else b""
    if not prompt:
        try:
            messages = _CHAT.decode(frames[0]).messages
        except msgspec.MsgspecError:  # its worker says what is wrong with it
            return ()
        prompt = "".join(f"{turn.role}\0{turn.content}\0" for turn in messages).encode(
            errors="surrogatepass"
        )
    pieces = []
    piece = b""
    for start in range(
        0, min(len(prompt), MAX_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES
    ):
        hashed = blake2b(piece, digest_size=_HASH_BYTES)
        hashed.update(prompt[start : start + PIECE_BYTES])
        piece = hashed.digest()
        pieces.append(piece)
    return tuple(pieces)


class SeenPrefixes:
    """The pieces that one worker was sent, the longest unused first to go."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens` is what the worker's cache holds."""
        self._limit = max(_MIN_PIECES, num_tokens * _BYTES_PER_TOKEN // PIECE_BYTES)
        self._pieces: OrderedDict[bytes, None] = OrderedDict()

    def overlap(self, pieces: Sequence[bytes]) -> int:
        """How many of `pieces`, counted from the first, the worker has seen."""
        known = self._pieces
        for number, piece in enumerate(pieces):
            if piece not in known:
                return number
        return len(pieces)

    def add(self, pieces: Sequence[bytes]) -> None:
        """The worker is sent a prompt of these pieces."""
        for piece in reversed(pieces):  # so that the tail goes before the head
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._limit:
            self._pieces.popitem(last=False)
