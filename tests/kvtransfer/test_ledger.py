import time
from array import array
from collections.abc import Sequence

import pytest

from llmrt.kvtransfer.block_hash import hash_blocks
from llmrt.kvtransfer.ledger import Grant, Ledger
from llmrt.wire.ids import BlockId, GrantId, LeaseId, WorkerId, WorkerName

P0 = WorkerName(WorkerId("prefill-0"), 1)
P0_AGAIN = WorkerName(WorkerId("prefill-0"), 2)
P1 = WorkerName(WorkerId("prefill-1"), 1)
D0 = WorkerName(WorkerId("decode-0"), 1)


def hashes_of(num_blocks: int, salt: bytes = b"") -> list[bytes]:
    return hash_blocks(array("I", range(32 * num_blocks)), salt=salt)


def allocate(ledger: Ledger, count: int) -> list[BlockId]:
    blocks = ledger.allocate(count)
    assert blocks is not None
    return blocks


def make_grant(
    ledger: Ledger, count: int, prefix: Sequence[BlockId] = (), *, writer: WorkerName = P0
) -> Grant:
    grant = ledger.grant(writer, count, prefix)
    assert grant is not None
    return grant


def cache(ledger: Ledger, num_blocks: int, salt: bytes = b"") -> list[BlockId]:
    """Blocks of a request that has ended and left them in the cache."""
    blocks = allocate(ledger, num_blocks)
    for block, block_hash in zip(blocks, hashes_of(num_blocks, salt), strict=True):
        assert ledger.seal(block, block_hash)
    ledger.release(blocks)
    ledger.check()
    return blocks


def leave_tail(ledger: Ledger, *token_ids: int, key: bytes = b"key") -> BlockId:
    """A block that is not full, of a request that has ended."""
    (block,) = allocate(ledger, 1)
    ledger.release_tail(block, key, array("I", token_ids))
    ledger.check()
    return block


# Requests and the cache


def test_blocks_come_in_the_order_of_memory_and_return() -> None:
    ledger = Ledger(8)
    assert ledger.allocate(3) == [0, 1, 2]
    assert (ledger.num_free, ledger.num_held, ledger.available()) == (5, 3, 5)
    ledger.release([BlockId(0), BlockId(1), BlockId(2)])
    assert ledger.allocate(4) == [0, 1, 2, 3]
    ledger.check()


def test_allocate_gives_all_or_nothing() -> None:
    ledger = Ledger(4)
    allocate(ledger, 2)
    before = ledger.counts()
    assert ledger.allocate(3) is None
    assert ledger.counts() == before
    assert ledger.allocate(0) == []


def test_sealed_blocks_are_found_by_a_later_request() -> None:
    ledger = Ledger(8)
    blocks = cache(ledger, 3)
    assert ledger.lookup(hashes_of(5)) == 3
    assert ledger.take_prefix(hashes_of(5)) == blocks
    assert (ledger.num_cached, ledger.num_evictable) == (3, 0)
    ledger.release(blocks)
    assert (ledger.num_cached, ledger.num_evictable) == (3, 3)
    ledger.check()


def test_lookup_stops_at_the_first_gap() -> None:
    ledger = Ledger(8)
    cache(ledger, 3)
    first, second, third = hashes_of(3)
    assert ledger.lookup([first, b"unknown", third]) == 1
    assert ledger.lookup([b"unknown", second]) == 0


def test_content_is_cached_once() -> None:
    """Two requests computed the same block: the second keeps its copy, uncached."""
    ledger = Ledger(8)
    cached = cache(ledger, 1)
    copy = allocate(ledger, 1)
    assert not ledger.seal(copy[0], hashes_of(1)[0])
    assert (ledger.num_held, ledger.num_cached) == (1, 1)
    ledger.release(copy)
    assert ledger.take_prefix(hashes_of(1)) == cached
    ledger.check()


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    ledger = Ledger(4)
    blocks = cache(ledger, 4)
    assert ledger.allocate(1) == [blocks[3]]
    assert ledger.allocate(1) == [blocks[2]]
    assert ledger.lookup(hashes_of(4)) == 2
    assert ledger.num_evicted == 2
    ledger.check()


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    ledger = Ledger(4)
    a, b = cache(ledger, 2, b"a"), cache(ledger, 2, b"b")
    ledger.release(ledger.take_prefix(hashes_of(2, b"a")))
    assert set(allocate(ledger, 2)) == set(b)
    assert ledger.take_prefix(hashes_of(2, b"a")) == a


