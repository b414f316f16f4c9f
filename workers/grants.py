"""Prompts that other workers compute for this one: grants, offers, and how each ends. Pure.

One record per grant, which may outlive its request. `mode` grant: P writes into our blocks.
`mode` lease: P computes in its own arena, and we read its blocks into ours.

    offered    OFFER sent, again every beat until P says that it holds it
    held       P says so every beat; silent for `SILENCE_S`, it is given up and avoided
    reading    (lease) chunks come and are read
    confirming (lease) all is read; P is asked whether the lease still holds
    ending     not wanted any more: WITHDRAW every beat until STOPPED or COMMIT

The ledger's record of a grant ends by COMMIT, by STOPPED or by the confirmed death of the writer.
In mode lease the writer is this worker itself, so it ends when no read is under way.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.layout import blocks_for
from llmrt.kvtransfer.ledger import Grant
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, unpack_u32
from llmrt.wire.ids import Attempt, BlockId, GrantId, RequestId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import ReadBlocks
from llmrt.workers.links import GRANT, PeerLinks

# Beats of P that may be lost in a row; much less than the deadline of any request.
SILENCE_S = 5.0


@dataclass(slots=True, eq=False)
class OpenGrant:
    """A grant that has not ended. `sequence` is None once its request has gone elsewhere."""

    grant: Grant
    peer: WorkerName
    mode: str
    request_id: RequestId
    attempt: Attempt
    deadline: float | None
    sequence: Sequence | None
    offer: m.Offer
    raw: list[bytes]
    offered_at: float
    heard_at: float
    is_held: bool = False
    is_ending: bool = False
    commit: m.Commit | None = None
    committed_at: float = 0.0
    lease_id: int = 0
    lease_generation: int = 0
    renewed_at: float = 0.0
    reads: set[int] = field(default_factory=set)
    num_read: int = 0

    @property
    def grant_id(self) -> GrantId:
        return self.grant.grant_id


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt's KV is complete in our blocks, and verified to be what P committed."""

    sequence: Sequence
    blocks: list[BlockId]
    num_sealed: int
    commit: m.Commit
    offered_at: float
    committed_at: float
    peer: WorkerName


