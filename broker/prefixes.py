"""Which prompts a worker had lately, and so may have in its prefix cache: checksums of their bytes.

The broker has no tokenizer. It cuts the bytes of a prompt at fixed places and takes the checksum of
all that is in front of each: prompts that agree up to a cut agree in its checksum. The cuts lie the
farther apart the later they come, so that a long prompt has few. A chat is its turns in order, so
that the next question begins with all that came before it. What is wrong here costs time, never an
answer: the worker looks for itself.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import msgspec

from llmrt.wire.messages import ChatMessage

# Of English text about, of token ids exactly.
BYTES_PER_TOKEN = 4
# Some 64 tokens, and from 2 KiB on an eighth of what lies before: each cut costs a microsecond.
FIRST_CUT = 256
CUT_SHARE = 8
# What lies behind is not looked at: checksums of so much take 0.2 ms.
MAX_HASHED_BYTES = 256 << 10


def _make_cuts() -> list[int]:
    cuts = [0]
    while cuts[-1] < MAX_HASHED_BYTES:
        cuts.append(cuts[-1] + max(FIRST_CUT, cuts[-1] // CUT_SHARE))
    return cuts


_CUTS = _make_cuts()
_SIZES = [end - start for start, end in pairwise(_CUTS)]


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as routing sees it: about so many tokens, and a checksum for each cut in it."""

    num_tokens: int
    checksums: tuple[int, ...]


class _Body(msgspec.Struct, frozen=True):
    """The fields of a request that make its prompt. Others are skipped, not decoded."""

    messages: tuple[ChatMessage, ...] = ()


_BODY = msgspec.msgpack.Decoder(_Body)


def prompt_of(frames: Sequence[bytes]) -> Prompt:
    """The prompt of a `generate` by its frames behind the header, whatever is in them."""
    try:
        messages = _BODY.decode(frames[0]).messages
    except (msgspec.DecodeError, RecursionError):
        messages = ()  # the worker will say what is wrong
    turns = "".join([f"{turn.role}\0{turn.content}\0" for turn in messages])
    return make_prompt(turns.encode(errors="replace") + b"".join(frames[1:2]))


def make_prompt(raw: bytes) -> Prompt:
    view, checksum, checksums = memoryview(raw), 0, []
    for start, end in pairwise(_CUTS):
        if end > len(raw):
            break
        checksum = crc32(view[start:end], checksum)
        checksums.append(checksum)
    return Prompt(len(raw) // BYTES_PER_TOKEN, tuple(checksums))


class PrefixIndex:
    """Prefixes of the prompts that one life of a worker was given, as many as its arena holds.

    The least recently used go first, and of one prompt the longest: so of the prefixes of a prompt
    all are known up to some length.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_bytes = max_tokens * BYTES_PER_TOKEN
        self._num_bytes = 0
        # Bytes between a cut and the one before it, by the checksum at the cut.
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def num_known_tokens(self, prompt: Prompt) -> int:
        """About so many tokens of the prompt, from the first on, were in an earlier one."""
        sizes = self._sizes
        num_known = bisect_left(prompt.checksums, True, key=lambda c: c not in sizes)
        return _CUTS[num_known] // BYTES_PER_TOKEN

    def note(self, prompt: Prompt) -> None:
        """The worker gets the prompt."""
        sizes, checksums = self._sizes, prompt.checksums
        for checksum, size in zip(checksums[::-1], _SIZES[len(checksums) - 1 :: -1], strict=False):
            self._num_bytes += size - sizes.pop(checksum, 0)
            sizes[checksum] = size
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= sizes.popitem(last=False)[1]
