"""The hand-over between two machines: grants, leases, and everything that interrupts them."""

from array import array
from typing import Any

import pytest
from tests.conftest import make_contract
from tests.workers.conftest import arena_of

from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.envelope import decode_header
from llmrt.wire.ids import Attempt
from llmrt.workers import effects as do
from llmrt.workers import events as ev

TEN = list(range(10, 20))


@pytest.fixture
def pair(make_worker: Any, link: Any) -> tuple[Any, Any]:
    """A decode and a prefill worker that share the decode worker's arena."""
    owner, prefill = make_worker("decode"), make_worker("prefill")
    link(owner, prefill)
    return owner, prefill


@pytest.fixture
def tcp_pair(make_worker: Any, link: Any) -> tuple[Any, Any]:
    owner, prefill = make_worker("decode", transfer="tcp"), make_worker("prefill", transfer="tcp")
    link(owner, prefill)
    return owner, prefill


def pass_on(source: Any, target: Any, kind: str) -> list[Any]:
    """Carry what `source` sent of this kind to `target`, once."""
    found = source.sent(kind)
    for sent in found:
        assert sent.target == target.name
        target.relay(sent, source.name)
    source.effects = [
        e for e in source.effects if not (isinstance(e, do.SendPeer) and is_kind(e, kind))
    ]
    return list(found)


def is_kind(effect: do.SendPeer, kind: str) -> bool:
    return decode_header(effect.frames[0]).kind == kind


def test_p_writes_into_ds_blocks_and_d_emits_every_token(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=2)
    assert owner.scheduler.step is None
    assert owner.ledger.num_granted == 1
    (offer,) = pass_on(owner, prefill, m.OFFER)
    (row,) = prefill.batch().rows
    assert row.arena == "decode-0@7"
    assert row.blocks == unpack_u32(offer.raw[1])
    assert prefill.ledger.num_free == prefill.ledger.num_blocks
    prefill.step(50)
    assert prefill.rows() == []
    owner.now = prefill.now + 0.001
    pass_on(prefill, owner, m.COMMIT)
    assert owner.tokens() == [50]
    pass_on(owner, prefill, m.COMMITTED)
    owner.step(51)
    (end,) = owner.sent(m.FINISHED)
    assert owner.tokens() == [50, 51]
    assert (end.body.prefill_worker, end.body.decode_worker) == ("prefill-0", "decode-0")
    stages = dict(end.body.timings_ms)
    total = stages.pop("total")
    assert {"prefill_queue", "prefill", "handover"} <= set(stages)
    assert sum(stages.values()) == pytest.approx(total)
    assert stages["prefill"] == pytest.approx(10.0)
    assert stages["handover"] == pytest.approx(1.0)
    owner.assert_all_free()
    assert prefill.core._holding() == ()


def test_heartbeats_say_why_a_link_is_refused(make_worker: Any, link: Any) -> None:
    owner = make_worker("decode")
    prefill = make_worker("prefill", contract=make_contract(kv_dtype="int8"))
    link(owner, prefill, is_mapped=False)
    owner.tick()
    load = owner.sent(m.HEARTBEAT)[-1].body.load
    assert load.links == {"prefill-0": "refused"}
    (reason,) = load.refusals.values()
    assert reason.startswith("KV contract differs: kv_dtype is '")
    assert reason.endswith("' here and 'int8' there")


def test_an_arena_that_cannot_be_mapped_is_a_reason_only_if_it_must_be(
    make_worker: Any, link: Any
) -> None:
    for transfer, refusals in (("shm", {"prefill-0": "why"}), ("auto", {})):
        owner, prefill = make_worker("decode", transfer=transfer), make_worker("prefill")
        link(owner, prefill, is_mapped=False)
        failure = m.Failure(code="transfer_failed", message="why")
        owner.from_peer(prefill.name, m.MAP_FAILED, failure)
        owner.tick()
        assert owner.sent(m.HEARTBEAT)[-1].body.load.refusals == refusals


