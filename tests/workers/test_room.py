"""Who gets room when there is little: decodes, then whoever was preempted, then grants."""

from typing import Any

import pytest

from llmrt.wire import messages as m
from llmrt.wire.ids import Attempt

NUM_BLOCKS = 100


@pytest.fixture
def pair(make_worker: Any, link: Any) -> tuple[Any, Any]:
    """An owner of 100 blocks and a prefill worker that never answers."""
    owner = make_worker("decode", num_blocks=NUM_BLOCKS, max_context=2048)
    prefill = make_worker("prefill")
    link(owner, prefill)
    return owner, prefill


def prompt(number: int, num_tokens: int) -> list[int]:
    """In nobody's cache."""
    return [3 + (number * 97 + i * (number + 3)) % 400 for i in range(num_tokens)]


def step(owner: Any) -> int:
    """The running step returns with a token for each row that samples; how many those are."""
    num_drawn = sum(row.sample is not None for row in owner.batch().rows)
    owner.step(*[50] * num_drawn)
    return num_drawn


@pytest.mark.parametrize("wanted_there", [1, 100])
def test_grants_up_to_the_last_block_take_none_from_decodes(pair: Any, wanted_there: int) -> None:
    """Four texts grow from 2 to 5 blocks each, with at most one block to spare."""
    owner, prefill = pair
    for number in range(1, 5):
        owner.dispatch(prompt(number, 60), number=number, max_tokens=101)
    while step(owner) < 4:
        pass
    for number in range(5, 30):
        wanted = {"max_tokens": wanted_there}
        owner.dispatch(prompt(number, 158), number=number, prefill=prefill.name, **wanted)
    assert owner.ledger.available() - owner.scheduler.reserve() < 5
    decodes = list(owner.scheduler.running.values())
    while owner.scheduler.running:
        owner.from_peer(prefill.name, m.OFFER_HELD, m.OfferHeld(grant_id=1))
        step(owner)
    assert [sequence.num_preemptions for sequence in decodes] == [0] * 4
    assert [end.body.usage.completion_tokens for end in owner.sent(m.FINISHED)] == [101] * 4


def test_an_arena_is_granted_but_for_the_growth_of_what_decodes(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(prompt(1, 60), number=1, max_tokens=30)
    step(owner)
    for number in range(2, 30):
        owner.dispatch(prompt(number, 180), number=number, prefill=prefill.name, max_tokens=1)
    assert owner.ledger.num_granted == 96
    assert owner.ledger.num_free == 2
    while owner.scheduler.running:
        step(owner)
    assert owner.ledger.num_granted == 96
    (end,) = owner.sent(m.FINISHED)
    assert end.body.usage.completion_tokens == 30


@pytest.mark.parametrize("was_preempted", [False, True])
def test_whoever_waits_to_start_here_comes_before_grants_for_the_younger(
    pair: Any, *, was_preempted: bool
) -> None:
    """A stream of short prompts for elsewhere would else keep a long one waiting for ever."""
    owner, prefill = pair
    owner.dispatch(prompt(1, 1600), number=1, max_tokens=4)
    owner.dispatch(prompt(2, 1700), number=2, max_tokens=4)
    (waiting,) = owner.scheduler.waiting.values()
    waiting.num_preemptions = int(was_preempted)
    priority = 9 if was_preempted else 0
    owner.dispatch(prompt(3, 60), number=3, prefill=prefill.name, priority=priority)
    assert owner.sent(m.OFFER) == []
    while waiting.sequence_id in owner.scheduler.waiting:
        step(owner)
    assert len(owner.sent(m.FINISHED)) == 1
    step(owner)
    assert len(owner.sent(m.OFFER)) == 1


def test_a_higher_priority_is_granted_before_a_first_start_here(pair: Any) -> None:
    owner, prefill = pair
    owner.dispatch(prompt(1, 1600), number=1, max_tokens=4)
    owner.dispatch(prompt(2, 1700), number=2, max_tokens=4)
    owner.dispatch(prompt(3, 60), number=3, prefill=prefill.name, priority=9)
    assert len(owner.sent(m.OFFER)) == 1


def test_a_preempted_request_goes_on_as_one_whose_worker_died(make_worker: Any) -> None:
    """The same row runs: all tokens so far are computed, and the next one is drawn."""
    preempted, forced = make_worker(num_blocks=4), make_worker(num_blocks=4)
    options = {"max_tokens": 60, "temperature": 0.7, "seed": 11, "min_tokens": 40}
    preempted.dispatch(prompt(1, 20), number=1, **options)
    step(preempted)
    other = preempted.dispatch(prompt(2, 20), number=2, priority=1, max_tokens=60)
    (sequence,) = preempted.scheduler.running.values()
    while not sequence.num_preemptions:
        step(preempted)
    tokens = tuple(sequence.token_ids[sequence.num_prompt :])
    preempted.from_broker(m.CANCEL, None, request_id=other, attempt=Attempt(1, 1))
    step(preempted)
    forced.dispatch(prompt(1, 20), number=1, forced=tokens, **options)
    (ours,), (theirs,) = preempted.batch().rows, forced.batch().rows
    assert len(tokens) > 30
    assert ours.token_ids == theirs.token_ids[ours.start :]
    assert ours.sample == theirs.sample
