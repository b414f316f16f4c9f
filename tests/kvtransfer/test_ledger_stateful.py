"""A ledger under random calls, against a model that keeps every right by name."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from llmrt.kvtransfer.ledger import Grant, Ledger
from llmrt.wire.ids import BlockId, GrantId, LeaseId, WorkerId, WorkerName

NUM_BLOCKS = 12
WORKERS = [WorkerName(WorkerId(name), epoch) for name in ("a", "b") for epoch in (1, 2)]
CHAINS = [[bytes([chain, i]) for i in range(6)] for chain in range(3)]

workers = st.sampled_from(WORKERS)
chains = st.sampled_from(CHAINS)
counts = st.integers(0, 5)
picks = st.integers(0, 1000)
tail_keys = st.sampled_from([b"tail 0", b"tail 1"])
tail_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)


@dataclass
class Request:
    blocks: list[BlockId]
    chain: list[bytes]
    num_prefix: int
    """How many of `chain` are cached or were found to be."""


@dataclass
class Model:
    """Who uses what; states are derived from it, never stored."""

    requests: list[Request] = field(default_factory=list)
    grants: dict[GrantId, Grant] = field(default_factory=dict)
    chains: dict[GrantId, list[bytes]] = field(default_factory=dict)
    silent: set[GrantId] = field(default_factory=set)
    leases: dict[LeaseId, tuple[WorkerName, tuple[BlockId, ...], float]] = field(
        default_factory=dict
    )
    cached: dict[bytes, BlockId] = field(default_factory=dict)
    tails: dict[bytes, list[int]] = field(default_factory=dict)
    """Tokens of the cached blocks that are not full."""
    unpinned_at: dict[BlockId, int] = field(default_factory=dict)
    clock: int = 0

    def pins(self) -> "Counter[BlockId]":
        pins: Counter[BlockId] = Counter()
        for request in self.requests:
            pins.update(request.blocks)
        for grant in self.grants.values():
            pins.update(grant.all_blocks)
        for _, blocks, _ in self.leases.values():
            pins.update(blocks)
        return pins

    def unpinned(self, blocks: "list[BlockId]") -> None:
        """Blocks lost a pin, in this order: those without one left go to the end of the line."""
        pins = self.pins()
        for block in blocks:
            self.clock += 1
            if not pins[block]:
                self.unpinned_at[block] = self.clock

    def evictable(self) -> list[BlockId]:
        pins = self.pins()
        idle = [block for block in self.cached.values() if not pins[block]]
        return sorted(idle, key=self.unpinned_at.__getitem__)

    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.pins().keys() | set(self.cached.values()))

    def taken(self, blocks: list[BlockId]) -> None:
        """`blocks` were given out: check that they were to be had, and forget what they held."""
        evictable = self.evictable()
        num_evicted = max(0, len(blocks) - self.num_free())
        victims = set(evictable[:num_evicted])
        in_use = self.pins().keys() | set(self.cached.values())
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) & in_use == victims
        self.cached = {h: block for h, block in self.cached.items() if block not in victims}


class LedgerMachine(RuleBasedStateMachine):
    ended_grants = Bundle("ended_grants")
    ended_leases = Bundle("ended_leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NUM_BLOCKS)
        self.model = Model()
        self.now = 0.0

    @rule(chain=chains, count=counts)
    def start_request(self, chain: list[bytes], count: int) -> None:
        model = self.model
        expected = []
        for block_hash in chain:
            if block_hash not in model.cached:
                break
            expected.append(model.cached[block_hash])
        assert self.ledger.lookup(chain) == len(expected)
        prefix = self.ledger.take_prefix(chain)
        assert prefix == expected
        request = Request(list(prefix), chain, len(prefix))
        model.requests.append(request)
        self._grow(request, count)

    @rule(chain=chains, count=counts)
    def run_request(self, chain: list[bytes], count: int) -> None:
        """All of a request's life at once, so that the cache fills."""
        self.start_request(chain, count)
        self.seal(len(self.model.requests) - 1)
        self.end_request(len(self.model.requests) - 1)

    @rule(pick=picks, count=counts)
    def grow_request(self, pick: int, count: int) -> None:
        if self.model.requests:
            self._grow(self._request(pick), count)

    def _grow(self, request: Request, count: int) -> None:
        has_room = count <= self.model.num_free() + len(self.model.evictable())
        blocks = self.ledger.allocate(count)
        assert (blocks is not None) == has_room
        if blocks is not None:
            self.model.taken(blocks)
            request.blocks += blocks

    @rule(pick=picks)
    def seal(self, pick: int) -> None:
        """The request's tokens are computed: what is full goes into the cache."""
        if not self.model.requests:
            return
        request = self._request(pick)
        full = min(len(request.blocks), len(request.chain))
        for i in range(request.num_prefix, full):
            block, block_hash = request.blocks[i], request.chain[i]
            is_new = block_hash not in self.model.cached
            assert self.ledger.seal(block, block_hash) == is_new
            if is_new:
                self.model.cached[block_hash] = block
        request.num_prefix = max(request.num_prefix, full)

    @rule(pick=picks)
    def end_request(self, pick: int) -> None:
        if self.model.requests:
            request = self._request(pick)
            self.model.requests.remove(request)
            self.ledger.release(request.blocks)
            self.model.unpinned(request.blocks[::-1])

    @rule(pick=picks, key=tail_keys, token_ids=tail_tokens)
    def end_with_tail(self, pick: int, key: bytes, token_ids: list[int]) -> None:
        model = self.model
        request = self._request(pick) if model.requests else None
        if request is None or not request.blocks or request.blocks[-1] in model.cached.values():
            return
        model.requests.remove(request)
        *blocks, last = request.blocks
        is_alone = not model.pins()[last]
        self.ledger.release_tail(last, key, array("I", token_ids))
        if is_alone:
            model.cached[key], model.tails[key] = last, token_ids
        model.unpinned([last])
        self.ledger.release(blocks)
        model.unpinned(blocks[::-1])

    @rule(key=tail_keys, token_ids=tail_tokens, writer=workers, count=counts)
    def take_tail(self, key: bytes, token_ids: list[int], writer: WorkerName, count: int) -> None:
        """One gets it, and grants it to a writer if there is room for more."""
        model = self.model
        block = model.cached.get(key)
        pairs = list(zip(model.tails[key], token_ids, strict=False)) if block is not None else []
        num_common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        taken = self.ledger.take_tail(key, array("I", token_ids))
        if block is None or not num_common:
            assert taken is None
            return
        assert taken == (block, num_common)
        del model.cached[key]
        request = Request([block], [], 0)
        model.requests.append(request)
        has_room = count <= model.num_free() + len(model.evictable())
        grant = self.ledger.grant(writer, count, [], [block])
        assert (grant is not None) == has_room
        if grant is not None:
            assert grant.blocks[0] == block
            model.taken(list(grant.blocks[1:]))
            model.requests.remove(request)
            model.grants[grant.grant_id] = grant

    @rule(writer=workers, chain=chains, count=counts)
    def make_grant(self, writer: WorkerName, chain: list[bytes], count: int) -> None:
        prefix = self.ledger.take_prefix(chain)
        request = Request(list(prefix), chain, len(prefix))
        self.model.requests.append(request)
        has_room = count <= self.model.num_free() + len(self.model.evictable())
        grant = self.ledger.grant(writer, count, prefix)
        assert (grant is not None) == has_room
        if grant is not None:
            self.model.taken(list(grant.blocks))
            self.model.requests.remove(request)
            self.model.grants[grant.grant_id] = grant
            self.model.chains[grant.grant_id] = chain

    @rule(target=ended_grants, pick=picks)
    def commit(self, pick: int) -> GrantId:
        grant = self._grant(pick)
        if grant is None:
            assert self.ledger.commit(GrantId(1000)) is None
            return GrantId(1000)
        blocks = self.ledger.commit(grant.grant_id)
        del self.model.grants[grant.grant_id]
        if grant.grant_id in self.model.silent:
            assert blocks is None
            self.model.unpinned(list(grant.all_blocks)[::-1])
        else:
            assert blocks == list(grant.all_blocks)
            chain = self.model.chains[grant.grant_id]
            self.model.requests.append(Request(blocks, chain, len(grant.prefix)))
        return grant.grant_id

    @rule(target=ended_grants, pick=picks)
    def stop(self, pick: int) -> GrantId:
        grant = self._grant(pick)
        if grant is None:
            assert not self.ledger.stop(GrantId(1000))
            return GrantId(1000)
        assert self.ledger.stop(grant.grant_id)
        del self.model.grants[grant.grant_id]
        self.model.unpinned(list(grant.all_blocks)[::-1])
        return grant.grant_id

    @rule(pick=picks)
    def quarantine(self, pick: int) -> None:
        grant = self._grant(pick)
        if grant is not None:
            is_new = grant.grant_id not in self.model.silent
            assert self.ledger.quarantine(grant.grant_id) == is_new
            self.model.silent.add(grant.grant_id)

    @rule(writer=workers)
    def writer_dies(self, writer: WorkerName) -> None:
        ended = [g for g in self.model.grants.values() if g.writer == writer]
        assert self.ledger.writer_died(writer) == [grant.grant_id for grant in ended]
        assert self.ledger.grants_of(writer) == []
        for grant in ended:
            del self.model.grants[grant.grant_id]
            self.model.unpinned(list(grant.all_blocks)[::-1])

    @rule(grant_id=ended_grants)
    def late_word(self, grant_id: GrantId) -> None:
        before = self.ledger.counts()
        assert self.ledger.commit(grant_id) is None
        assert not self.ledger.stop(grant_id)
        assert not self.ledger.quarantine(grant_id)
        after = self.ledger.counts()
        assert (after.num_free, after.num_held) == (before.num_free, before.num_held)

    @rule(reader=workers, pick=picks, duration=st.integers(1, 30))
    def make_lease(self, reader: WorkerName, pick: int, duration: int) -> None:
        if self.model.requests:
            blocks = self._request(pick).blocks
            expires_at = self.now + duration
            lease_id = self.ledger.lease(reader, blocks, expires_at)
            self.model.leases[lease_id] = (reader, tuple(blocks), expires_at)

    @rule(pick=picks, duration=st.integers(1, 30))
    def renew(self, pick: int, duration: int) -> None:
        if self.model.leases:
            lease_id = sorted(self.model.leases)[pick % len(self.model.leases)]
            reader, blocks, _ = self.model.leases[lease_id]
            assert self.ledger.renew(lease_id, self.now + duration)
            self.model.leases[lease_id] = (reader, blocks, self.now + duration)

    @rule(target=ended_leases, pick=picks)
    def release_lease(self, pick: int) -> LeaseId:
        if not self.model.leases:
            return LeaseId(1000)
        lease_id = sorted(self.model.leases)[pick % len(self.model.leases)]
        assert self.ledger.release_lease(lease_id)
        self._lease_ended(lease_id)
        return lease_id

    @rule(lease_id=ended_leases)
    def late_lease_word(self, lease_id: LeaseId) -> None:
        assert not self.ledger.release_lease(lease_id)
        assert not self.ledger.renew(lease_id, self.now + 9)
        assert not self.ledger.is_leased(lease_id)

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = [i for i, (_, _, end) in self.model.leases.items() if end <= self.now]
        due.sort(key=lambda i: (self.model.leases[i][2], i))
        assert self.ledger.expire(self.now) == due
        for lease_id in due:
            self._lease_ended(lease_id)

    @rule(reader=workers)
    def reader_dies(self, reader: WorkerName) -> None:
        ended = self.ledger.reader_died(reader)
        assert set(ended) == {i for i, (r, _, _) in self.model.leases.items() if r == reader}
        for lease_id in ended:
            self._lease_ended(lease_id)

    @invariant()
    def ledger_agrees_with_the_model(self) -> None:
        self.ledger.check()
        model, counts_now = self.model, self.ledger.counts()
        cached = set(model.cached.values())
        silent = [b for i in model.silent & model.grants.keys() for b in model.grants[i].blocks]
        granted = [b for g in model.grants.values() for b in g.blocks]
        in_use = model.pins().keys() | cached
        assert counts_now.num_free == NUM_BLOCKS - len(in_use) == model.num_free()
        assert counts_now.num_cached == len(cached)
        assert counts_now.num_quarantined == len(silent)
        assert counts_now.num_granted == len(granted) - len(silent)
        assert counts_now.num_held == len(in_use - cached - set(granted))
        assert counts_now.num_evictable == len(model.evictable())
        assert self.ledger.available() == model.num_free() + len(model.evictable())
        ends = [end for _, _, end in model.leases.values()]
        assert self.ledger.next_deadline() == min(ends, default=None)

    def teardown(self) -> None:
        """When everyone has let go, nothing is left but the cache."""
        for request in self.model.requests:
            self.ledger.release(request.blocks)
        for worker in WORKERS:
            self.ledger.writer_died(worker)
            self.ledger.reader_died(worker)
        self.ledger.check()
        assert self.ledger.available() == NUM_BLOCKS

    def _request(self, pick: int) -> Request:
        return self.model.requests[pick % len(self.model.requests)]

    def _grant(self, pick: int) -> Grant | None:
        grants = list(self.model.grants.values())
        return grants[pick % len(grants)] if grants else None

    def _lease_ended(self, lease_id: LeaseId) -> None:
        _, blocks, _ = self.model.leases.pop(lease_id)
        self.model.unpinned(list(blocks)[::-1])


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