def test_ds_cached_prefix_is_offered_and_not_computed_again(pair: Any, tokens_of: Any) -> None:
    owner, prefill = pair
    for number in (1, 2):
        owner.dispatch(tokens_of(100), number=number, prefill=prefill.name, max_tokens=1)
        (offer,) = pass_on(owner, prefill, m.OFFER)
        (row,) = prefill.batch().rows
        assert (offer.body.num_given, row.start) == ((0, 0) if number == 1 else (99, 99))
        prefill.step(50)
        pass_on(prefill, owner, m.COMMIT)
        pass_on(owner, prefill, m.COMMITTED)
    assert owner.sent(m.FINISHED)[1].body.usage.cached_tokens == 99


def test_one_token_leaves_no_block_granted(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.COMMIT)
    assert owner.tokens() == [50]
    assert len(owner.sent(m.FINISHED)) == 1
    owner.assert_all_free()


def test_without_a_living_prefill_worker_d_prefills_itself(make_worker: Any) -> None:
    owner = make_worker("decode")
    owner.dispatch(TEN, max_tokens=1)
    owner.step(50)
    assert owner.sent(m.FINISHED)[0].body.prefill_worker == "decode-0"


def test_an_offer_is_repeated_until_it_is_answered_and_taken_once(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    owner.tick()
    assert len(pass_on(owner, prefill, m.OFFER)) == 2
    assert len([e for e in prefill.effects if isinstance(e, do.RunStep)]) == 1


def test_a_commit_is_repeated_until_it_is_answered_and_counts_once(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    prefill.tick()
    assert len(pass_on(prefill, owner, m.COMMIT)) == 2
    assert owner.tokens() == [50]
    assert len(pass_on(owner, prefill, m.COMMITTED)) == 2
    prefill.clear()
    prefill.tick()
    assert prefill.sent(m.COMMIT) == []


def test_a_cancel_in_prefill_frees_the_grant_only_when_p_has_stopped(pair: Any) -> None:
    owner, prefill = pair
    request_id = owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    owner.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    pass_on(owner, prefill, m.WITHDRAW)
    assert prefill.sent(m.STOPPED) == []
    assert owner.ledger.num_granted == 1
    prefill.step(50)
    assert prefill.sent(m.COMMIT) == []
    pass_on(prefill, owner, m.STOPPED)
    owner.assert_all_free()
    assert owner.ledger.num_granted == 0


def test_a_cancel_before_p_starts_is_answered_at_once(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, number=1, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    request_id = owner.dispatch(TEN, number=2, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    owner.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    pass_on(owner, prefill, m.WITHDRAW)
    pass_on(prefill, owner, m.STOPPED)
    assert owner.ledger.num_granted == 1


def test_a_withdrawal_that_overtakes_its_offer_meets_it(pair: Any) -> None:
    owner, prefill = pair
    request_id = owner.dispatch(TEN, prefill=prefill.name)
    owner.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    pass_on(owner, prefill, m.WITHDRAW)
    pass_on(owner, prefill, m.OFFER)
    assert prefill.scheduler.step is None
    assert len(pass_on(prefill, owner, m.STOPPED)) == 2
    owner.assert_all_free()


def test_a_commit_that_crosses_a_withdrawal_frees_the_grant(pair: Any) -> None:
    owner, prefill = pair
    request_id = owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    owner.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    pass_on(prefill, owner, m.COMMIT)
    pass_on(owner, prefill, m.WITHDRAW)
    pass_on(owner, prefill, m.COMMITTED)
    assert owner.rows() == []
    owner.assert_all_free()
    assert prefill.core._holding() == ()


def test_a_silent_writers_blocks_are_quarantined_and_d_prefills_itself(pair: Any) -> None:
    """P may be stopped and not dead: it could still write."""
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    owner.from_broker(m.PEERS, m.Peers(peers=()))
    assert owner.ledger.num_quarantined == 1
    owner.step(50)
    assert owner.tokens() == [50]
    assert owner.ledger.num_quarantined == 1
    prefill.step(50)  # it wakes up, and finishes what it was doing
    pass_on(prefill, owner, m.COMMIT)
    owner.assert_all_free()


def test_the_confirmed_death_of_a_writer_frees_its_blocks_at_once(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    owner.handle(ev.MapperDied(prefill.name))
    assert owner.ledger.num_granted == 0
    assert owner.scheduler.step is not None
    assert do.ForgetPeer(prefill.name) in owner.effects


def test_the_death_of_an_owner_ends_its_offers_and_unmaps_its_arena(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.handle(ev.ArenaLost(owner.name))
    assert do.DetachArena(owner.name) in prefill.effects
    prefill.step(50)
    assert prefill.sent(m.COMMIT) == []
    assert prefill.scheduler.step is None


def test_an_offer_of_another_generation_is_refused(pair: Any) -> None:
    """The arena that it names is not the one that is mapped."""
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    (sent,) = owner.sent(m.OFFER)
    stale = m.Offer(
        **{f: getattr(sent.body, f) for f in m.Offer.__struct_fields__} | {"arena_generation": 2}
    )
    prefill.from_peer(owner.name, m.OFFER, stale, *sent.raw, request_id=sent.header.request_id)
    assert prefill.scheduler.step is None
    (stopped,) = prefill.sent(m.STOPPED)
    assert "not mapped" in stopped.body.reason


def test_a_refused_offer_is_prefilled_by_the_owner(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    (sent,) = owner.sent(m.OFFER)
    stopped = m.Stopped(grant_id=sent.body.grant_id, reason="no")
    owner.from_peer(prefill.name, m.STOPPED, stopped)
    owner.step(50)
    assert owner.sent(m.FINISHED)[0].body.prefill_worker == "decode-0"
    owner.assert_all_free()


def test_a_failed_step_on_p_moves_the_prompt_to_the_owner(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    failure = m.Failure(code="internal_error", message="boom")
    prefill.handle(ev.StepDone(None, prefill.now, failure))
    pass_on(prefill, owner, m.STOPPED)
    owner.step(50)
    assert owner.tokens() == [50]


def test_a_stranger_cannot_commit_anothers_grant(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name)
    (sent,) = owner.sent(m.OFFER)
    commit = m.Commit(
        grant_id=sent.body.grant_id,
        token_id=66,
        num_cached=0,
        queue_ms=0,
        prefill_ms=0,
    )
    stranger = prefill.name._replace(epoch=99)
    owner.from_peer(stranger, m.COMMIT, commit)
    assert owner.rows() == []
    assert owner.ledger.num_granted == 1


def test_peers_with_another_contract_are_never_linked(make_worker: Any, link: Any) -> None:
    owner = make_worker("decode")
    prefill = make_worker("prefill", contract=make_contract(model_hash="other"))
    link(owner, prefill)
    owner.dispatch(TEN, prefill=prefill.name)
    assert owner.sent(m.OFFER) == []
    assert owner.scheduler.step is not None


def test_d_reads_blocks_under_a_lease_while_p_goes_on(tcp_pair: Any, tokens_of: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=2)
    (offer,) = pass_on(owner, prefill, m.OFFER)
    assert offer.body.mode == "lease"
    prefill.step()
    pass_on(prefill, owner, m.CHUNK)
    (read,) = [e for e in owner.effects if isinstance(e, do.ReadBlocks)]
    assert len(read.source) == len(read.target) == 4
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    pass_on(prefill, owner, m.COMMIT)
    assert owner.rows() == []
    for effect in [e for e in owner.effects if isinstance(e, do.ReadBlocks)]:
        owner.handle(ev.BlocksRead(effect.read_id))
    (_,) = pass_on(owner, prefill, m.LEASE_CONFIRM)
    assert owner.rows() == []
    pass_on(prefill, owner, m.LEASE_CONFIRMED)
    assert owner.tokens() == [50]
    pass_on(owner, prefill, m.LEASE_RELEASE)
    prefill.assert_all_free()
    assert prefill.ledger.counts().num_leases == 0
    owner.step(51)
    owner.assert_all_free()


def test_nothing_is_decoded_from_blocks_whose_lease_had_ended(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    pass_on(prefill, owner, m.COMMIT)
    prefill.tick(31.0)
    assert prefill.ledger.counts().num_leases == 0
    (read,) = [e for e in owner.effects if isinstance(e, do.ReadBlocks)]
    owner.handle(ev.BlocksRead(read.read_id))
    pass_on(owner, prefill, m.LEASE_CONFIRM)
    pass_on(prefill, owner, m.LEASE_CONFIRMED)
    assert owner.tokens() == []
    owner.step(51)
    assert owner.tokens() == [51]
    owner.assert_all_free()


def test_a_failed_read_is_prefilled_by_the_owner_after_other_reads_have_returned(
    tcp_pair: Any, tokens_of: Any
) -> None:
    """A read that goes on would write into blocks that have a new user."""
    owner, prefill = tcp_pair
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step()
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    first, second = [e for e in owner.effects if isinstance(e, do.ReadBlocks)]
    failure = m.Failure(code="transfer_failed", message="cut")
    owner.handle(ev.BlocksRead(first.read_id, failure))
    assert owner.ledger.num_granted == 7
    owner.handle(ev.BlocksRead(second.read_id))
    assert owner.ledger.num_granted == 0
    pass_on(owner, prefill, m.WITHDRAW)
    prefill.assert_all_free()


def test_a_lost_chunk_leaves_no_gap_and_is_sent_again(tcp_pair: Any, tokens_of: Any) -> None:
    """Reading on behind a gap would decode from blocks that nobody wrote."""
    owner, prefill = tcp_pair
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    prefill.step()
    prefill.clear()  # the first chunk is lost
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    pass_on(prefill, owner, m.COMMIT)
    assert [e for e in owner.effects if isinstance(e, do.ReadBlocks)] == []
    assert owner.sent(m.LEASE_CONFIRM) == []
    prefill.tick()
    pass_on(prefill, owner, m.CHUNK)
    (read,) = [e for e in owner.effects if isinstance(e, do.ReadBlocks)]
    assert len(read.source) == 7
    owner.handle(ev.BlocksRead(read.read_id))
    pass_on(owner, prefill, m.LEASE_CONFIRM)
    pass_on(prefill, owner, m.LEASE_CONFIRMED)
    assert owner.tokens() == [50]


def test_a_prompt_read_under_a_lease_enters_the_owners_cache(tcp_pair: Any, tokens_of: Any) -> None:
    owner, prefill = tcp_pair
    for number in (1, 2):
        owner.clear()
        prefill.clear()
        owner.dispatch(tokens_of(100), number=number, prefill=prefill.name, max_tokens=1)
        pass_on(owner, prefill, m.OFFER)
        prefill.step(50)
        pass_on(prefill, owner, m.CHUNK)
        pass_on(prefill, owner, m.COMMIT)
        (read,) = [e for e in owner.effects if isinstance(e, do.ReadBlocks)]
        assert len(read.source) == (4 if number == 1 else 1)
        owner.handle(ev.BlocksRead(read.read_id))
        pass_on(owner, prefill, m.LEASE_CONFIRM)
        pass_on(prefill, owner, m.LEASE_CONFIRMED)
        pass_on(owner, prefill, m.LEASE_RELEASE)
    assert owner.ledger.num_cached == 4  # one of them is not full


def test_a_prompt_too_large_for_p_is_refused_at_once(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner = make_worker("decode", transfer="tcp")
    prefill = make_worker("prefill", transfer="tcp", num_blocks=4)
    link(owner, prefill)
    owner.dispatch(tokens_of(200), prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    pass_on(prefill, owner, m.STOPPED)
    assert owner.scheduler.step is not None


def test_a_preempted_sequence_is_offered_again_with_what_is_cached_by_then(
    pair: Any, tokens_of: Any
) -> None:
    owner, prefill = pair
    owner.dispatch(tokens_of(64), prefill=prefill.name, max_tokens=9)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.COMMIT)
    owner.step(51)
    (sequence,) = owner.scheduler.running.values()
    owner.step(52)
    owner.scheduler.step = owner.scheduler.ahead = None  # between two steps
    owner.scheduler._in_step, owner.scheduler._in_ahead, sequence.in_step = [], [], False
    owner.scheduler._preempt(sequence)
    owner.clear()
    owner.tick()
    (offer,) = pass_on(owner, prefill, m.OFFER)
    assert offer.body.num_given == 66
    prefill.clear()
    prefill.step(53)
    pass_on(prefill, owner, m.COMMIT)
    assert owner.tokens() == [53]


def test_a_prefill_worker_that_falls_silent_is_given_up_and_avoided(pair: Any) -> None:
    """The broker may still hear of it: then only the link between the two is cut."""
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    for _ in range(6):
        owner.tick()
    assert owner.ledger.num_quarantined == 1
    owner.step(50)
    assert owner.tokens() == [50]
    owner.clear()
    owner.dispatch(TEN, number=2, prefill=prefill.name, max_tokens=1)
    assert owner.sent(m.OFFER) == []
    owner.step(51)
    owner.tick(11.0)
    owner.clear()
    owner.dispatch(TEN, number=3, prefill=prefill.name, max_tokens=1)
    assert len(owner.sent(m.OFFER)) == 1


def test_a_prefill_worker_that_says_that_it_holds_the_offer_is_waited_for(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, prefill=prefill.name, max_tokens=1)
    pass_on(owner, prefill, m.OFFER)
    for _ in range(20):
        prefill.tick()
        pass_on(prefill, owner, m.OFFER_HELD)
        owner.tick()
    assert owner.ledger.num_granted == 1
    assert owner.sent(m.OFFER) == []


def test_a_lost_hello_is_asked_for_again(make_worker: Any, link: Any) -> None:
    owner, prefill = make_worker("decode"), make_worker("prefill")
    link(owner, prefill)
    hello = m.PeerHello(
        worker_id=owner.name.worker_id,
        epoch=owner.name.epoch,
        arena_generation=3,
        num_blocks=64,
        arena_socket="/arena",
        bulk=("tcp://b",),
        contract=owner.settings.contract,
        process=owner.settings.process,
    )
    prefill.from_peer(owner.name, m.PEER_HELLO, hello)
    (answer,) = prefill.sent(m.PEER_HELLO)
    assert answer.body.is_answer
    prefill.clear()
    prefill.relay(answer, owner.name)
    assert prefill.sent(m.PEER_HELLO) == []


def test_an_arena_that_arrives_after_its_owner_died_is_unmapped(
    make_worker: Any, link: Any
) -> None:
    owner, prefill = make_worker("decode"), make_worker("prefill")
    link(owner, prefill)
    prefill.handle(ev.ArenaLost(owner.name))
    prefill.clear()
    prefill.handle(ev.ArenaAttached(owner.name, arena_of(owner)))
    assert prefill.effects == [do.DetachArena(owner.name)]


@pytest.mark.parametrize(
    "wrong", [{"generation": 4}, {"num_blocks": 63}, {"block_bytes": 1}], ids=str
)
def test_an_arena_that_is_not_the_announced_one_is_unmapped_and_no_grant_is_made(
    make_worker: Any, link: Any, wrong: dict[str, int]
) -> None:
    """Another worker may serve the socket by now; its blocks are not the ones that D grants."""
    owner, prefill = make_worker("decode"), make_worker("prefill")
    link(owner, prefill, is_mapped=False)
    owner.handle(ev.ArenaMapped(prefill.name))
    prefill.handle(ev.ArenaAttached(owner.name, arena_of(owner)._replace(**wrong)))
    assert do.DetachArena(owner.name) in prefill.effects
    (failed,) = pass_on(prefill, owner, m.MAP_FAILED)
    assert "another one" in failed.body.message
    (probe,) = [effect for effect in owner.effects if isinstance(effect, do.ProbeLink)]
    owner.handle(ev.LinkProbed(probe.probe_id, 1e9, 1e-5, "one node"))
    owner.dispatch(TEN, prefill=prefill.name)
    (offer,) = owner.sent(m.OFFER)
    assert offer.body.mode == "lease"


def test_a_peer_that_the_broker_has_long_forgotten_is_forgotten_here(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.from_broker(m.PEERS, m.Peers(peers=()))
    owner.tick(30.0)
    assert do.ForgetPeer(prefill.name) not in owner.effects
    owner.tick(31.0)
    assert do.ForgetPeer(prefill.name) in owner.effects


def test_prompts_behind_one_that_is_computed_here_still_go_to_p(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(TEN, number=1)
    owner.dispatch(TEN, number=2)
    owner.dispatch(TEN[::-1], number=3, prefill=prefill.name)
    assert len(owner.sent(m.OFFER)) == 1


def test_leases_are_renewed_while_they_are_read(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    pass_on(prefill, owner, m.CHUNK)
    for _ in range(40):
        owner.tick()
        prefill.now = owner.now
        pass_on(owner, prefill, m.LEASE_RENEW)
        prefill.handle(ev.Tick())
    assert prefill.ledger.counts().num_leases == 1


def test_a_lease_of_a_silent_reader_ends_by_itself(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    for _ in range(32):
        prefill.tick()
    prefill.assert_all_free()
    assert prefill.core.counters["leases_expired"] == 1


def test_the_death_of_a_reader_frees_the_blocks_of_its_lease_at_once(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(TEN, prefill=prefill.name)
    pass_on(owner, prefill, m.OFFER)
    prefill.step(50)
    assert prefill.ledger.counts().num_leases == 1
    prefill.handle(ev.ArenaLost(owner.name))
    assert prefill.ledger.counts().num_leases == 0
    prefill.assert_all_free()


def test_a_chunk_beyond_the_grant_is_not_read(tcp_pair: Any) -> None:
    owner, prefill = tcp_pair
    owner.dispatch(TEN, prefill=prefill.name)
    (sent,) = owner.sent(m.OFFER)
    chunk = m.Chunk(grant_id=sent.body.grant_id, lease_id=1, arena_generation=3, first_block=0)
    owner.from_peer(prefill.name, m.CHUNK, chunk, array("I", range(9)).tobytes())
    assert [e for e in owner.effects if isinstance(e, do.ReadBlocks)] == []


def test_nothing_is_offered_without_room_and_the_wait_is_told_and_ends(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    """No prefill worker computes what no decode worker has blocks for."""
    owner, prefill = make_worker("decode", num_blocks=8), make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(tokens_of(100), number=1, prefill=prefill.name)
    for number, budget_ms in ((2, 3000), (3, 60_000)):
        prompt = [number, *tokens_of(160)]
        owner.dispatch(prompt, number=number, prefill=prefill.name, budget_ms=budget_ms)
    pass_on(owner, prefill, m.OFFER)
    assert len(prefill.batch().rows) == 1
    pass_on(prefill, owner, m.OFFER_HELD)
    owner.clear()
    for _ in range(3):
        owner.tick()
    assert owner.sent(m.OFFER) == []
    loads = [beat.body.load for beat in owner.sent(m.HEARTBEAT)]
    assert [load.num_waiting for load in loads] == [2, 2, 1]
    assert [load.oldest_waiting_s for load in loads] == pytest.approx([1.0, 2.0, 3.0])
    assert owner.failure().code == "deadline_exceeded"
    prefill.step(50)
    pass_on(prefill, owner, m.COMMIT)
    owner.from_broker(m.CANCEL, request_id=(1).to_bytes(16, "big"), attempt=Attempt(1, 1))
    owner.step(51)
    assert len(owner.sent(m.OFFER)) == 1
    owner.clear()
    owner.tick()
    assert owner.sent(m.HEARTBEAT)[0].body.load.oldest_waiting_s == 0.0


def test_grants_leave_room_for_the_growth_of_what_runs(
    make_worker: Any, link: Any, tokens_of: Any
) -> None:
    owner, prefill = make_worker("decode", num_blocks=6), make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(tokens_of(60), number=1, max_tokens=100)
    owner.step(50)
    owner.dispatch(tokens_of(60)[::-1], number=2, prefill=prefill.name, max_tokens=10)
    assert owner.sent(m.OFFER) == []
