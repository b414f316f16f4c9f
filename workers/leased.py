"""A hand-over by reading: P computes in its own arena, and we copy its blocks into ours. Pure.

    reading     chunks come and are read while P computes the next
    confirming  all is read and committed; P is asked whether the lease still holds

The writer of the ledger's grant is this worker itself, so it ends when no read is under way.
"""

from array import array
from dataclasses import dataclass, field

from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u32
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import ReadBlocks
from llmrt.workers.handover import Handover
from llmrt.workers.links import PeerLinks


class BlockReads:
    """The reads under way, by their id."""

    def __init__(self, context: WorkerContext, links: PeerLinks) -> None:
        self._context = context
        self._links = links
        self._last_read_id = 0
        self._under_way: dict[int, LeasedPrefill] = {}
        self.num_blocks = 0

    def start(self, reader: "LeasedPrefill", source: "array[int]", target: "array[int]") -> int:
        """Read blocks `source` of the peer into our `target`; returns the id of the read."""
        self._last_read_id += 1
        self.num_blocks += len(source)
        self._under_way[self._last_read_id] = reader
        self._context.do(
            ReadBlocks(
                self._last_read_id,
                reader.peer,
                self._links.bulk_address(reader.peer),
                reader.lease_id,
                reader.lease_generation,
                source,
                target,
            )
        )
        return self._last_read_id

    def returned(self, read_id: int) -> "LeasedPrefill | None":
        """Whose read that was."""
        return self._under_way.pop(read_id, None)


@dataclass(slots=True, eq=False, kw_only=True)
class LeasedPrefill(Handover):
    """We have the right to read. `num_read` blocks are read or being read."""

    block_reads: BlockReads
    commit: m.Commit | None = None
    lease_id: int = 0
    lease_generation: int = 0
    renewed_at: float = 0.0
    reads: set[int] = field(default_factory=set)
    num_read: int = 0

    # -- answers of P ------------------------------------------------------------------------

    def chunk(self, chunk: m.Chunk, raw: bytes) -> None:
        """Blocks of P may be read: those that we lack are read at once, while P goes on."""
        self.lease_id, self.lease_generation = chunk.lease_id, chunk.arena_generation
        source = unpack_u32(raw)
        table = self.grant.all_blocks
        first = max(len(self.grant.prefix), self.num_read)
        last = chunk.first_block + len(source)
        # A chunk behind a lost one leaves a gap; P sends all of them again with its next beat.
        is_next = chunk.first_block <= first < last <= len(table)
        if self.is_ending or not is_next:
            return
        self.num_read = last
        source, target = source[first - chunk.first_block :], array("I", table[first:last])
        self.reads.add(self.block_reads.start(self, source, target))

    def read(self, read_id: int, failure: m.Failure | None) -> None:
        """A read has returned."""
        self.reads.discard(read_id)
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
        else:
            self._confirm_if_complete()

    def committed(self, commit: m.Commit) -> None:
        if self.commit is None:
            self.commit = commit
            self._confirm_if_complete()

    def confirmed(self, state: m.LeaseState) -> None:
        """P says whether the lease held until now, after our last read."""
        if self.lease_id != state.lease_id or self.commit is None or self.reads:
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
        self._confirm_if_complete()

    # -- details -----------------------------------------------------------------------------

    def _confirm_if_complete(self) -> None:
        """Ask whether the lease still holds, once everything is read and the commit is here."""
        is_complete = max(self.num_read, len(self.grant.prefix)) == len(self.grant.all_blocks)
        if self.commit is not None and is_complete and not self.reads and not self.is_ending:
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