def test_pinned_blocks_are_never_evicted() -> None:
    ledger = Ledger(4)
    cache(ledger, 4)
    pinned = ledger.take_prefix(hashes_of(2))
    assert ledger.available() == 2
    assert ledger.allocate(3) is None
    assert not set(allocate(ledger, 2)) & set(pinned)
    ledger.check()


def test_a_block_shared_by_two_requests_stays_for_the_second() -> None:
    ledger = Ledger(2)
    cache(ledger, 2)
    first, second = ledger.take_prefix(hashes_of(2)), ledger.take_prefix(hashes_of(2))
    ledger.release(first)
    assert ledger.available() == 0
    ledger.release(second)
    assert ledger.available() == 2


def test_releasing_what_nobody_holds_is_our_own_bug() -> None:
    ledger = Ledger(4)
    blocks = allocate(ledger, 2)
    ledger.release(blocks)
    with pytest.raises(AssertionError, match="block 1 is free"):
        ledger.release(blocks)
    ledger.check()


# Grants


def test_a_committed_grant_belongs_to_the_request() -> None:
    ledger = Ledger(8)
    cached = cache(ledger, 2)
    grant = make_grant(ledger, 3, ledger.take_prefix(hashes_of(2)))
    assert list(grant.all_blocks[:2]) == cached
    assert (ledger.num_granted, ledger.num_cached, ledger.num_free) == (3, 2, 3)
    blocks = ledger.commit(grant.grant_id)
    assert blocks == list(grant.all_blocks)
    assert (ledger.num_granted, ledger.num_held) == (0, 3)
    ledger.check()
    ledger.release(blocks)
    assert (ledger.num_free, ledger.num_evictable) == (6, 2)


def test_a_grant_is_made_for_all_or_not() -> None:
    """Refused, the caller keeps its pins and prefills by itself or waits."""
    ledger = Ledger(4)
    cache(ledger, 4)
    prefix = ledger.take_prefix(hashes_of(2))
    assert ledger.grant(P0, 3, prefix) is None
    assert ledger.grants_of(P0) == []
    ledger.release(prefix)
    assert ledger.num_evictable == 4


def test_a_stopped_grant_frees_its_blocks_and_prefix() -> None:
    ledger = Ledger(4)
    cache(ledger, 2)
    grant = make_grant(ledger, 2, ledger.take_prefix(hashes_of(2)))
    assert ledger.stop(grant.grant_id)
    assert (ledger.num_free, ledger.num_evictable) == (2, 2)
    ledger.check()


def test_blocks_of_a_silent_writer_are_given_to_nobody() -> None:
    ledger = Ledger(4)
    cache(ledger, 1)
    grant = make_grant(ledger, 3, ledger.take_prefix(hashes_of(1)))
    assert ledger.quarantine(grant.grant_id)
    assert (ledger.num_quarantined, ledger.available()) == (3, 0)
    assert ledger.allocate(1) is None
    assert ledger.grants_of(P0) == [grant.grant_id]
    ledger.check()


def test_a_commit_after_quarantine_gives_no_blocks_and_frees_them() -> None:
    """The request went elsewhere; the late word only says that the writer has stopped."""
    ledger = Ledger(4)
    grant = make_grant(ledger, 3)
    ledger.quarantine(grant.grant_id)
    assert ledger.commit(grant.grant_id) is None
    assert (ledger.num_free, ledger.num_late) == (4, 1)
    ledger.check()


def test_the_death_of_a_writer_ends_grants_of_that_life_only() -> None:
    ledger = Ledger(16)
    cache(ledger, 1)
    live = make_grant(ledger, 2, ledger.take_prefix(hashes_of(1)))
    silent = make_grant(ledger, 3)
    make_grant(ledger, 1, writer=P1)
    make_grant(ledger, 4, writer=P0_AGAIN)
    ledger.quarantine(silent.grant_id)
    assert ledger.writer_died(P0) == [live.grant_id, silent.grant_id]
    assert (ledger.num_granted, ledger.num_quarantined, ledger.num_free) == (5, 0, 10)
    assert ledger.writer_died(P0) == []
    ledger.check()


