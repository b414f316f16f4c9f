"""The ledger: who may read and who may write each block of one KV arena.

States of a block, and what moves it:

    free         allocate -> held, grant -> granted
    held         seal -> cached, last pin gone -> free
    cached       evicted by allocate or grant -> free, when it has no pin; broken seal -> held;
                 a tail, which is not full: take_tail -> held
    granted      commit -> held, stop or writer_died -> free, quarantine -> quarantined
    quarantined  stop, commit or writer_died -> free

Pins are counted beside the state, one for each request, lease or grant that uses a block:

- A held block is pinned by its request, and by the leases of peers that read it while the request
  goes on. If the request ends first, the block stays held until the last lease is gone.
- A cached block with pins is neither evicted nor written; without pins it waits, least recently
  used first, to be evicted. Its content never changes.
- A granted block is written by another process. It comes back only by that process's word
  (commit, stopped) or by its confirmed death: silence quarantines, it never frees.
- A grant pins the cached blocks in front of it, which its writer reads, for as long as it lives,
  and so does a quarantined one.

Calls about a grant or lease that has ended are no faults: answers of other processes come late
and twice. They change nothing, return None or False, and are counted in `num_late`. Releasing a
block that nobody holds is our own bug, and an assertion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from llmrt.kvtransfer.block_pool import CACHED, GRANTED, HELD, QUARANTINED, BlockPool
from llmrt.wire.ids import BlockId, GrantId, LeaseId, WorkerName


@dataclass(frozen=True, slots=True)
class Grant:
    """A writer's right: it reads `prefix`, which was cached before, and writes `blocks`."""

    grant_id: GrantId
    writer: WorkerName
    prefix: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    is_quarantined: bool = False

    @property
    def all_blocks(self) -> tuple[BlockId, ...]:
        """The block table of the sequence."""
        return self.prefix + self.blocks


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's right to `blocks` until `expires_at`, on the clock of the ledger's owner."""

    lease_id: LeaseId
    reader: WorkerName
    blocks: tuple[BlockId, ...]
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Blocks by state, whose sum is `num_blocks`; the unpinned of the cached; what goes on.

    `num_evicted` and `num_late` only grow.
    """

    num_blocks: int
    num_free: int
    num_held: int
    num_cached: int
    num_granted: int
    num_quarantined: int
    num_evictable: int
    num_grants: int
    num_leases: int
    num_evicted: int
    num_late: int


