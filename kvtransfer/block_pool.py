"""The blocks of one KV arena: free, held by requests, or cached under their content's hash.

Of equal choices a pool takes the first in a fixed order, so that one history of calls gives one
history of blocks. `ledger.py` adds the rights of other processes, and tells the whole story.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from llmrt.wire.ids import BlockId

# Plain integers: an IntEnum makes the release of a long sequence three times slower.
FREE, HELD, CACHED, GRANTED, QUARANTINED = range(5)
STATE_NAMES = ("free", "held", "cached", "granted", "quarantined")


class BlockPool:
    """Gives blocks out, counts who uses them, and keeps what they hold for as long as it can.

    A held block has at least one pin, and is free again without. A cached block without pins waits
    to be evicted, the one that was unpinned longest ago first. A *tail* is a cached block that is
    not full; it has no pins, and whoever takes it has it alone and may write behind its tokens.
    """

    def __init__(
        self, num_blocks: int, *, checksum: Callable[[BlockId], int] | None = None
    ) -> None:
        """With `checksum`, which reads a block's bytes, cached blocks are sealed with theirs."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.num_bad_seals = 0
        self._checksum = checksum
        self._seals: dict[BlockId, int] = {}
        self._tails: dict[BlockId, array[int]] = {}
        self._states = bytearray(num_blocks)
        self._num_in = [num_blocks, 0, 0, 0, 0]
        self._pins = [0] * num_blocks
        # A stack: the first allocations are 0, 1, 2, ... and so neighbours in memory.
        self._free: list[BlockId] = list(map(BlockId, range(num_blocks - 1, -1, -1)))
        self._hash_to_block: dict[bytes, BlockId] = {}
        self._block_to_hash: dict[BlockId, bytes] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    def state_of(self, block: BlockId) -> str:
        """free, held, cached, granted or quarantined."""
        return STATE_NAMES[self._states[block]]

    @property
    def num_free(self) -> int:
        return self._num_in[FREE]

    @property
    def num_held(self) -> int:
        return self._num_in[HELD]

    @property
    def num_cached(self) -> int:
        """Cached blocks, pinned or not."""
        return self._num_in[CACHED]

    @property
    def num_granted(self) -> int:
        return self._num_in[GRANTED]

    @property
    def num_quarantined(self) -> int:
        return self._num_in[QUARANTINED]

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a pin."""
        return len(self._evictable)

    def available(self) -> int:
        """How many blocks `allocate` and `grant` can give now."""
        return len(self._free) + len(self._evictable)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` are cached, counted from the first; pins nothing."""
        return len(self._cached_prefix(hashes))

    def take_prefix(self, hashes: Sequence[bytes]) -> list[BlockId]:
        """The leading cached blocks, each pinned once for the caller, who releases them."""
        blocks = self._cached_prefix(hashes)
        for block in blocks:
            self._pin(block)
        return blocks

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks held by the caller, or None and no change if there are too few.

        Free blocks go first, then the cached blocks that were unpinned longest ago.
        """
        return self._take(count, HELD)

    def seal(self, block: BlockId, block_hash: bytes) -> bool:
        """Put a full, verified held block into the cache; its pins stay.

        False, and the block is still held, if another block has that content already.
        """
        assert self._states[block] == HELD, self._describe(block)
        if block_hash in self._hash_to_block:
            return False
        self._enter(block, block_hash)
        return True

    def check_seals(self, prefix: Sequence[BlockId]) -> bool:
        """Whether blocks from `take_prefix` hold what they were sealed with.

        Those that do not are held from now on, and no one finds them any more.
        """
        if self._checksum is None:
            return True
        broken = [block for block in prefix if self._checksum(block) != self._seals[block]]
        for block in broken:
            self._uncache(block)
            self._move(block, HELD)
        self.num_bad_seals += len(broken)
        return not broken

    def release(self, blocks: Iterable[BlockId]) -> None:
        """A request lets its blocks go, given in the order of its sequence.

        They are unpinned from the end, so that a sequence's tail is evicted before its head.
        """
        for block in reversed(list(blocks)):
            assert self._states[block] in (HELD, CACHED), self._describe(block)
            self._unpin(block)

    def release_tail(self, block: BlockId, key: bytes, token_ids: "array[int]") -> None:
        """A request lets its last block go, which holds only these tokens, for one to take over.

        It replaces another tail of that key. One that others still read is not kept.
        """
        if self._states[block] == HELD and self._pins[block] == 1:
            known = self._hash_to_block.get(key)
            if known is not None:
                self._discard_tail(known)
            self._enter(block, key)
            self._tails[block] = token_ids
        self._unpin(block)

    def take_tail(self, key: bytes, token_ids: "array[int]") -> tuple[BlockId, int] | None:
        """The tail of that key, held by the caller, and how many of `token_ids` it begins with.

        None, and no change, if it begins with none of them.
        """
        block = self._hash_to_block.get(key)
        if block is None:
            return None
        num_common = _num_common(self._tails[block], token_ids)
        if not num_common:
            return None
        if self._checksum is not None and self._checksum(block) != self._seals[block]:
            self.num_bad_seals += 1
            self._discard_tail(block)
            return None
        self._pin(block)
        self._uncache(block)
        self._move(block, HELD)
        return block, num_common

    def check(self) -> None:
        """Assert the invariants, in time proportional to the arena."""
        states, pins = self._states, self._pins
        assert self._num_in == [states.count(state) for state in range(5)]
        assert len(self._free) == len(set(self._free)) == self.num_free
        assert all(states[block] == FREE for block in self._free)
        assert all(pins[block] == 0 for block in self._free)
        assert len(self._block_to_hash) == len(self._hash_to_block) == self.num_cached
        for block, block_hash in self._block_to_hash.items():
            assert states[block] == CACHED
            assert self._hash_to_block[block_hash] == block
            assert (pins[block] == 0) == (block in self._evictable)
        assert all(states[block] == CACHED for block in self._evictable)
        assert all(block in self._evictable for block in self._tails)
        assert all(pins[block] for block in range(self.num_blocks) if states[block] == HELD)

    def _cached_prefix(self, hashes: Sequence[bytes]) -> list[BlockId]:
        blocks = []
        for block_hash in hashes:
            block = self._hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take(self, count: int, state: int) -> list[BlockId] | None:
        assert count >= 0, count
        if count > self.available():
            return None
        while len(self._free) < count:
            block, _ = self._evictable.popitem(last=False)
            self._uncache(block)
            self._move(block, FREE)
            self.num_evicted += 1
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._pins[block] = 1
            self._states[block] = state
        self._num_in[FREE] -= count
        self._num_in[state] += count
        return blocks

    def _enter(self, block: BlockId, key: bytes) -> None:
        self._hash_to_block[key] = block
        self._block_to_hash[block] = key
        self._move(block, CACHED)
        if self._checksum is not None:
            self._seals[block] = self._checksum(block)

    def _discard_tail(self, block: BlockId) -> None:
        del self._evictable[block]
        self._uncache(block)
        self._move(block, FREE)

    def _uncache(self, block: BlockId) -> None:
        del self._hash_to_block[self._block_to_hash.pop(block)]
        self._seals.pop(block, None)
        self._tails.pop(block, None)

    def _move(self, block: BlockId, state: int) -> None:
        self._num_in[self._states[block]] -= 1
        self._num_in[state] += 1
        self._states[block] = state
        if state == FREE:
            self._free.append(block)

    def _pin(self, block: BlockId) -> None:
        if not self._pins[block]:
            del self._evictable[block]
        self._pins[block] += 1

    def _unpin(self, block: BlockId) -> None:
        assert self._pins[block] > 0, self._describe(block)
        self._pins[block] -= 1
        if self._pins[block]:
            return
        if self._states[block] == CACHED:
            self._evictable[block] = None
        else:
            self._move(block, FREE)

    def _describe(self, block: BlockId) -> str:
        state = STATE_NAMES[self._states[block]]
        return f"block {block} is {state} with {self._pins[block]} pins"


def _num_common(one: "array[int]", other: "array[int]") -> int:
    """How many items from the first on are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