class OutgoingGrants:
    """Table of open grants. `arrived` and `failed` say what became of a parked sequence."""

    def __init__(
        self,
        context: WorkerContext,
        links: PeerLinks,
        *,
        arrived: Callable[[Arrival], None],
        failed: Callable[[Sequence, str], None],
    ) -> None:
        self._context = context
        self._links = links
        self._arrived = arrived
        self._failed = failed
        self._open: dict[GrantId, OpenGrant] = {}
        self._read_to_grant: dict[int, GrantId] = {}
        self._last_read_id = 0
        self.num_blocks_read = 0

    # -- making offers -----------------------------------------------------------------------

    def offer(
        self,
        sequence: Sequence,
        peer: WorkerName,
        request_id: RequestId,
        attempt: Attempt,
        *,
        deadline: float | None,
    ) -> bool:
        """Grant room for a waiting sequence and offer it to `peer`; False if there is none."""
        context, ledger = self._context, self._context.ledger
        mode = self._links.mode_to(peer)
        assert mode is not None
        prefix = ledger.take_prefix(context.scheduler.prefix_hashes(sequence))
        missing = blocks_for(len(sequence.token_ids)) - len(prefix)
        writer = peer if mode == GRANT else context.settings.name
        has_room = context.scheduler.has_room(missing)
        grant = ledger.grant(writer, missing, prefix) if has_room else None
        if grant is None:
            ledger.release(prefix)
            return False
        if sequence.num_preemptions == 0:
            sequence.num_cached = len(prefix) * BLOCK_TOKENS
        context.scheduler.park(sequence, len(grant.all_blocks))
        opened = OpenGrant(
            grant=grant,
            peer=peer,
            mode=mode,
            request_id=request_id,
            attempt=attempt,
            deadline=deadline,
            sequence=sequence,
            offer=m.Offer(
                grant_id=grant.grant_id,
                arena_generation=context.settings.arena_generation,
                mode=mode,
                num_given=len(prefix) * BLOCK_TOKENS,
                num_prompt=sequence.num_prompt,
                sampling=sequence.params,
                seed=sequence.seed,
                priority=sequence.priority,
            ),
            raw=[
                pack_u32(sequence.token_ids),
                pack_u32(grant.all_blocks) if mode == GRANT else b"",
            ],
            offered_at=context.now,
            heard_at=context.now,
        )
        self._open[grant.grant_id] = opened
        self._send_offer(opened)
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """The request of a parked sequence has ended or goes elsewhere."""
        for opened in self._open.values():
            if opened.sequence is sequence:
                self._give_up(opened)
                return

    # -- answers of P ------------------------------------------------------------------------

    def held(self, sender: WorkerName, grant_id: int) -> None:
        """P has the offer, and lives."""
        opened = self._find(sender, grant_id)
        if opened is not None:
            opened.is_held = True

    def committed(self, sender: WorkerName, commit: m.Commit) -> None:
        opened = self._find(sender, commit.grant_id)
        if opened is None:
            # It ended here; P must be told so, or it would go on saying it.
            ref = m.GrantRef(grant_id=commit.grant_id)
            self._context.send_peer(sender, m.COMMITTED, ref)
            if commit.lease_id:
                self._release_lease(sender, commit.grant_id, commit.lease_id, 0)
            return
        if opened.commit is not None:
            return
        opened.commit = commit
        opened.committed_at = self._context.now
        if opened.mode == GRANT:
            self._close_granted(opened)
        else:
            self._read_on(opened)

    def stopped(self, sender: WorkerName, grant_id: int, reason: str) -> None:
        opened = self._find(sender, grant_id)
        if opened is None:
            return
        if opened.sequence is not None:
            self._detach(opened, reason)
        if opened.mode == GRANT:
            self._context.ledger.stop(opened.grant_id)
            del self._open[opened.grant_id]
        else:
            opened.is_ending = True
            self._end_if_read(opened)

    def chunk(self, sender: WorkerName, chunk: m.Chunk, raw: bytes) -> None:
        """Blocks of P may be read: those that we lack are read at once, while P goes on."""
        opened = self._find(sender, chunk.grant_id)
        if opened is None:
            self._release_lease(sender, chunk.grant_id, chunk.lease_id, chunk.arena_generation)
            return
        opened.lease_id, opened.lease_generation = chunk.lease_id, chunk.arena_generation
        source = unpack_u32(raw)
        table = opened.grant.all_blocks
        first = max(len(opened.grant.prefix), opened.num_read)
        last = chunk.first_block + len(source)
        # A chunk behind a lost one leaves a gap; P sends all of them again with its next beat.
        is_next = chunk.first_block <= first < last <= len(table)
        if opened.is_ending or not is_next:
            return
        opened.num_read = last
        self._read(opened, source[first - chunk.first_block :], array("I", table[first:last]))

    def lease_confirmed(self, sender: WorkerName, state: m.LeaseState) -> None:
        opened = self._find(sender, state.grant_id)
        if opened is None or opened.lease_id != state.lease_id or opened.commit is None:
            return
        if opened.reads:
            return
        if state.is_held:
            self._close_leased(opened)
        else:
            self._context.counters["leases_lost"] += 1
            self._give_up(opened, "the lease on the prefill worker's blocks had ended")

    def blocks_read(self, read_id: int, failure: m.Failure | None) -> None:
        grant_id = self._read_to_grant.pop(read_id, None)
        opened = self._open.get(grant_id) if grant_id is not None else None
        if opened is None:
            return
        opened.reads.discard(read_id)
        if failure is not None:
            self._context.log(
                "kv.transfer_failed",
                "warning",
                request_id=opened.request_id.hex(),
                peer=opened.peer.worker_id,
                error=failure.message,
            )
            self._give_up(opened, failure.message)
        elif opened.is_ending:
            self._end_if_read(opened)
        else:
            self._read_on(opened)

    # -- peers come and go -------------------------------------------------------------------

    def peer_delisted(self, peer: WorkerName) -> None:
        """The broker has lost `peer`: its prompts go elsewhere; its grants wait for its end."""
        for opened in self._of(peer):
            self._abandon(opened, "the prefill worker is lost")

    def peer_died(self, peer: WorkerName) -> None:
        """Confirmed: that process can write no more."""
        opened_grants = self._of(peer)
        self._context.ledger.writer_died(peer)
        for opened in opened_grants:
            if opened.sequence is not None:
                self._detach(opened, "the prefill worker died")
            if opened.mode == GRANT:
                del self._open[opened.grant_id]
            else:
                opened.is_ending = True
                self._end_if_read(opened)

    # -- time --------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say again what was not answered; renew leases; give up on the silent."""
        settings, now = self._context.settings, self._context.now
        for opened in [o for o in self._open.values() if now - o.heard_at >= SILENCE_S]:
            if opened.sequence is not None:
                self._links.avoid(opened.peer)
                self._abandon(opened, f"the prefill worker said nothing for {SILENCE_S:g} s")
        for opened in self._open.values():
            if opened.is_ending:
                self._send_withdraw(opened)
            elif not opened.is_held:
                self._send_offer(opened)
            if opened.lease_id and now - opened.renewed_at >= settings.lease_renew_s:
                opened.renewed_at = now
                self._context.send_peer(opened.peer, m.LEASE_RENEW, self._lease_ref(opened))
            if opened.commit is not None and not opened.reads and not opened.is_ending:
                self._read_on(opened)

    def __len__(self) -> int:
        return len(self._open)

    def check(self) -> None:
        parked = self._context.scheduler.parked.values()
        owners = [o.sequence for o in self._open.values() if o.sequence is not None]
        assert len(owners) == len(parked)
        assert all(sequence in owners for sequence in parked)

    # -- details -----------------------------------------------------------------------------

    def _find(self, sender: WorkerName, grant_id: int) -> OpenGrant | None:
        opened = self._open.get(GrantId(grant_id))
        if opened is None or opened.peer != sender:
            self._context.counters["late_grant_messages"] += 1
            return None
        opened.heard_at = self._context.now
        return opened

    def uses(self, peer: WorkerName) -> bool:
        return any(opened.peer == peer for opened in self._open.values())

    def _of(self, peer: WorkerName) -> list[OpenGrant]:
        return [opened for opened in self._open.values() if opened.peer == peer]

    def _send_offer(self, opened: OpenGrant) -> None:
        deadline = opened.deadline
        self._context.send_peer(
            opened.peer,
            m.OFFER,
            opened.offer,
            request_id=opened.request_id,
            attempt=opened.attempt,
            budget_s=None if deadline is None else deadline - self._context.now,
            raw=opened.raw,
        )

    def _send_withdraw(self, opened: OpenGrant) -> None:
        ref = m.GrantRef(grant_id=opened.grant_id)
        self._context.send_peer(opened.peer, m.WITHDRAW, ref, request_id=opened.request_id)

    def _abandon(self, opened: OpenGrant, reason: str) -> None:
        """P is silent: it may still write, so nobody gets its blocks until it has ended."""
        if opened.mode == GRANT and self._context.ledger.quarantine(opened.grant_id):
            self._context.log(
                "kv.grant_quarantined",
                "warning",
                request_id=opened.request_id.hex(),
                peer=opened.peer.worker_id,
                num_blocks=len(opened.grant.blocks),
            )
        self._give_up(opened, reason)

    def _give_up(self, opened: OpenGrant, reason: str = "") -> None:
        """End a grant from our side; its sequence, if it has one, waits again."""
        if opened.sequence is not None and reason:
            self._detach(opened, reason)
        opened.sequence = None
        if not opened.is_ending:
            opened.is_ending = True
            self._send_withdraw(opened)
        if opened.mode != GRANT:
            self._end_if_read(opened)

    def _detach(self, opened: OpenGrant, reason: str) -> None:
        sequence, opened.sequence = opened.sequence, None
        if sequence is not None:
            self._failed(sequence, reason)

    def _close_granted(self, opened: OpenGrant) -> None:
        assert opened.commit is not None
        ledger = self._context.ledger
        del self._open[opened.grant_id]
        self._context.send_peer(
            opened.peer,
            m.COMMITTED,
            m.GrantRef(grant_id=opened.grant_id),
            request_id=opened.request_id,
        )
        if opened.sequence is None:
            ledger.stop(opened.grant_id)
        else:
            self._arrive(opened, opened.sequence)

    def _close_leased(self, opened: OpenGrant) -> None:
        del self._open[opened.grant_id]
        self._context.send_peer(opened.peer, m.LEASE_RELEASE, self._lease_ref(opened))
        assert opened.sequence is not None
        self._arrive(opened, opened.sequence)

    def _arrive(self, opened: OpenGrant, sequence: Sequence) -> None:
        assert opened.commit is not None
        blocks = self._context.ledger.commit(opened.grant_id)
        assert blocks is not None
        self._arrived(
            Arrival(
                sequence=sequence,
                blocks=blocks,
                num_sealed=len(opened.grant.prefix),
                commit=opened.commit,
                offered_at=opened.offered_at,
                committed_at=opened.committed_at,
                peer=opened.peer,
            )
        )

    def _read(self, opened: OpenGrant, source: "array[int]", target: "array[int]") -> None:
        self._last_read_id += 1
        self.num_blocks_read += len(source)
        opened.reads.add(self._last_read_id)
        self._read_to_grant[self._last_read_id] = opened.grant_id
        self._context.do(
            ReadBlocks(
                self._last_read_id,
                opened.peer,
                self._links.bulk_address(opened.peer),
                opened.lease_id,
                opened.lease_generation,
                source,
                target,
            )
        )

    def _read_on(self, opened: OpenGrant) -> None:
        """Ask for confirmation once everything is read and the commit is here."""
        is_complete = max(opened.num_read, len(opened.grant.prefix)) == len(opened.grant.all_blocks)
        if opened.commit is not None and is_complete and not opened.reads and not opened.is_ending:
            self._context.send_peer(opened.peer, m.LEASE_CONFIRM, self._lease_ref(opened))

    def _end_if_read(self, opened: OpenGrant) -> None:
        """(lease) Nobody writes into our blocks once no read is under way."""
        if opened.reads or opened.grant_id not in self._open:
            return
        del self._open[opened.grant_id]
        self._context.ledger.stop(opened.grant_id)
        if opened.lease_id:
            self._context.send_peer(opened.peer, m.LEASE_RELEASE, self._lease_ref(opened))

    def _lease_ref(self, opened: OpenGrant) -> m.LeaseRef:
        return m.LeaseRef(
            grant_id=opened.grant_id,
            lease_id=opened.lease_id,
            arena_generation=opened.lease_generation,
        )

    def _release_lease(
        self, peer: WorkerName, grant_id: int, lease_id: int, generation: int
    ) -> None:
        ref = m.LeaseRef(grant_id=grant_id, lease_id=lease_id, arena_generation=generation)
        self._context.send_peer(peer, m.LEASE_RELEASE, ref)
