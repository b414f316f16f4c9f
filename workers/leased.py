"""A hand-over by reading: P computes in its own arena, and we copy its blocks into ours. Pure.

    reading     chunks come and are read while P computes the next; what is read is hashed, and read
                once more if it is not what P had
    confirming  all is read, compared and committed; P is asked whether the lease still holds

The writer of the ledger's grant is this worker itself, so it ends when no read is under way.
"""

from array import array
from dataclasses import dataclass, field, replace

from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u32, unpack_u64
from llmrt.wire.ids import WorkerName
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import ReadBlocks
from llmrt.workers.events import ArenaShape
from llmrt.workers.handover import Handover
from llmrt.workers.links import PeerLinks

# P announces all that it has with every beat: one that lacks blocks for longer never has them.
ANNOUNCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `first` to before `last` of the table, which are `source` in P's arena."""

    first: int
    last: int
    source: "array[int]"
    is_second_try: bool = False


class BlockReads:
    """The reads under way, by their id."""

    def __init__(self, context: WorkerContext, links: PeerLinks) -> None:
        self._context = context
        self._links = links
        self._last_read_id = 0
        self._under_way: dict[int, LeasedPrefill] = {}
        self.num_blocks = 0

    def start(self, reader: "LeasedPrefill", part: Part) -> int:
        """Read a part of the peer's blocks into ours; returns the id of the read."""
        self._last_read_id += 1
        self.num_blocks += len(part.source)
        self._under_way[self._last_read_id] = reader
        self._context.do(
            ReadBlocks(
                self._last_read_id,
                reader.peer,
                self._links.bulk_address(reader.peer),
                reader.lease_id,
                reader.lease_generation,
                part.source,
                array("I", reader.grant.all_blocks[part.first : part.last]),
            )
        )
        return self._last_read_id

    def returned(self, read_id: int) -> "LeasedPrefill | None":
        """Whose read that was."""
        return self._under_way.pop(read_id, None)

    def arena_of(self, peer: WorkerName) -> ArenaShape | None:
        return self._links.arena_of(peer)


