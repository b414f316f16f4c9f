"""Checksums of KV blocks, and which blocks of a prompt have one: XXH3, 64 bits, of whole blocks.

A checksum says that the reader has the bytes that the writer had. So it covers all bytes of a
block, in the last one also those behind the prompt's end: they travel with it, nobody writes them
between the two hashes, and nothing attends to them. To leave them out or to zero them would take
one piece per layer, head and row of K, and check nothing more that anybody reads.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from llmrt.wire.ids import RequestId

MODES = ("off", "sampled", "full")
# The share of blocks between first and last that `sampled` takes.
SAMPLED_ONE_IN = 16


@dataclass(frozen=True, slots=True)
class CheckedBlocks:
    """Which blocks of a prompt are compared, by their index in its block table.

    Those from `first` to `end` are handed over. `sampled` takes the first, the last and one in 16,
    which differ from request to request: both sides of a hand-over find the same.
    """

    mode: str
    request_id: RequestId
    first: int
    end: int

    def within(self, start: int, stop: int) -> list[int]:
        """Those from `start` to before `stop`."""
        if self.mode == "off":
            return []
        indices = range(max(start, self.first), min(stop, self.end))
        if self.mode == "full":
            return list(indices)
        phase = int.from_bytes(self.request_id[-2:], "little")
        ends = (self.first, self.end - 1)
        return [i for i in indices if i in ends or (i + phase) % SAMPLED_ONE_IN == 0]


def block_checksums(buffer: memoryview, block_bytes: int, blocks: Iterable[int]) -> "array[int]":
    """One checksum per block, as unsigned 64 bits: 0.1 ms/MB, without the interpreter lock."""
    return array(
        "Q",
        (
            xxhash.xxh3_64_intdigest(buffer[block * block_bytes : (block + 1) * block_bytes])
            for block in blocks
        ),
    )
