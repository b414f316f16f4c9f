"""Silent writers are ended by force; those that only seem silent are not."""

from typing import Any

import pytest

from llmrt.wire import messages as m
from llmrt.workers import effects as do
from llmrt.workers import events as ev

PROMPT = list(range(10, 110))


def fences(bench: Any) -> list[do.FenceWriter]:
    return [effect for effect in bench.effects if isinstance(effect, do.FenceWriter)]


@pytest.fixture
def pair(make_worker: Any, link: Any) -> tuple[Any, Any]:
    """An owner of 32 blocks, of which 4 are granted to a prefill worker."""
    owner, prefill = make_worker("decode", num_blocks=32), make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(PROMPT, prefill=prefill.name, max_tokens=2)
    assert owner.ledger.num_granted == 4
    return owner, prefill


def test_a_writer_that_says_nothing_for_five_beats_is_fenced_once(pair: Any) -> None:
    """The first beat counts for nothing: it may come right behind a word of the writer."""
    owner, prefill = pair
    for _ in range(5):
        owner.tick()
    assert fences(owner) == []
    for _ in range(10):
        owner.tick()
    assert fences(owner) == [do.FenceWriter(prefill.name)]
    assert owner.ledger.num_quarantined == 4
    assert owner.sent(m.HEARTBEAT)[-1].body.load.num_fenced == 1
    owner.handle(ev.MapperDied(prefill.name))
    assert owner.ledger.num_quarantined == 0


def test_its_prompt_goes_on_here_at_once(pair: Any) -> None:
    owner, _prefill = pair
    for _ in range(6):
        owner.tick()
    (row,) = owner.batch().rows
    assert len(row.token_ids) == len(PROMPT)


def test_an_owner_that_was_stopped_itself_fences_nobody(pair: Any) -> None:
    owner, prefill = pair
    owner.tick(after_s=60.0)
    held = m.OfferHeld(grant_id=1)
    owner.from_peer(prefill.name, m.OFFER_HELD, held)
    for _ in range(4):
        owner.tick()
    assert fences(owner) == []


def test_a_writer_that_speaks_is_not_fenced(pair: Any) -> None:
    owner, prefill = pair
    for _ in range(20):
        owner.tick()
        owner.from_peer(prefill.name, m.OFFER_HELD, m.OfferHeld(grant_id=1))
    assert fences(owner) == []


def speak_for(owner: Any, prefill: Any, num_beats: int) -> None:
    for _ in range(num_beats):
        owner.from_peer(prefill.name, m.OFFER_HELD, m.OfferHeld(grant_id=1))
        owner.tick()


def test_too_much_in_quarantine_fences_a_writer_that_speaks_and_does_not_stop(pair: Any) -> None:
    """The broker has lost it, so nobody waits for its 4 of 32 blocks."""
    owner, prefill = pair
    owner.from_broker(m.PEERS, m.Peers(peers=()))
    assert owner.ledger.num_quarantined == 4
    speak_for(owner, prefill, 5)
    assert fences(owner) == []
    speak_for(owner, prefill, 1)
    assert fences(owner) == [do.FenceWriter(prefill.name)]


def test_a_new_broker_that_lists_nobody_kills_no_writer(pair: Any) -> None:
    """All that it writes for us is in quarantine, until the step that it is in returns."""
    owner, prefill = pair
    owner.from_broker(m.PEERS, m.Peers(peers=()))
    assert len(owner.sent(m.WITHDRAW)) == 1
    speak_for(owner, prefill, 5)
    owner.from_peer(prefill.name, m.STOPPED, m.Stopped(grant_id=1, reason="withdrawn"))
    speak_for(owner, prefill, 10)
    assert fences(owner) == []
    assert owner.ledger.num_granted == owner.ledger.num_quarantined == 0


def test_the_log_of_a_death_says_how_many_blocks_it_gives_back(pair: Any) -> None:
    owner, prefill = pair
    owner.handle(ev.MapperDied(prefill.name))
    (died,) = [e for e in owner.effects if isinstance(e, do.Log) and e.event == "peer.died"]
    assert died.fields["num_blocks"] == 4


def test_a_little_in_quarantine_waits_for_its_writer(make_worker: Any, link: Any) -> None:
    owner, prefill = make_worker("decode", num_blocks=64), make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(PROMPT, prefill=prefill.name, max_tokens=2)
    owner.from_broker(m.PEERS, m.Peers(peers=()))
    for _ in range(10):
        owner.tick()
        owner.from_peer(prefill.name, m.OFFER_HELD, m.OfferHeld(grant_id=1))
    assert fences(owner) == []
    owner.from_peer(prefill.name, m.STOPPED, m.Stopped(grant_id=1, reason="withdrawn"))
    assert owner.ledger.num_quarantined == 0


def test_a_lease_has_no_writer_to_fence(make_worker: Any, link: Any) -> None:
    owner, prefill = make_worker("decode", transfer="tcp"), make_worker("prefill", transfer="tcp")
    link(owner, prefill)
    owner.dispatch(PROMPT, prefill=prefill.name, max_tokens=2)
    for _ in range(10):
        owner.tick()
    assert fences(owner) == []


def test_fencing_can_be_forbidden(make_worker: Any, link: Any) -> None:
    owner = make_worker("decode", num_blocks=32, has_fencing=False)
    prefill = make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(PROMPT, prefill=prefill.name, max_tokens=2)
    for _ in range(20):
        owner.tick()
    assert fences(owner) == []
    assert owner.ledger.num_quarantined == 4