def test_words_about_an_ended_grant_change_nothing() -> None:
    """Messages of other processes come twice, and after the death that made them moot."""
    ledger = Ledger(4)
    grant = make_grant(ledger, 2)
    blocks = ledger.commit(grant.grant_id)
    before = ledger.counts()
    for grant_id in (grant.grant_id, GrantId(99)):
        assert ledger.commit(grant_id) is None
        assert not ledger.stop(grant_id)
        assert not ledger.quarantine(grant_id)
    after = ledger.counts()
    assert after.num_late == before.num_late + 6
    assert (after.num_held, after.num_free) == (before.num_held, before.num_free)
    assert blocks is not None
    ledger.release(blocks)
    ledger.check()


# Leases


def test_a_leased_block_outlives_its_request() -> None:
    """D still reads when P's own request has ended."""
    ledger = Ledger(4)
    blocks = allocate(ledger, 2)
    lease_id = ledger.lease(D0, blocks, expires_at=30.0)
    ledger.release(blocks)
    assert (ledger.num_held, ledger.available()) == (2, 2)
    assert ledger.leased_blocks(lease_id) == tuple(blocks)
    ledger.check()
    assert ledger.release_lease(lease_id)
    assert ledger.num_free == 4
    ledger.check()


def test_a_leased_cached_block_is_not_evicted() -> None:
    ledger = Ledger(2)
    blocks = cache(ledger, 2)
    lease_id = ledger.lease(D0, blocks, expires_at=30.0)
    assert ledger.allocate(1) is None
    ledger.release_lease(lease_id)
    assert ledger.allocate(1) == [blocks[1]]


def test_leases_end_when_their_time_is_over() -> None:
    ledger = Ledger(4)
    blocks = cache(ledger, 2)
    late = ledger.lease(D0, blocks, expires_at=30.0)
    early = ledger.lease(D0, blocks[:1], expires_at=20.0)
    assert ledger.next_deadline() == 20.0
    assert ledger.expire(19.9) == []
    assert ledger.expire(20.0) == [early]
    assert ledger.next_deadline() == 30.0
    assert (ledger.is_leased(early), ledger.is_leased(late)) == (False, True)
    assert ledger.expire(99.0) == [late]
    assert ledger.next_deadline() is None
    assert ledger.num_evictable == 2
    ledger.check()


def test_renewing_moves_the_end() -> None:
    ledger = Ledger(4)
    lease_id = ledger.lease(D0, cache(ledger, 1), expires_at=30.0)
    assert ledger.renew(lease_id, expires_at=35.0)
    assert ledger.expire(34.0) == []
    assert ledger.renew(lease_id, expires_at=10.0)
    assert ledger.next_deadline() == 10.0
    assert ledger.expire(34.0) == [lease_id]
    assert not ledger.renew(lease_id, expires_at=99.0)
    assert ledger.next_deadline() is None
    ledger.check()


def test_releasing_a_lease_twice_changes_nothing() -> None:
    ledger = Ledger(4)
    blocks = allocate(ledger, 1)
    lease_id = ledger.lease(D0, blocks, expires_at=30.0)
    assert ledger.release_lease(lease_id)
    assert not ledger.release_lease(lease_id)
    assert not ledger.release_lease(LeaseId(99))
    assert ledger.leased_blocks(lease_id) is None
    assert (ledger.num_held, ledger.num_late) == (1, 2)
    ledger.check()


def test_the_death_of_a_reader_ends_its_leases() -> None:
    ledger = Ledger(4)
    blocks = cache(ledger, 2)
    mine, other = ledger.lease(D0, blocks, 30.0), ledger.lease(P1, blocks, 40.0)
    assert ledger.reader_died(D0) == [mine]
    assert ledger.reader_died(D0) == []
    assert ledger.next_deadline() == 40.0
    assert ledger.is_leased(other)
    ledger.check()


# Size


def test_a_million_blocks_are_made_in_a_second() -> None:
    start = time.process_time()
    ledger = Ledger(1_000_000)
    assert time.process_time() - start < 1.0
    start = time.process_time()
    for _ in range(100):
        ledger.release(allocate(ledger, 10))
    assert time.process_time() - start < 0.1


# Seals


