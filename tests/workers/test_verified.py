"""Nothing is decoded from blocks that are not what the prefill worker had, or not of its offer."""

from array import array
from typing import Any

import msgspec
import pytest
from kv_mismatches import CONTRACT, MISMATCHES, other_contract
from tests.workers.test_handover import TEN, is_kind, pass_on

from llmrt.engine.batch import SequenceId
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, unpack_u32, unpack_u64
from llmrt.wire.ids import Attempt
from llmrt.workers import effects as do
from llmrt.workers import events as ev


def make_pair(make_worker: Any, link: Any, *, transfer: str, **changes: Any) -> tuple[Any, Any]:
    owner = make_worker("decode", transfer=transfer, **changes)
    prefill = make_worker("prefill", transfer=transfer)
    link(owner, prefill)
    return owner, prefill


def reads_of(owner: Any) -> list[do.ReadBlocks]:
    return [effect for effect in owner.effects if isinstance(effect, do.ReadBlocks)]


def take_hashes(bench: Any) -> list[do.HashBlocks]:
    found = [effect for effect in bench.effects if isinstance(effect, do.HashBlocks)]
    bench.effects = [e for e in bench.effects if not isinstance(e, do.HashBlocks)]
    return found


def mismatches(bench: Any) -> list[do.Log]:
    return [
        effect
        for effect in bench.effects
        if isinstance(effect, do.Log) and effect.event == "kv.checksum_mismatch"
    ]


def confirm(owner: Any, prefill: Any) -> None:
    pass_on(owner, prefill, m.LEASE_CONFIRM)
    pass_on(prefill, owner, m.LEASE_CONFIRMED)


