"""With drafts, the scheduler gives everybody else what he would get without."""

from array import array
from copy import deepcopy
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_scheduler import make_scheduler, make_sequence, schedule

from llmrt.engine.batch import Batch, Drawn, Row, SequenceId, StepResult, fill
from llmrt.engine.drafting import Drafting
from llmrt.engine.ngram_drafter import NgramDrafter
from llmrt.engine.scheduler import Scheduler
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.layout import blocks_for
from llmrt.wire.kv import BLOCK_TOKENS


def repeating(number: int, num_tokens: int, *, max_tokens: int = 1000) -> Sequence:
    """Of the tokens 10 to 13 in turn."""
    sequence = make_sequence(number, num_tokens, max_tokens=max_tokens)
    sequence.token_ids = array("I", (10 + i % 4 for i in range(num_tokens)))
    return sequence


class Known(NgramDrafter):
    """Proposes what it was given."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__()
        self._token_ids = array("I", token_ids)

    def propose(self, token_ids: "array[int]", max_tokens: int) -> "array[int]":
        return self._token_ids[:max_tokens]


def drafting(*sequences: Sequence, num_blocks: int = 64, **settings: int) -> Scheduler:
    """Sequences that have their first token, the one that goes on with the repetition."""
    scheduler = make_scheduler(num_blocks, **{"num_drafts": 4} | settings)
    for sequence in sequences:
        length = len(sequence.token_ids)
        blocks = scheduler.ledger.allocate(blocks_for(length))
        assert blocks is not None
        scheduler.add(sequence)
        scheduler.park(sequence, len(blocks))
        scheduler.join(sequence, blocks, 10 + length % 4, num_sealed=0)
    scheduler.check()
    return scheduler


def test_a_decode_that_repeats_itself_takes_drafts_along() -> None:
    scheduler = drafting(repeating(1, 10))
    batch = schedule(scheduler)
    assert batch is not None
    (row,) = batch.rows
    assert (row.start, row.token_ids.tolist()) == (10, [12, 13, 10, 11, 12])
    assert (row.num_drafts, row.num_logits) == (4, 5)
    assert row.sample is not None
    assert row.sample.position == 11


def test_accepted_drafts_count_and_rejected_ones_do_not() -> None:
    sequence = repeating(1, 30)
    scheduler = drafting(sequence)
    batch = schedule(scheduler)
    assert batch is not None
    assert len(batch.rows[0].token_ids) == 5
    drawn = (Drawn(SequenceId(1), (11, 12, 99)),)  # 13 would have been next
    scheduler.complete(StepResult(batch.step_id, drawn, 0.0, 0.0))
    scheduler.check()
    assert sequence.token_ids[30:].tolist() == [12, 11, 12, 99]
    assert sequence.num_computed == 33
    assert sequence.num_sealed == 1  # the second block is full, but of garbage from 33 on
    assert (scheduler.drafting.num_drafted, scheduler.drafting.num_accepted) == (4, 2)
    assert scheduler.num_decode_tokens == 3


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(2, 0), (3, 1), (5, 3), (6, 4), (7, 4)])
def test_drafts_end_with_the_length_of_the_sequence(max_tokens: int, num_drafts: int) -> None:
    """One is there, and one is drawn behind the drafts."""
    batch = schedule(drafting(repeating(1, 10, max_tokens=max_tokens)))
    assert batch is not None
    assert batch.rows[0].num_drafts == num_drafts


def test_drafts_take_what_decodes_and_prefills_leave_of_the_step() -> None:
    sequences = [repeating(number, 10) for number in range(1, 4)]
    batch = schedule(drafting(*sequences, step_tokens=8))
    assert batch is not None
    assert [row.num_drafts for row in batch.rows] == [4, 1, 0]
    scheduler = drafting(repeating(1, 10), step_tokens=20)
    scheduler.add(make_sequence(2, 16))
    batch = schedule(scheduler)
    assert batch is not None
    assert [(len(row.token_ids), row.num_drafts) for row in batch.rows] == [(4, 3), (16, 0)]


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(6, 1), (7, 4)])
def test_drafts_leave_the_blocks_that_others_may_grow_into(
    num_blocks: int, num_drafts: int
) -> None:
    """Each has one block, and may come to three; one draft fits the block at hand."""
    first, second = repeating(1, 30, max_tokens=40), repeating(2, 30, max_tokens=40)
    batch = schedule(drafting(first, second, num_blocks=num_blocks))
    assert batch is not None
    assert [row.num_drafts for row in batch.rows] == [num_drafts] * 2
    assert [len(row.blocks) for row in batch.rows] == [1 + (num_drafts > 1)] * 2


def test_many_decodes_leave_few_drafts_and_then_none() -> None:
    """A step of many tokens is bound by computing them, and drafts would cost what they bring."""
    batch = schedule(drafting(*[repeating(number, 10) for number in range(1, 15)]))
    assert batch is not None
    assert [row.num_drafts for row in batch.rows] == [3] + [0] * 13


def test_drafts_take_no_block_while_somebody_waits() -> None:
    scheduler = drafting(repeating(1, 30, max_tokens=40), num_blocks=8)
    waiting = make_sequence(2, 7 * BLOCK_TOKENS)
    scheduler.add(waiting)
    batch = schedule(scheduler)
    assert batch is not None
    assert waiting.sequence_id in scheduler.waiting
    assert [(row.num_drafts, len(row.blocks)) for row in batch.rows] == [(1, 1)]


def test_blocks_of_rejected_drafts_go_back() -> None:
    sequence = repeating(1, 29)
    scheduler = drafting(sequence)
    for token_ids, num_blocks in (((99,), 1), ((99, 12), 2)):
        sequence.drafter = Known([99, 12, 13])
        batch = schedule(scheduler)
        assert batch is not None
        assert len(batch.rows[0].blocks) == 2
        assert scheduler.ledger.available() == 62
        drawn = (Drawn(SequenceId(1), token_ids),)
        scheduler.complete(StepResult(batch.step_id, drawn, 0.0, 0.0))
        scheduler.check()
        scheduler.ledger.check()
        assert len(sequence.blocks) == num_blocks
        assert scheduler.ledger.available() == 64 - num_blocks


def test_a_step_with_drafts_has_none_ahead() -> None:
    """How many tokens it gives is not known."""
    scheduler = drafting(repeating(1, 10), make_sequence(2, 10))
    batch = schedule(scheduler)
    assert batch is not None
    assert [row.num_drafts for row in batch.rows] == [4, 0]
    assert scheduler.schedule_ahead() is None


def test_a_step_without_drafts_has_one_ahead_that_may_have_some() -> None:
    """The first token guessed is the one that is being drawn."""
    first, second = repeating(1, 9), make_sequence(2, 10)
    scheduler = drafting(first, second)
    first.drafter = Known([])
    batch = schedule(scheduler)
    assert batch is not None
    assert [row.num_drafts for row in batch.rows] == [0, 0]
    first.drafter = None
    following = scheduler.schedule_ahead()
    assert following is not None
    scheduler.check()
    drawn = (Drawn(SequenceId(1), (12,)), Drawn(SequenceId(2), (50,)))
    result = StepResult(batch.step_id, drawn, 0.0, 0.0)
    fill(following, result)
    assert [row.token_ids.tolist() for row in following.rows] == [[12, 13, 10, 11, 12], [50]]
    assert [row.start for row in following.rows] == [10, 11]
    scheduler.complete(result)
    scheduler.check()
    assert scheduler.schedule_ahead() is None
    drawn = (Drawn(SequenceId(1), (13, 10, 99)), Drawn(SequenceId(2), (51,)))
    scheduler.complete(StepResult(following.step_id, drawn, 0.0, 0.0))
    scheduler.check()
    assert first.token_ids[9:].tolist() == [11, 12, 13, 10, 99]
    assert first.num_computed == 13


def test_drafts_never_take_the_block_that_a_decode_needs() -> None:
    """The second one's last token is the first of a block, and there is one block left."""
    first, second = repeating(1, 30), repeating(2, 32)
    scheduler = drafting(first, second, num_blocks=3)
    batch = schedule(scheduler)
    assert batch is not None
    assert [len(row.blocks) for row in batch.rows] == [1, 2]
    assert second.num_preemptions == 0


