"""Prompts that this worker computes for other workers. Pure.

States of an offer, and what ends it:

    queued     waits for a step            WITHDRAW -> STOPPED at once
    computing  in a step, or between two   WITHDRAW -> STOPPED after the step that names it
    hashing    with checksums: not told    as queued
    committed  COMMIT sent, every beat     COMMITTED ends a grant; a lease lives on until released

An offer that came twice is known by (owner, grant). A withdrawal or commit of an unknown grant is
answered all the same: the answer to an earlier one may have been lost.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Drawn, SequenceId
from llmrt.engine.rights import WriteRight
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.checksums import CheckedBlocks
from llmrt.kvtransfer.layout import blocks_for
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, pack_u64, unpack_u32
from llmrt.wire.envelope import Header
from llmrt.wire.ids import BlockId, GrantId, LeaseId, RequestId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import HashBlocks
from llmrt.workers.extras import encode_extras
from llmrt.workers.links import GRANT, PeerLinks
from llmrt.workers.offer import Key, OfferedPrefill, misfit
from llmrt.workers.tombstones import Tombstones


def arena_of(owner: WorkerName) -> ArenaId:
    return ArenaId(owner.full_name)


class OfferedPrefills:
    """Table of offers by (owner, grant)."""

    def __init__(self, context: WorkerContext, links: PeerLinks) -> None:
        self._context = context
        self._links = links
        self._offers: dict[Key, OfferedPrefill] = {}
        self._by_sequence: dict[SequenceId, OfferedPrefill] = {}
        self._hashing: dict[int, OfferedPrefill] = {}
        self._ended: Tombstones[Key] = Tombstones()
        self.num_handed_over = 0
        self.handover_s = 0.0

    # -- messages of the owner ---------------------------------------------------------------

    def offered(
        self,
        sender: WorkerName,
        header: Header,
        offer: m.Offer,
        raw_tokens: bytes,
        raw_blocks: bytes,
        *,
        deadline: float | None,
    ) -> None:
        key = (sender, offer.grant_id)
        if key in self._offers:
            # Sent again because no answer came yet.
            self._say_held(self._offers[key], self._pending_tokens())
            return
        tokens, blocks = unpack_u32(raw_tokens), unpack_u32(raw_blocks)
        refusal = self._refusal(sender, offer, tokens, blocks)
        if refusal is not None:
            self._stopped(sender, offer.grant_id, header, refusal)
            return
        self._take(sender, header, offer, tokens, blocks, deadline=deadline)

    def withdrawn(self, sender: WorkerName, header: Header, grant_id: int) -> None:
        offered = self._offers.get((sender, grant_id))
        if offered is None:
            self._ended.bury((sender, grant_id))
            self._stopped(sender, grant_id, header, "not held")
            return
        self._withdraw(offered)

    def committed(self, sender: WorkerName, grant_id: int) -> None:
        """The owner has the commit."""
        offered = self._offers.get((sender, grant_id))
        if offered is not None and offered.commit is not None and offered.is_grant:
            assert offered.returned_at is not None
            self.num_handed_over += 1
            self.handover_s += self._context.now - offered.returned_at
            self._drop(offered)

    def lease_confirm(self, sender: WorkerName, header: Header, ref: m.LeaseRef) -> None:
        """The owner has read everything: does the lease still hold?"""
        offered = self._offers.get((sender, ref.grant_id))
        is_held = (
            offered is not None
            and offered.lease_id == ref.lease_id
            and ref.arena_generation == self._context.settings.arena_generation
            and self._context.ledger.is_leased(LeaseId(ref.lease_id))
        )
        state = m.LeaseState(grant_id=ref.grant_id, lease_id=ref.lease_id, is_held=is_held)
        self._context.send_peer(
            sender, m.LEASE_CONFIRMED, state, request_id=RequestId(header.request_id)
        )

    def lease_renew(self, sender: WorkerName, ref: m.LeaseRef) -> None:
        offered = self._offers.get((sender, ref.grant_id))
        if offered is not None and offered.lease_id == ref.lease_id:
            expires_at = self._context.now + self._context.settings.lease_s
            self._context.ledger.renew(LeaseId(ref.lease_id), expires_at)

    def lease_release(self, sender: WorkerName, ref: m.LeaseRef) -> None:
        offered = self._offers.get((sender, ref.grant_id))
        if offered is not None and offered.lease_id == ref.lease_id:
            self._end_lease(offered)

    def owner_lost(self, owner: WorkerName) -> None:
        """The owner is dead: nothing of it is wanted any more."""
        self._context.ledger.reader_died(owner)
        for offered in [o for o in self._offers.values() if o.owner == owner]:
            self._drop(offered)

    # -- steps -------------------------------------------------------------------------------

    def step_started(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            offered = self._by_sequence.get(sequence_id)
            if offered is not None and offered.started_at is None:
                offered.started_at = self._context.now

    def step_done(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A step that named these sequences has returned."""
        for sequence_id in sequence_ids:
            offered = self._by_sequence.get(sequence_id)
            if offered is None:
                continue
            if offered.is_withdrawn:
                self._finish_withdrawal(offered)
            else:
                self._advance(offered)

    def rights(self, sequence_ids: Iterable[SequenceId]) -> dict[SequenceId, WriteRight]:
        """What the owners have granted to those of these sequences that write into their blocks."""
        rights: dict[SequenceId, WriteRight] = {}
        for sequence_id in sequence_ids if self._by_sequence else ():
            offered = self._by_sequence.get(sequence_id)
            if offered is not None and offered.right is not None and not offered.is_withdrawn:
                rights[sequence_id] = offered.right
        return rights

    def hashed(self, hash_id: int, checksums: "array[int]") -> bool:
        """Blocks of an offer were hashed; False if the hash is not one of an offer."""
        offered = self._hashing.pop(hash_id, None)
        if offered is None:
            return False
        if self._offers.get(offered.key) is not offered:
            return True  # ended meanwhile
        if not offered.hashed(hash_id, checksums):
            self._withdraw(offered)  # the owner's arena is not mapped any more
            return True
        if not offered.is_grant:
            self._send_complete(offered)
        self._send_commit(offered)
        return True

    def drawn(self, sequence: Sequence, drawn: Drawn, returned_at: float) -> bool:
        """A first token was sampled; False if the sequence is not an offered one."""
        offered = self._by_sequence.get(sequence.sequence_id)
        if offered is None:
            return False
        offered.returned_at = returned_at
        started_at = offered.started_at if offered.started_at is not None else returned_at
        offered.commit = m.Commit(
            grant_id=offered.grant_id,
            token_id=drawn.token_ids[0],
            num_cached=sequence.num_cached,
            queue_ms=(started_at - offered.received_at) * 1000,
            prefill_ms=(returned_at - started_at) * 1000,
            extras=encode_extras(drawn.logprobs),
            lease_id=offered.lease_id or 0,
        )
        self._send_commit(offered)
        self._context.scheduler.remove(sequence)  # blocks under a lease stay for their reader
        return True

    def step_failed(self, sequences: Iterable[Sequence], reason: str) -> list[Sequence]:
        """A step failed; returns the sequences that are not offered ones."""
        others = []
        for sequence in sequences:
            offered = self._by_sequence.get(sequence.sequence_id)
            if offered is None:
                others.append(sequence)
            else:
                self._end(offered, reason)
        return others

    # -- time --------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say what is held, again what was not answered, and end what is overdue."""
        now, pending = self._context.now, self._pending_tokens()
        for offered in list(self._offers.values()):
            self._say_held(offered, pending)
            if offered.num_announced:
                self._send_chunk(offered, 0)
            if offered.commit is not None:
                self._send_commit(offered)
            elif offered.deadline is not None and now >= offered.deadline:
                self._withdraw(offered)
        for lease_id in self._context.ledger.expire(now):
            for offered in [o for o in self._offers.values() if o.lease_id == lease_id]:
                self._context.counters["leases_expired"] += 1
                self._context.log(
                    "kv.lease_expired", "warning", request_id=offered.request_id.hex()
                )
                self._end_lease(offered)

    def holding(self) -> list[m.Held]:
        return [
            m.Held(o.request_id, o.attempt.epoch, o.attempt.n, "prefill")
            for o in self._offers.values()
        ]

    def __len__(self) -> int:
        return len(self._offers)

    def uses(self, peer: WorkerName) -> bool:
        return any(offered.owner == peer for offered in self._offers.values())

    def check(self) -> None:
        assert len(self._by_sequence) == len(self._offers)
        leases = [o.lease_id for o in self._offers.values() if o.lease_id is not None]
        assert len(leases) == self._context.ledger.counts().num_leases
        for offered in self._offers.values():
            assert offered.commit is not None or not offered.sequence.is_removed

    # -- details -----------------------------------------------------------------------------

    def _refusal(
        self, sender: WorkerName, offer: m.Offer, tokens: "array[int]", blocks: "array[int]"
    ) -> str | None:
        settings, arena = self._context.settings, self._links.arena_of(sender)
        if self._ended.covers((sender, offer.grant_id)):
            return "withdrawn before it came"
        if arena is None:
            return "the owner has not said who it is, or is no partner"
        if offer.mode == GRANT and not self._links.is_mapped(sender, offer.arena_generation):
            return "the owner's arena is not mapped here"
        if len(self._offers) >= settings.max_waiting:
            return "too many offers wait here"
        return misfit(offer, tokens, blocks, settings=settings, num_owner_blocks=arena.num_blocks)

    def _take(
        self,
        sender: WorkerName,
        header: Header,
        offer: m.Offer,
        tokens: "array[int]",
        blocks: "array[int]",
        *,
        deadline: float | None,
    ) -> None:
        context = self._context
        is_grant = offer.mode == GRANT
        sequence = Sequence(
            sequence_id=SequenceId(context.new_sequence_id()),
            token_ids=tokens,
            num_prompt=offer.num_prompt,
            params=offer.sampling,
            seed=offer.seed,
            max_length=len(tokens) + 1,
            end_token_ids=context.vocabulary.eos_token_ids,
            priority=offer.priority,
            order=context.now,
            arena=arena_of(sender) if is_grant else LOCAL_ARENA,
            blocks=blocks if is_grant else array("I"),
            num_given=offer.num_given if is_grant else 0,
            num_cached=offer.num_given if is_grant else 0,
            is_placed=True,
            salt=offer.salt,
        )
        first = offer.num_given // BLOCK_TOKENS
        offered = OfferedPrefill(
            owner=sender,
            grant_id=GrantId(offer.grant_id),
            request_id=RequestId(header.request_id),
            attempt=header.attempt,
            sequence=sequence,
            checked=CheckedBlocks(
                offer.checksums, RequestId(header.request_id), first, blocks_for(len(tokens))
            ),
            right=WriteRight(sequence.arena, blocks[:], offer.num_given) if is_grant else None,
            deadline=deadline,
            received_at=context.now,
        )
        self._offers[offered.key] = offered
        self._by_sequence[sequence.sequence_id] = offered
        context.scheduler.add(sequence)
        self._say_held(offered, self._pending_tokens())

    def _say_held(self, offered: OfferedPrefill, pending: Counter[WorkerName]) -> None:
        """A sign of life for one offer: without it the owner takes its prompt elsewhere."""
        held = m.OfferHeld(
            grant_id=offered.grant_id, num_foreign_tokens=pending.total() - pending[offered.owner]
        )
        self._context.send_peer(offered.owner, m.OFFER_HELD, held, request_id=offered.request_id)

    def _pending_tokens(self) -> Counter[WorkerName]:
        """Tokens that are to be computed, by owner."""
        pending: Counter[WorkerName] = Counter()
        for offered in self._offers.values():
            if offered.commit is None:
                pending[offered.owner] += offered.sequence.num_pending
        return pending

    def _advance(self, offered: OfferedPrefill) -> None:
        """Hash what is new and checked, and tell the owner of a lease which blocks it may read."""
        sequence = offered.sequence
        if not offered.is_grant and offered.lease_id is None:
            blocks = [BlockId(block) for block in sequence.blocks]
            expires_at = self._context.now + self._context.settings.lease_s
            offered.lease_id = self._context.ledger.lease(offered.owner, blocks, expires_at)
            offered.leased_blocks = sequence.blocks[:]
        num_computed = sequence.num_computed
        is_last = num_computed >= sequence.max_length - 1
        num_complete = blocks_for(num_computed) if is_last else num_computed // BLOCK_TOKENS
        first, offered.num_complete = offered.num_complete, num_complete
        if indices := offered.checked.within(first, num_complete):
            self._hash(offered, first, indices)
        if not offered.is_grant:
            self._send_complete(offered)

    def _hash(self, offered: OfferedPrefill, first: int, indices: list[int]) -> None:
        """Hash these of the blocks from `first` on, while the next ones are computed."""
        hash_id = self._context.new_hash_id()
        self._hashing[hash_id] = offered
        offered.hashing[hash_id] = (first, offered.num_complete)
        owner, table = None, offered.leased_blocks
        if offered.right is not None:
            owner, table = offered.owner, offered.right.blocks
        self._context.do(HashBlocks(hash_id, owner, array("I", [table[i] for i in indices])))

    def _send_complete(self, offered: OfferedPrefill) -> None:
        """Announce what is computed and hashed, and was not announced yet."""
        first, num_hashed = offered.num_announced, offered.num_hashed()
        if num_hashed > first:
            offered.num_announced = num_hashed
            self._send_chunk(offered, first)

    def _send_chunk(self, offered: OfferedPrefill, first: int) -> None:
        """Blocks `first` to the last that is announced."""
        chunk = m.Chunk(
            grant_id=offered.grant_id,
            lease_id=offered.lease_id or 0,
            arena_generation=self._context.settings.arena_generation,
            first_block=first,
        )
        last = offered.num_announced
        raw = [
            pack_u32(offered.leased_blocks[first:last]),
            pack_u64(offered.checksums_of(first, last)),
        ]
        self._context.send_peer(
            offered.owner, m.CHUNK, chunk, request_id=offered.request_id, raw=raw
        )

    def _send_commit(self, offered: OfferedPrefill) -> None:
        """Tell the owner that all is done, if it is and all is hashed."""
        if offered.commit is None or offered.hashing:
            return
        checksums = offered.checksums_of(0, offered.num_complete) if offered.is_grant else []
        self._context.send_peer(
            offered.owner,
            m.COMMIT,
            offered.commit,
            request_id=offered.request_id,
            attempt=offered.attempt,
            raw=[pack_u64(checksums)] if checksums else (),
        )

    def _withdraw(self, offered: OfferedPrefill) -> None:
        offered.is_withdrawn = True
        if not offered.sequence.in_step:
            self._finish_withdrawal(offered)

    def _finish_withdrawal(self, offered: OfferedPrefill) -> None:
        self._end(offered, "withdrawn")

    def _end(self, offered: OfferedPrefill, reason: str) -> None:
        self._context.send_peer(
            offered.owner,
            m.STOPPED,
            m.Stopped(grant_id=offered.grant_id, reason=reason),
            request_id=offered.request_id,
        )
        if offered.lease_id is not None:
            self._end_lease(offered)
        else:
            self._drop(offered)

    def _end_lease(self, offered: OfferedPrefill) -> None:
        if offered.lease_id is not None:
            self._context.ledger.release_lease(offered.lease_id)
        self._drop(offered)

    def _drop(self, offered: OfferedPrefill) -> None:
        self._ended.bury(offered.key)
        del self._offers[offered.key]
        del self._by_sequence[offered.sequence_id]
        if not offered.sequence.is_removed:
            self._context.scheduler.remove(offered.sequence)

    def _stopped(self, owner: WorkerName, grant_id: int, header: Header, reason: str) -> None:
        self._context.send_peer(
            owner,
            m.STOPPED,
            m.Stopped(grant_id=grant_id, reason=reason),
            request_id=RequestId(header.request_id),
        )