def test_a_changed_block_leaves_the_cache_and_its_users_keep_it_till_they_end() -> None:
    content = [0] * 8
    ledger = Ledger(8, checksum=lambda block: content[block])
    blocks = cache(ledger, 3)
    grant = make_grant(ledger, 1, ledger.take_prefix(hashes_of(3)))
    assert ledger.check_seals(grant.prefix)
    content[blocks[1]] ^= 1
    prefix = ledger.take_prefix(hashes_of(3))
    assert prefix == blocks
    assert not ledger.check_seals(prefix)
    assert ledger.num_bad_seals == 1
    ledger.check()
    assert ledger.lookup(hashes_of(3)) == 1
    ledger.release(prefix)
    assert ledger.state_of(blocks[1]) == "held"  # by the grant
    ledger.stop(grant.grant_id)
    assert ledger.state_of(blocks[1]) == "free"
    ledger.check()


def test_a_seal_ends_with_the_stay_in_the_cache() -> None:
    content = [0] * 2
    ledger = Ledger(2, checksum=lambda block: content[block])
    cache(ledger, 2)
    blocks = allocate(ledger, 2)  # evicts both
    content[:] = [5, 6]
    for block, block_hash in zip(blocks, hashes_of(2, b"other"), strict=True):
        ledger.seal(block, block_hash)
    assert ledger.check_seals(blocks)
    ledger.check()


# Tails


def test_a_tail_is_taken_over_by_one_alone() -> None:
    ledger = Ledger(4)
    block = leave_tail(ledger, 1, 2, 3)
    assert ledger.take_tail(b"other", array("I", [1])) is None
    assert ledger.take_tail(b"key", array("I", [2, 2, 3])) is None
    assert ledger.take_tail(b"key", array("I", [1, 2, 9, 9])) == (block, 2)
    assert ledger.take_tail(b"key", array("I", [1, 2, 3])) is None
    assert ledger.state_of(block) == "held"
    ledger.release([block])
    assert ledger.num_free == 4
    ledger.check()


def test_the_last_tail_of_a_key_stays() -> None:
    ledger = Ledger(4)
    first, second = allocate(ledger, 2)
    ledger.release_tail(first, b"key", array("I", [1, 2]))
    ledger.release_tail(second, b"key", array("I", [1, 2, 3]))
    assert (ledger.num_free, ledger.num_cached) == (3, 1)
    assert ledger.take_tail(b"key", array("I", [1, 2, 3, 4])) == (second, 3)
    ledger.check()


def test_a_tail_is_evicted_like_any_cached_block() -> None:
    ledger = Ledger(4)
    leave_tail(ledger, 1, 2)
    assert ledger.available() == 4
    allocate(ledger, 4)
    assert ledger.num_evicted == 1
    assert ledger.take_tail(b"key", array("I", [1, 2])) is None
    ledger.check()


def test_a_tail_that_is_read_under_a_lease_is_not_kept() -> None:
    """Who takes it over would write where the reader reads."""
    ledger = Ledger(4)
    (block,) = allocate(ledger, 1)
    lease = ledger.lease(D0, [block], 30.0)
    ledger.release_tail(block, b"key", array("I", [1]))
    assert ledger.take_tail(b"key", array("I", [1])) is None
    assert ledger.release_lease(lease)
    assert ledger.num_free == 4
    ledger.check()


def test_a_granted_tail_is_the_first_block_of_the_writer() -> None:
    ledger = Ledger(8)
    prefix = cache(ledger, 2)
    block = leave_tail(ledger, 1, 2)
    assert ledger.take_tail(b"key", array("I", [1, 2])) == (block, 2)
    grant = ledger.grant(P0, 2, ledger.take_prefix(hashes_of(2)), [block])
    assert grant is not None
    assert grant.all_blocks[:3] == (*prefix, block)
    assert ledger.num_granted == 3
    assert ledger.commit(grant.grant_id) == list(grant.all_blocks)
    ledger.check()


def test_a_tail_that_changed_is_not_given() -> None:
    content = dict.fromkeys(range(4), 0)
    ledger = Ledger(4, checksum=lambda block: content[block])
    block = leave_tail(ledger, 1, 2)
    content[block] += 1
    assert ledger.take_tail(b"key", array("I", [1, 2])) is None
    assert (ledger.num_bad_seals, ledger.num_free) == (1, 4)
    ledger.check()