def test_drafts_of_a_sequence_removed_meanwhile_count_for_nothing() -> None:
    sequence = repeating(1, 10)
    scheduler = drafting(sequence)
    batch = schedule(scheduler)
    assert batch is not None
    scheduler.remove(sequence)
    drawn = (Drawn(SequenceId(1), (13, 10)),)
    assert scheduler.complete(StepResult(batch.step_id, drawn, 0.0, 0.0)) == []
    assert scheduler.drafting.num_drafted == 0
    assert scheduler.ledger.num_held == 0


class Random3(NgramDrafter):
    """Guesses among three tokens."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    def propose(self, token_ids: "array[int]", max_tokens: int) -> "array[int]":
        num_tokens = self._rng.randint(0, max_tokens)
        return array("I", self._rng.choices((7, 8, 9), k=num_tokens))


def draw(row: Row, rng: Random) -> Drawn:
    """As a device whose tokens come from `rng`."""
    drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
    token_ids = [rng.choice((7, 8, 9))]
    while len(token_ids) <= len(drafts) and token_ids[-1] == drafts[len(token_ids) - 1]:
        token_ids.append(rng.choice((7, 8, 9)))
    return Drawn(row.sequence_id, tuple(token_ids))


def assert_drafts_are_extra(scheduler: Scheduler, before: Scheduler, batch: Batch | None) -> None:
    """`before` is the state in front of `batch`: without drafts the same would have come of it."""
    before.drafting = Drafting(before.ledger, 0)
    plain = schedule(before)
    assert (batch is None) == (plain is None)
    for name in ("waiting", "running", "parked"):
        assert getattr(scheduler, name).keys() == getattr(before, name).keys()
    if batch is None or plain is None:
        return
    for row, other in zip(batch.rows, plain.rows, strict=True):
        assert row.sequence_id == other.sequence_id
        assert row.token_ids[: len(row.token_ids) - row.num_drafts] == other.token_ids
        assert (row.start, row.sample) == (other.start, other.sample)
        assert len(row.blocks) * BLOCK_TOKENS >= row.start + len(row.token_ids)
        assert len(other.blocks) <= len(row.blocks)
    num_drafts = batch.num_tokens - plain.num_tokens
    assert num_drafts <= max(0, scheduler.settings.step_tokens - plain.num_tokens)


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=8),
    st.integers(8, 24),
    st.integers(1, 16),
    st.integers(64, 100),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_drafts_keep_nobody_waiting(
    shapes: list[tuple[int, int]], num_blocks: int, num_drafts: int, step_tokens: int, rng: Random
) -> None:
    """Each step is the one that would come without drafts, and drafts in what that leaves.

    Between two steps nobody has more blocks than his tokens take.
    """
    scheduler = make_scheduler(num_blocks, num_drafts=num_drafts, step_tokens=step_tokens)
    arrivals = []
    for number, (length, wanted) in enumerate(shapes):
        sequence = make_sequence(number, length, max_tokens=wanted, first=1000 * number)
        sequence.drafter = Random3(Random(number))
        arrivals.append(sequence)
    sequences = arrivals[:]
    result: StepResult | None = None
    for _ in range(3000):
        if arrivals and (rng.random() < 0.3 or not scheduler.running):
            scheduler.add(arrivals.pop())
        batch = scheduler.step
        if batch is None:
            before = deepcopy(scheduler)
            batch = schedule(scheduler)
            assert_drafts_are_extra(scheduler, before, batch)
        else:
            assert result is not None
            fill(batch, result)
        if batch is None:
            break
        if rng.random() < 0.5:
            following = scheduler.schedule_ahead()
            assert following is None or not any(row.num_drafts for row in batch.rows)
        drawn = tuple(draw(row, rng) for row in batch.rows if row.sample)
        result = StepResult(batch.step_id, drawn, 0.0, 0.0)
        for sequence, _ in scheduler.complete(result):
            assert len(sequence.token_ids) <= sequence.max_length
            if len(sequence.token_ids) == sequence.max_length:
                scheduler.remove(sequence)
            elif not sequence.in_step and len(sequence.token_ids) > sequence.num_prompt + 1:
                assert len(sequence.blocks) <= blocks_for(len(sequence.token_ids))
        scheduler.check()
        scheduler.ledger.check()
    assert all(len(s.token_ids) == s.max_length for s in sequences)
    assert scheduler.ledger.num_held == 0
    assert scheduler.drafting.num_accepted <= scheduler.drafting.num_drafted
    assert scheduler.drafting.num_accepted == sum(sequence.num_accepted for sequence in sequences)