class Ledger(BlockPool):
    """Accounts for every block of one arena: the pool of blocks, and who has which right in it.

    Pure: it never touches the bytes, but to seal them by `checksum`. `generation` is that of the
    arena.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        generation: int = 0,
        checksum: Callable[[BlockId], int] | None = None,
    ) -> None:
        super().__init__(num_blocks, checksum=checksum)
        self.generation = generation
        self.num_late = 0
        self._grants: dict[GrantId, Grant] = {}
        self._writer_to_grants: dict[WorkerName, dict[GrantId, None]] = {}
        self._num_grants_made = 0
        self._leases: dict[LeaseId, Lease] = {}
        self._num_leases_made = 0
        # (expires_at, lease); an entry that disagrees with its lease was renewed or has ended.
        self._deadlines: list[tuple[float, LeaseId]] = []

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            num_blocks=self.num_blocks,
            num_free=self.num_free,
            num_held=self.num_held,
            num_cached=self.num_cached,
            num_granted=self.num_granted,
            num_quarantined=self.num_quarantined,
            num_evictable=self.num_evictable,
            num_grants=len(self._grants),
            num_leases=len(self._leases),
            num_evicted=self.num_evicted,
            num_late=self.num_late,
        )

    # Grants: others write

    def grant(
        self,
        writer: WorkerName,
        count: int,
        prefix: Sequence[BlockId],
        tail: Sequence[BlockId] = (),
    ) -> Grant | None:
        """The right of `writer` to write `tail` and `count` more behind `prefix`; None if too few.

        The caller's pins on `prefix`, from `take_prefix`, pass to the grant, and so does `tail`, at
        most one block, from `take_tail`; with None the caller keeps them.
        """
        for block in prefix:
            assert self._states[block] == CACHED, self._describe(block)
            assert self._pins[block], self._describe(block)
        blocks = self._take(count, GRANTED)
        if blocks is None:
            return None
        for block in tail:
            self._move(block, GRANTED)
        self._num_grants_made += 1
        grant = Grant(GrantId(self._num_grants_made), writer, tuple(prefix), (*tail, *blocks))
        self._grants[grant.grant_id] = grant
        self._writer_to_grants.setdefault(writer, {})[grant.grant_id] = None
        return grant

    def grants_of(self, writer: WorkerName) -> list[GrantId]:
        """Grants of that life of the writer that have not ended, quarantined ones too."""
        return list(self._writer_to_grants.get(writer, ()))

    def commit(self, grant_id: GrantId) -> list[BlockId] | None:
        """The writer is done: prefix and written blocks now belong to the request.

        None if the grant has ended. None too if it is quarantined, whose request went elsewhere:
        the writer's word that it is done then frees the blocks, as `stop` does.
        """
        grant = self._end(grant_id)
        if grant is None:
            return None
        if grant.is_quarantined:
            self.num_late += 1
            self._take_back(grant)
            return None
        for block in grant.blocks:
            self._move(block, HELD)
        return list(grant.all_blocks)

    def stop(self, grant_id: GrantId) -> bool:
        """The writer will write no more, or never began: its blocks are free.

        False if the grant has ended.
        """
        grant = self._end(grant_id)
        if grant is None:
            return False
        self._take_back(grant)
        return True

    def quarantine(self, grant_id: GrantId) -> bool:
        """The writer is silent and may still write: nobody gets its blocks.

        False if the grant has ended or is in quarantine already.
        """
        grant = self._grants.get(grant_id)
        if grant is None or grant.is_quarantined:
            self.num_late += 1
            return False
        for block in grant.blocks:
            self._move(block, QUARANTINED)
        self._grants[grant_id] = Grant(
            grant.grant_id, grant.writer, grant.prefix, grant.blocks, is_quarantined=True
        )
        return True

    def is_quarantined(self, grant_id: GrantId) -> bool:
        """True if the grant has not ended and its writer is not trusted."""
        grant = self._grants.get(grant_id)
        return grant is not None and grant.is_quarantined

    def writer_died(self, writer: WorkerName) -> list[GrantId]:
        """That very process is dead for certain: all its grants end, their blocks are free."""
        ended = self.grants_of(writer)
        for grant_id in ended:
            self.stop(grant_id)
        return ended

    # Leases: others read

    def lease(self, reader: WorkerName, blocks: Sequence[BlockId], expires_at: float) -> LeaseId:
        """The right of `reader` to read held or cached blocks, which stay as they are till then."""
        for block in blocks:
            assert self._states[block] in (HELD, CACHED), self._describe(block)
        for block in blocks:
            self._pin(block)
        self._num_leases_made += 1
        lease_id = LeaseId(self._num_leases_made)
        self._set_lease(Lease(lease_id, reader, tuple(blocks), expires_at))
        return lease_id

    def renew(self, lease_id: LeaseId, expires_at: float) -> bool:
        """Move the end of a lease; False if it has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            self.num_late += 1
            return False
        self._set_lease(Lease(lease_id, lease.reader, lease.blocks, expires_at))
        return True

    def is_leased(self, lease_id: LeaseId) -> bool:
        return lease_id in self._leases

    def leased_blocks(self, lease_id: LeaseId) -> tuple[BlockId, ...] | None:
        """The blocks of a lease, None if it has ended.

        One dictionary look-up, so the thread that serves a read may ask, too.
        """
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.blocks

    def release_lease(self, lease_id: LeaseId) -> bool:
        """End a lease; False if it has ended before."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            self.num_late += 1
            return False
        for block in reversed(lease.blocks):
            self._unpin(block)
        return True

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose time is over, and name them."""
        ended = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, lease_id = heappop(self._deadlines)
            self.release_lease(lease_id)
            ended.append(lease_id)
        return ended

    def reader_died(self, reader: WorkerName) -> list[LeaseId]:
        """End the leases of that life of a reader, and name them."""
        ended = [lease.lease_id for lease in self._leases.values() if lease.reader == reader]
        for lease_id in ended:
            self.release_lease(lease_id)
        return ended

    def next_deadline(self) -> float | None:
        """When the next lease expires."""
        while self._deadlines:
            expires_at, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at:
                return expires_at
            heappop(self._deadlines)
        return None

    def check(self) -> None:
        """Assert the invariants, in time proportional to the arena."""
        super().check()
        states, pins = self._states, self._pins
        known = [0] * self.num_blocks
        for grant in self._grants.values():
            state = QUARANTINED if grant.is_quarantined else GRANTED
            assert all(states[block] == state for block in grant.blocks)
            # Held if its seal was found broken after it was granted.
            assert all(states[block] in (CACHED, HELD) for block in grant.prefix)
            assert grant.grant_id in self._writer_to_grants[grant.writer]
            for block in grant.all_blocks:
                known[block] += 1
        granted = [block for grant in self._grants.values() for block in grant.blocks]
        assert len(granted) == len(set(granted)) == self.num_granted + self.num_quarantined
        assert all(pins[block] == 1 for block in granted)
        assert sum(map(len, self._writer_to_grants.values())) == len(self._grants)

        deadlines = set(self._deadlines)
        for lease in self._leases.values():
            assert (lease.expires_at, lease.lease_id) in deadlines
            for block in lease.blocks:
                assert states[block] in (HELD, CACHED)
                known[block] += 1
        assert all(pins[block] >= known[block] for block in range(self.num_blocks))

    def _end(self, grant_id: GrantId) -> Grant | None:
        grant = self._grants.pop(grant_id, None)
        if grant is None:
            self.num_late += 1
            return None
        grants = self._writer_to_grants[grant.writer]
        del grants[grant_id]
        if not grants:
            del self._writer_to_grants[grant.writer]
        return grant

    def _take_back(self, grant: Grant) -> None:
        for block in reversed(grant.all_blocks):
            self._unpin(block)

    def _set_lease(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease
        heappush(self._deadlines, (lease.expires_at, lease.lease_id))
