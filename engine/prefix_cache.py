"""What sequences leave in the cache of blocks, and find there. Pure.

Full blocks are shared under the hash of all tokens up to their end. Of a sequence that has ended or
was preempted, the last block is kept too, if it is not full: as its *tail*, which one sequence that
begins with the same tokens may take over and go on filling. So the next turn of a chat computes no
token again that has KV.
"""

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.block_hash import hash_blocks, tail_key
from llmrt.kvtransfer.ledger import Ledger
from llmrt.wire.ids import BlockId
from llmrt.wire.kv import BLOCK_TOKENS

# Who waits for a prefix waits for so many times the tokens that this saves, at most.
MAX_WAIT = 2


class Tail(NamedTuple):
    """A block that was taken over, or none, whose first `num_tokens` tokens are as wanted."""

    blocks: list[BlockId]
    num_tokens: int


NO_TAIL = Tail([], 0)


class PrefixCache:
    """The way of one worker's sequences to the cache of its ledger; without `is_on`, none."""

    def __init__(self, ledger: Ledger, *, is_on: bool) -> None:
        self._ledger = ledger
        self._is_on = is_on

    def hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks before its last token: that one is always computed."""
        if not self._is_on:
            return []
        self._hash(sequence)
        return sequence.block_hashes[: (len(sequence.token_ids) - 1) // BLOCK_TOKENS]

    def find_coming(
        self, sequence: Sequence, others: Iterable[Sequence]
    ) -> tuple[Sequence, int] | None:
        """One of `others` that is computing blocks which the sequence would find cached then, and
        how many they have in common; None if waiting for them would not pay.
        """
        hashes = self.hashes(sequence)
        num_cached = self._ledger.lookup(hashes)
        for other in others if num_cached < len(hashes) else ():
            pairs = zip(hashes[num_cached:], other.block_hashes[num_cached:], strict=False)
            num_new = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_common = num_cached + num_new
            if num_new and _num_to_wait(other, num_common) <= MAX_WAIT * num_new * BLOCK_TOKENS:
                return other, num_common
        return None

    def take_tail(self, sequence: Sequence, num_prefix: int) -> Tail:
        """What may be taken over behind the first `num_prefix` blocks; held by the caller then."""
        start = num_prefix * BLOCK_TOKENS
        wanted = sequence.token_ids[start : min(start + BLOCK_TOKENS, len(sequence.token_ids) - 1)]
        if not self._is_on or not wanted:
            return NO_TAIL
        taken = self._ledger.take_tail(_tail_key(sequence, num_prefix), wanted)
        return NO_TAIL if taken is None else Tail([taken[0]], taken[1])

    def seal(self, sequence: Sequence) -> None:
        """Share the blocks that are complete."""
        num_full = sequence.num_computed // BLOCK_TOKENS
        if not self._is_on or num_full <= sequence.num_sealed:
            return
        self._hash(sequence)
        for i in range(sequence.num_sealed, num_full):
            self._ledger.seal(BlockId(sequence.blocks[i]), sequence.block_hashes[i])
        sequence.num_sealed = num_full

    def release(self, sequence: Sequence) -> None:
        """The sequence lets its blocks go, and leaves its tail."""
        blocks = [BlockId(block) for block in sequence.blocks]
        num_full, num_over = divmod(sequence.num_computed, BLOCK_TOKENS)
        if self._is_on and num_over and sequence.num_sealed == num_full:
            tail = sequence.token_ids[num_full * BLOCK_TOKENS : sequence.num_computed]
            self._ledger.release(blocks[num_full + 1 :])
            self._ledger.release_tail(blocks[num_full], _tail_key(sequence, num_full), tail)
            blocks = blocks[:num_full]
        self._ledger.release(blocks)

    def _hash(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes
        num_full = len(sequence.token_ids) // BLOCK_TOKENS
        if len(hashes) < num_full:
            start = len(hashes) * BLOCK_TOKENS
            new = sequence.token_ids[start : num_full * BLOCK_TOKENS]
            parent = hashes[-1] if hashes else b""
            hashes += hash_blocks(new, salt=sequence.salt, parent=parent)


def _tail_key(sequence: Sequence, num_full: int) -> bytes:
    parent = sequence.block_hashes[num_full - 1] if num_full else b""
    return tail_key(parent, salt=sequence.salt)


def _num_to_wait(other: Sequence, num_blocks: int) -> int:
    """Tokens that `other` computes until its first `num_blocks` are cached here.

    If it is parked, they come with the rest of its prompt.
    """
    if other.num_parked:
        return len(other.token_ids) - other.num_cached
    return num_blocks * BLOCK_TOKENS - other.num_computed