def leased(owner: Any, prefill: Any, prompt: list[int]) -> do.ReadBlocks:
    """A prompt that was computed, committed and announced; the read of its blocks."""
    owner.dispatch(prompt, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    pass_on(prefill, owner, m.COMMIT)
    (read,) = reads_of(owner)
    owner.effects.remove(read)
    return read


# Under a lease


def test_what_is_read_is_compared_before_the_lease_is_confirmed(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    owner.hashes_at_once = False
    read = leased(owner, prefill, tokens_of(100))
    owner.handle(ev.BlocksRead(read.read_id))
    owner.tick()
    assert owner.sent(m.LEASE_CONFIRM) == []
    (hashing,) = take_hashes(owner)
    assert (hashing.owner, hashing.blocks) == (None, read.target)
    owner.hashed(hashing)
    confirm(owner, prefill)
    assert owner.tokens() == [50]


def test_a_changed_block_is_read_once_more(make_worker: Any, link: Any, tokens_of: Any) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    read = leased(owner, prefill, tokens_of(100))
    owner.checksums[read.target[2]] = 666
    owner.handle(ev.BlocksRead(read.read_id))
    assert owner.sent(m.LEASE_CONFIRM) == []
    (log,) = mismatches(owner)
    assert (log.fields["worker"], log.fields["peer"]) == ("decode-0@7", "prefill-0@7")
    assert (log.fields["block_idx"], log.fields["block"]) == (2, read.target[2])
    (again,) = reads_of(owner)
    assert (again.source, again.target) == (read.source, read.target)
    owner.checksums.clear()
    owner.handle(ev.BlocksRead(again.read_id))
    confirm(owner, prefill)
    assert owner.tokens() == [50]
    assert owner.core.counters["checksum_mismatches"] == 1
    owner.tick()
    assert owner.sent(m.HEARTBEAT)[-1].body.load.num_checksum_mismatches == 1


def test_a_block_that_is_wrong_twice_is_never_decoded_from(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    read = leased(owner, prefill, tokens_of(100))
    owner.checksums[read.target[0]] = 666
    owner.handle(ev.BlocksRead(read.read_id))
    (again,) = reads_of(owner)
    owner.handle(ev.BlocksRead(again.read_id))
    assert owner.rows() == []
    assert owner.sent(m.LEASE_CONFIRM) == []
    assert [log.fields["is_second_try"] for log in mismatches(owner)] == [False, True]
    pass_on(owner, prefill, m.WITHDRAW)
    prefill.assert_all_free()
    (row,) = owner.batch().rows  # it computes the prompt itself
    assert row.start == 0
    owner.step(51)
    assert owner.tokens() == [51]
    owner.assert_all_free()


def test_p_announces_only_what_it_has_hashed(make_worker: Any, link: Any, tokens_of: Any) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    prefill.hashes_at_once = False
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step()
    prefill.step(50)
    prefill.tick()
    assert prefill.sent(m.CHUNK) == prefill.sent(m.COMMIT) == []
    first, second = take_hashes(prefill)
    prefill.hashed(second)  # it overtakes the first
    assert prefill.sent(m.CHUNK) == []
    prefill.checksums = {block: 100 + i for i, block in enumerate(first.blocks)}
    prefill.hashed(first)
    (chunk,) = prefill.sent(m.CHUNK)
    assert len(unpack_u32(chunk.raw[0])) == 7
    assert unpack_u64(chunk.raw[1]).tolist() == [100, 101, 102, 103, 0, 0, 0]
    assert len(prefill.sent(m.COMMIT)) == 1


def test_a_hash_that_returns_after_the_end_is_dropped(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    owner.hashes_at_once = False
    read = leased(owner, prefill, tokens_of(100))
    owner.handle(ev.BlocksRead(read.read_id))
    (hashing,) = take_hashes(owner)
    owner.from_broker(m.CANCEL, request_id=(1).to_bytes(16, "big"), attempt=Attempt(1, 1))
    owner.assert_all_free()
    owner.hashed(hashing)
    assert owner.rows() == reads_of(owner) == []
    pass_on(owner, prefill, m.WITHDRAW)
    prefill.clear()
    prefill.hashes_at_once = False
    owner.dispatch(tokens_of(100), number=2, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    (hashing,) = take_hashes(prefill)
    owner.from_broker(m.CANCEL, request_id=(2).to_bytes(16, "big"), attempt=Attempt(1, 1))
    pass_on(owner, prefill, m.WITHDRAW)
    prefill.clear()
    prefill.hashed(hashing)
    assert prefill.sent(m.CHUNK) == prefill.sent(m.COMMIT) == []
    prefill.assert_all_free()


def test_without_checksums_nothing_is_hashed(make_worker: Any, link: Any, tokens_of: Any) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp", checksums="off")
    read = leased(owner, prefill, tokens_of(100))
    owner.handle(ev.BlocksRead(read.read_id))
    confirm(owner, prefill)
    assert owner.tokens() == [50]
    assert take_hashes(owner) == take_hashes(prefill) == []


def test_sampled_hashes_some_blocks_and_sees_a_change_in_them(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp", checksums="sampled")
    read = leased(owner, prefill, tokens_of(120))
    owner.checksums[read.target[3]] = 666
    owner.handle(ev.BlocksRead(read.read_id))
    (hashing,) = take_hashes(owner)
    assert hashing.blocks == array("I", [read.target[0], read.target[3]])
    assert len(mismatches(owner)) == 1


def test_a_commit_whose_blocks_are_never_announced_is_given_up(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    """P says with every beat that it holds the offer, so that its silence would not end this."""
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.COMMIT)
    for _ in range(4):
        prefill.tick()
        owner.tick()
        pass_on(prefill, owner, m.OFFER_HELD)
    assert owner.scheduler.step is None
    owner.tick()
    pass_on(owner, prefill, m.WITHDRAW)
    prefill.assert_all_free()
    owner.step(51)
    assert owner.tokens() == [51]
    owner.assert_all_free()


BAD_CHUNKS: dict[str, Any] = {
    "stale generation": lambda c, b, s: (msgspec.structs.replace(c, arena_generation=2), b, s),
    "block out of range": lambda c, b, s: (c, b[:-1] + array("I", [64]), s),
    "block twice": lambda c, b, s: (c, b[:-1] + b[:1], s),
    "beyond the table": lambda c, b, s: (msgspec.structs.replace(c, first_block=1), b, s),
    "negative": lambda c, b, s: (msgspec.structs.replace(c, first_block=-1), b, s),
    "checksum missing": lambda c, b, s: (c, b, s[:-8]),
    "no checksums": lambda c, b, s: (c, b, b""),
    "checksum too many": lambda c, b, s: (c, b, s + bytes(8)),
}


@pytest.mark.parametrize("change", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
def test_a_chunk_that_is_not_of_the_offer_is_refused(
    make_worker: Any, link: Any, tokens_of: Any, change: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    (sent,) = prefill.sent(m.CHUNK)
    chunk, blocks, checksums = change(sent.body, unpack_u32(sent.raw[0]), sent.raw[1])
    owner.from_peer(prefill.name, m.CHUNK, chunk, pack_u32(blocks), checksums)
    assert reads_of(owner) == []
    assert owner.core.counters["chunks_refused"] == 1
    pass_on(owner, prefill, m.WITHDRAW)
    pass_on(prefill, owner, m.COMMIT)
    owner.step(51)
    assert owner.tokens() == [51]
    owner.assert_all_free()
    prefill.assert_all_free()


def test_a_chunk_of_another_lease_is_refused(make_worker: Any, link: Any, tokens_of: Any) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step()
    pass_on(prefill, owner, m.CHUNK)
    prefill.step(50)
    (sent,) = prefill.sent(m.CHUNK)
    other = msgspec.structs.replace(sent.body, lease_id=sent.body.lease_id + 1)
    owner.from_peer(prefill.name, m.CHUNK, other, *sent.raw)
    assert len(reads_of(owner)) == 1
    assert owner.core.counters["chunks_refused"] == 1


# In place


def test_a_grant_is_compared_if_asked_for_and_its_commit_counts_once(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="auto", checksums="full")
    owner.hashes_at_once = False
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    (offer,) = pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    (hashing,) = take_hashes(prefill)
    assert (hashing.owner, hashing.blocks) == (owner.name, unpack_u32(offer.raw[1]))
    prefill.tick()
    assert len(pass_on(prefill, owner, m.COMMIT)) == 2
    (hashing,) = take_hashes(owner)
    assert owner.rows() == []
    owner.hashed(hashing)
    assert owner.tokens() == [50]
    owner.assert_all_free()


def test_a_grant_that_holds_something_else_is_never_decoded_from(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="auto", checksums="full")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    (offer,) = pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    owner.checksums[unpack_u32(offer.raw[1])[1]] = 666
    pass_on(prefill, owner, m.COMMIT)
    assert owner.rows() == []
    (log,) = mismatches(owner)
    assert log.fields["block_idx"] == 1
    assert owner.ledger.num_granted == 0
    pass_on(owner, prefill, m.COMMITTED)
    assert prefill.core._holding() == ()
    owner.step(51)
    assert owner.tokens() == [51]


@pytest.mark.parametrize("checksums", [b"", bytes(24), bytes(40)])
def test_a_commit_with_too_few_or_many_checksums_is_refused(
    make_worker: Any, link: Any, tokens_of: Any, checksums: bytes
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="auto", checksums="full")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    (sent,) = prefill.sent(m.COMMIT)
    owner.from_peer(prefill.name, m.COMMIT, sent.body, checksums)
    assert owner.rows() == []
    assert owner.ledger.num_granted == 0
    assert owner.scheduler.step is not None


@pytest.mark.parametrize("end", ["cancel", "death", "silence"])
def test_what_ends_while_a_grant_is_compared_leaves_nothing(
    make_worker: Any, link: Any, tokens_of: Any, end: str
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="auto", checksums="sampled")
    owner.hashes_at_once = False
    request_id = owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.COMMIT)
    (hashing,) = take_hashes(owner)
    if end == "cancel":
        owner.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    elif end == "death":
        owner.handle(ev.MapperDied(prefill.name))
    else:
        owner.from_broker(m.PEERS, m.Peers(peers=()))
        assert owner.ledger.num_quarantined == 0  # P had said that it is done
    owner.hashed(hashing)
    assert owner.tokens() == ([50] if end == "silence" else [])
    if end == "death":
        owner.step(51)
    owner.assert_all_free()


# What an offer must be


BAD_OFFERS: dict[str, Any] = {
    "block out of range": ({}, lambda t, b: (t, b[:-1] + array("I", [64])), "names block 64"),
    "block twice": ({}, lambda t, b: (t, b[:-1] + b[:1]), "names a block twice"),
    "short table": ({}, lambda t, b: (t, b[:-1]), "does not cover its prompt"),
    "no tokens": ({}, lambda t, b: (t[:0], b), "does not cover its prompt"),
    "unknown token": ({}, lambda t, b: (t[:-1] + array("I", [99999]), b), "token 99999 is unknown"),
    "all given": ({"num_given": 100}, lambda t, b: (t, b), "100 of 100 tokens cannot be given"),
    "half a block given": ({"num_given": 16}, lambda t, b: (t, b), "full blocks can"),
    "negative": ({"num_given": -32}, lambda t, b: (t, b), "-32 of 100 tokens"),
    "unknown checksums": ({"checksums": "md5"}, lambda t, b: (t, b), "checksums are 'md5'"),
    "stale generation": ({"arena_generation": 2}, lambda t, b: (t, b), "is not mapped here"),
}


@pytest.mark.parametrize(("fields", "change", "reason"), BAD_OFFERS.values(), ids=BAD_OFFERS.keys())
def test_an_offer_that_cannot_be_is_refused_by_itself(
    make_worker: Any, link: Any, tokens_of: Any, fields: Any, change: Any, reason: str
) -> None:
    """In a step it would take the other prompts of that step down with it."""
    owner, prefill = make_pair(make_worker, link, transfer="auto")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    (sent,) = owner.sent(m.OFFER)
    offer = msgspec.structs.replace(sent.body, **fields)
    raw = change(unpack_u32(sent.raw[0]), unpack_u32(sent.raw[1]))
    prefill.from_peer(owner.name, m.OFFER, offer, *map(pack_u32, raw))
    assert prefill.scheduler.step is None
    (stopped,) = prefill.sent(m.STOPPED)
    assert reason in stopped.body.reason


@pytest.mark.parametrize(("name", "value"), MISMATCHES)
def test_a_peer_of_another_contract_is_neither_asked_nor_served(
    make_worker: Any, link: Any, tokens_of: Any, name: str, value: object
) -> None:
    owner = make_worker("decode", transfer="tcp", contract=CONTRACT)
    prefill = make_worker("prefill", transfer="tcp", contract=CONTRACT)
    theirs = other_contract(name, value)
    for bench, peer in ((owner, prefill), (prefill, owner)):
        row = m.Peer(
            worker_id=peer.name.worker_id,
            epoch=peer.name.epoch,
            role=peer.settings.role,
            link="ipc://link",
            contract=theirs,
            process=peer.settings.process,
        )
        bench.from_broker(m.PEERS, m.Peers(peers=(row,)))
        bench.handle(ev.PeerConnected(peer.name, "tcp://bulk"))
    for bench, peer in ((owner, prefill), (prefill, owner)):
        hello = msgspec.structs.replace(peer.sent(m.PEER_HELLO)[0].body, contract=theirs)
        bench.from_peer(peer.name, m.PEER_HELLO, hello)
        assert bench.core._links.transport(peer.name) == "refused"
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    assert owner.sent(m.OFFER) == []
    assert owner.scheduler.step is not None
    offer = m.Offer(
        grant_id=1,
        arena_generation=3,
        mode="lease",
        num_given=0,
        num_prompt=10,
        sampling=owner.batch().rows[0].sample.params,
        seed=0,
    )
    prefill.from_peer(owner.name, m.OFFER, offer, pack_u32(TEN), b"")
    assert prefill.scheduler.step is None
    assert "is no partner" in prefill.sent(m.STOPPED)[0].body.reason


# Rights


def test_a_step_names_what_its_rows_may_write_into(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="auto")
    owner.dispatch(tokens_of(100), prefill=prefill.name, max_tokens=1)
    (offer,) = pass_on(owner, prefill, m.OFFER)
    (step,) = [effect for effect in prefill.effects if isinstance(effect, do.RunStep)]
    (right,) = step.rights.values()
    assert right.arena == "decode-0@7"
    assert right.blocks == unpack_u32(offer.raw[1])
    assert right.start == 0
    assert list(step.rights) == [row.sequence_id for row in step.batch.rows]
    assert prefill.core._offered.rights([SequenceId(99)]) == {}


def test_salts_travel_with_offers_and_share_no_block_at_p(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_pair(make_worker, link, transfer="tcp")
    starts = []
    for number, salt in enumerate((b"a", b"b", b"a"), start=1):
        owner.dispatch(tokens_of(100), number=number, prefill=prefill.name, max_tokens=1)
        (sent,) = owner.sent(m.OFFER)
        owner.effects = [e for e in owner.effects if not is_offer(e)]
        salted = msgspec.structs.replace(sent.body, salt=salt)
        prefill.from_peer(owner.name, m.OFFER, salted, *sent.raw)
        (row,) = prefill.batch().rows
        starts.append(row.start)
        prefill.step(50)
    assert starts == [0, 0, 96]


def is_offer(effect: do.Effect) -> bool:
    return isinstance(effect, do.SendPeer) and is_kind(effect, m.OFFER)
