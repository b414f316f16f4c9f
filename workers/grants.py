"""Prompts that other workers compute for this one: the table of open hand-overs. Pure.

How each goes on and ends is its own business: `granted.py` if P writes into our blocks, `leased.py`
if we read those of P.
"""

from array import array

from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.layout import blocks_for
from llmrt.kvtransfer.ledger import Grant
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32
from llmrt.wire.ids import Attempt, GrantId, RequestId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.context import WorkerContext
from llmrt.workers.fencing import Fencing
from llmrt.workers.granted import GrantedPrefill
from llmrt.workers.handover import BlockChecks, Handover, OutgoingOffer, PromptOwner
from llmrt.workers.leased import BlockReads, LeasedPrefill
from llmrt.workers.links import GRANT, PeerLinks


class OutgoingGrants:
    """Hand-overs by the id of their grant. `owner` learns what became of a parked sequence."""

    def __init__(self, context: WorkerContext, links: PeerLinks, owner: PromptOwner) -> None:
        self._context = context
        self._links = links
        self._owner = owner
        self._reads = BlockReads(context, links)
        self._checks = BlockChecks(context)
        self._fencing = Fencing(context)
        self._open: dict[GrantId, Handover] = {}

    @property
    def num_blocks_read(self) -> int:
        return self._reads.num_blocks

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
        mode = self._links.mode_to(peer)
        assert mode is not None
        is_in_place = mode == GRANT
        grant = self._grant(sequence, peer if is_in_place else self._context.settings.name)
        if grant is None:
            return False
        if sequence.num_preemptions == 0:
            sequence.num_cached = len(grant.prefix) * BLOCK_TOKENS
        self._context.scheduler.park(sequence, len(grant.all_blocks))
        body = self._offer_body(sequence, grant, mode)
        raw = [
            pack_u32(sequence.token_ids),
            pack_u32(grant.all_blocks) if is_in_place else b"",
        ]
        offer = OutgoingOffer(request_id, attempt, deadline, body, raw)
        parts = (self._context, self._owner, self._checks, peer, grant, offer, sequence)
        opened = (
            GrantedPrefill(*parts)
            if is_in_place
            else LeasedPrefill(*parts, block_reads=self._reads)
        )
        self._open[grant.grant_id] = opened
        opened.send_offer()
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """The request of a parked sequence has ended or goes elsewhere."""
        for opened in self._open.values():
            if opened.sequence is sequence:
                opened.withdraw()
                self._settle(opened)
                return

    # -- answers of P ------------------------------------------------------------------------

    def held(self, sender: WorkerName, held: m.OfferHeld) -> None:
        """P has the offer, and lives."""
        self._context.costs.reported(sender, held.num_foreign_tokens, self._context.now)
        opened = self._find(sender, held.grant_id)
        if opened is not None:
            opened.is_held = True

    def committed(self, sender: WorkerName, commit: m.Commit, checksums: bytes) -> None:
        opened = self._find(sender, commit.grant_id)
        if opened is not None:
            opened.committed(commit, checksums)
            self._settle(opened)
            return
        # It ended here; P must be told so, or it would go on saying it.
        self._context.send_peer(sender, m.COMMITTED, m.GrantRef(grant_id=commit.grant_id))
        if commit.lease_id:
            self._release_lease(sender, commit.grant_id, commit.lease_id, 0)

    def stopped(self, sender: WorkerName, grant_id: int, reason: str) -> None:
        opened = self._find(sender, grant_id)
        if opened is not None:
            opened.stopped(reason)
            self._settle(opened)

    def chunk(
        self, sender: WorkerName, chunk: m.Chunk, raw_blocks: bytes, raw_checksums: bytes
    ) -> None:
        """Blocks of P may be read."""
        opened = self._find(sender, chunk.grant_id)
        if isinstance(opened, LeasedPrefill):
            opened.chunk(chunk, raw_blocks, raw_checksums)
            self._settle(opened)
        else:
            self._release_lease(sender, chunk.grant_id, chunk.lease_id, chunk.arena_generation)

    def lease_confirmed(self, sender: WorkerName, state: m.LeaseState) -> None:
        opened = self._find(sender, state.grant_id)
        if isinstance(opened, LeasedPrefill):
            opened.confirmed(state)
            self._settle(opened)

    def blocks_read(self, read_id: int, failure: m.Failure | None) -> None:
        opened = self._reads.returned(read_id)
        if opened is not None:
            opened.read(read_id, failure)
            self._settle(opened)

    def blocks_hashed(self, hash_id: int, checksums: "array[int]") -> None:
        opened = self._checks.returned(hash_id)
        if opened is not None:
            opened.hashed(hash_id, checksums)
            self._settle(opened)

    # -- peers come and go -------------------------------------------------------------------

    def peer_delisted(self, peer: WorkerName) -> None:
        """The broker has lost `peer`: its prompts go elsewhere; its grants wait for its end."""
        for opened in self._of(peer):
            opened.abandon("the prefill worker is lost")
            self._settle(opened)

    def peer_died(self, peer: WorkerName) -> None:
        """Confirmed: that process can write no more."""
        self._context.ledger.writer_died(peer)
        self._fencing.died(peer)
        for opened in self._of(peer):
            opened.died()
            self._settle(opened)

    # -- time --------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give up on the silent, and say again what was not answered."""
        for opened in self._open.values():
            opened.silent_beats += 1
        for opened in [o for o in self._open.values() if o.is_silent]:
            if opened.sequence is not None:
                self._links.avoid(opened.peer)
                opened.abandon(f"the prefill worker said nothing for {opened.silent_s:g} s")
                self._settle(opened)
        for opened in list(self._open.values()):
            opened.beat()
            self._settle(opened)
        self._fencing.beat(o for o in self._open.values() if isinstance(o, GrantedPrefill))

    def __len__(self) -> int:
        return len(self._open)

    def uses(self, peer: WorkerName) -> bool:
        return any(opened.peer == peer for opened in self._open.values())

    def check(self) -> None:
        parked = self._context.scheduler.parked.values()
        owners = [o.sequence for o in self._open.values() if o.sequence is not None]
        assert len(owners) == len(parked)
        assert all(sequence in owners for sequence in parked)
        assert not any(opened.is_over for opened in self._open.values())

    # -- details -----------------------------------------------------------------------------

    def _find(self, sender: WorkerName, grant_id: int) -> Handover | None:
        opened = self._open.get(GrantId(grant_id))
        if opened is None or opened.peer != sender:
            self._context.counters["late_grant_messages"] += 1
            return None
        opened.silent_beats = 0
        return opened

    def _of(self, peer: WorkerName) -> list[Handover]:
        return [opened for opened in self._open.values() if opened.peer == peer]

    def _settle(self, opened: Handover) -> None:
        if opened.is_over:
            self._open.pop(opened.grant_id, None)

    def _grant(self, sequence: Sequence, writer: WorkerName) -> Grant | None:
        """Room for all of the prompt behind what is cached of it."""
        scheduler, ledger = self._context.scheduler, self._context.ledger
        prefix = ledger.take_prefix(scheduler.prefix_hashes(sequence))
        missing = blocks_for(len(sequence.token_ids)) - len(prefix)
        if not scheduler.has_room_for_grant(sequence, missing):
            ledger.release(prefix)
            return None
        if not ledger.check_seals(prefix):
            ledger.release(prefix)
            return self._grant(sequence, writer)  # without the blocks that had changed
        grant = ledger.grant(writer, missing, prefix)
        if grant is None:
            ledger.release(prefix)
        return grant

    def _offer_body(self, sequence: Sequence, grant: Grant, mode: str) -> m.Offer:
        return m.Offer(
            grant_id=grant.grant_id,
            arena_generation=self._context.settings.arena_generation,
            mode=mode,
            num_given=len(grant.prefix) * BLOCK_TOKENS,
            num_prompt=sequence.num_prompt,
            sampling=sequence.params,
            seed=sequence.seed,
            priority=sequence.priority,
            checksums=self._checksums(mode),
            salt=sequence.salt,
        )

    def _checksums(self, mode: str) -> str:
        """In place the grant and its generation decide; across memory all is compared."""
        wanted = self._context.settings.checksums
        if wanted == "auto":
            return "off" if mode == GRANT else "full"
        return wanted

    def _release_lease(
        self, peer: WorkerName, grant_id: int, lease_id: int, generation: int
    ) -> None:
        """Let go of a lease whose hand-over has ended here: P need not keep its blocks."""
        ref = m.LeaseRef(grant_id=grant_id, lease_id=lease_id, arena_generation=generation)
        self._context.send_peer(peer, m.LEASE_RELEASE, ref)