@dataclass(slots=True, eq=False, kw_only=True)
class LeasedPrefill(Handover):
    """We have the right to read. `num_read` blocks are read or being read.

    `reads` are under way, `comparing` what was read and is being hashed; `expected` are P's
    checksums by the index of their block.
    """

    block_reads: BlockReads
    commit: m.Commit | None = None
    committed_at: float = 0.0
    lease_id: int = 0
    lease_generation: int = 0
    renewed_at: float = 0.0
    reads: dict[int, Part] = field(default_factory=dict)
    comparing: dict[int, Part] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    num_read: int = 0

    # -- answers of P ------------------------------------------------------------------------

    def chunk(self, chunk: m.Chunk, raw_blocks: bytes, raw_checksums: bytes) -> None:
        """Blocks of P may be read: those that we lack are read at once, while P goes on."""
        source, checksums = unpack_u32(raw_blocks), unpack_u64(raw_checksums)
        if self.is_ending:
            return
        last = chunk.first_block + len(source)
        indices = self.checked.within(chunk.first_block, last)
        refusal = self._misfit(chunk, source, len(checksums), len(indices))
        if refusal is not None:
            self.context.counters["chunks_refused"] += 1
            self.abandon(refusal)
            return
        self.lease_id, self.lease_generation = chunk.lease_id, chunk.arena_generation
        first = max(len(self.grant.prefix), self.num_read)
        # A chunk behind a lost one leaves a gap; P sends all of them again with its next beat.
        if chunk.first_block <= first < last:
            self.num_read = last
            self.expected.update(zip(indices, checksums, strict=True))
            self._read(Part(first, last, source[first - chunk.first_block :]))

    def read(self, read_id: int, failure: m.Failure | None) -> None:
        """A read has returned."""
        part = self.reads.pop(read_id)
        if failure is not None:
            self.context.log(
                "kv.transfer_failed",
                "warning",
                request_id=self.request_id.hex(),
                peer=self.peer.worker_id,
                error=failure.message,
            )
            self.abandon(failure.message)
        elif self.is_ending:
            self._end_if_read()
        elif indices := self.checked.within(part.first, part.last):
            blocks = [self.grant.all_blocks[i] for i in indices]
            self.comparing[self.checks.start(self, blocks)] = part
        else:
            self._confirm_if_complete()

    def hashed(self, hash_id: int, checksums: "array[int]") -> None:
        part = self.comparing.pop(hash_id)
        if self.is_ending:
            return
        indices = self.checked.within(part.first, part.last)
        expected = array("Q", [self.expected[i] for i in indices])
        if self.compare(
            indices,
            expected,
            checksums,
            lease_id=self.lease_id,
            generation=self.lease_generation,
            is_second_try=part.is_second_try,
        ):
            self._confirm_if_complete()
        elif part.is_second_try:
            self.abandon("its blocks do not hold what the prefill worker has, read twice")
        else:
            self._read(replace(part, is_second_try=True))

    def committed(self, commit: m.Commit, checksums: bytes) -> None:
        """The checksums came with the chunks."""
        if self.commit is None:
            self.commit, self.committed_at = commit, self.context.now
            self._confirm_if_complete()

    def confirmed(self, state: m.LeaseState) -> None:
        """P says whether the lease held until now, after our last read."""
        if self.lease_id != state.lease_id or self.commit is None or not self._is_complete():
            return
        if state.is_held:
            self._send_lease(m.LEASE_RELEASE)
            self.arrive(self.commit)
        else:
            self.context.counters["leases_lost"] += 1
            self.abandon("the lease on the prefill worker's blocks had ended")

    def stopped(self, reason: str) -> None:
        self.detach(reason)
        self.is_ending = True
        self._end_if_read()

    # -- ends from our side ------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        self.detach(reason)
        self.withdraw()

    def died(self) -> None:
        self.stopped("the prefill worker died")

    def withdraw(self) -> None:
        self.begin_end()
        self._end_if_read()

    # -- time --------------------------------------------------------------------------------

    def beat(self) -> None:
        Handover.beat(self)
        now = self.context.now
        if self.lease_id and now - self.renewed_at >= self.context.settings.lease_renew_s:
            self.renewed_at = now
            self._send_lease(m.LEASE_RENEW)
        is_late = self.commit is not None and now - self.committed_at >= ANNOUNCE_S
        if is_late and not self.is_ending and not self._is_announced():
            self.abandon("it committed, and did not announce all blocks")
        self._confirm_if_complete()

    # -- details -----------------------------------------------------------------------------

    def _misfit(
        self, chunk: m.Chunk, source: "array[int]", num_checksums: int, num_checked: int
    ) -> str | None:
        """Why a chunk cannot be one of this offer, None if it can."""
        arena = self.block_reads.arena_of(self.peer)
        generation = chunk.arena_generation
        num_table = len(self.grant.all_blocks)
        if arena is None or generation != arena.generation:
            known = None if arena is None else arena.generation
            return f"a chunk is of arena generation {generation}, and the peer's is {known}"
        if self.lease_id not in (0, chunk.lease_id):
            return f"a chunk is of lease {chunk.lease_id}, those before were of {self.lease_id}"
        if not 0 <= chunk.first_block <= chunk.first_block + len(source) <= num_table:
            return f"{len(source)} blocks from {chunk.first_block} on are not in {num_table}"
        if source and max(source) >= arena.num_blocks:
            return f"a chunk names block {max(source)}, and the peer has {arena.num_blocks}"
        if len(set(source)) != len(source):
            return "a chunk names a block twice"
        if num_checksums != num_checked:
            return f"{num_checksums} checksums came for {num_checked} blocks"
        return None

    def _read(self, part: Part) -> None:
        self.reads[self.block_reads.start(self, part)] = part

    def _is_announced(self) -> bool:
        return max(self.num_read, len(self.grant.prefix)) == len(self.grant.all_blocks)

    def _is_complete(self) -> bool:
        """All blocks are here, and compared."""
        return self._is_announced() and not self.reads and not self.comparing

    def _confirm_if_complete(self) -> None:
        """Ask whether the lease still holds, once everything is here and committed."""
        if self.commit is not None and self._is_complete() and not self.is_ending:
            self._send_lease(m.LEASE_CONFIRM)

    def _end_if_read(self) -> None:
        """Nobody writes into our blocks once no read is under way."""
        if self.reads or self.is_over:
            return
        self.is_over = True
        self.context.ledger.stop(self.grant_id)
        if self.lease_id:
            self._send_lease(m.LEASE_RELEASE)

    def _send_lease(self, kind: str) -> None:
        ref = m.LeaseRef(
            grant_id=self.grant_id,
            lease_id=self.lease_id,
            arena_generation=self.lease_generation,
        )
        self.context.send_peer(self.peer, kind, ref)
