"""The scheduler gives each step the right rows and each sequence the right blocks."""

from array import array
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Batch, Drawn, SequenceId, StepResult, fill
from llmrt.engine.policy import growth_reserve, preemption_victim, prefill_order
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.ledger import Ledger
from llmrt.wire.errors import InternalError
from llmrt.wire.ids import BlockId
from llmrt.wire.sampling import SamplingParams

EOS = frozenset({0})


def make_sequence(
    number: int, num_tokens: int, *, max_tokens: int = 1000, priority: int = 0, first: int = 10
) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(number),
        token_ids=array("I", range(first, first + num_tokens)),
        num_prompt=num_tokens,
        params=SamplingParams(),
        seed=0,
        max_length=num_tokens + max_tokens,
        end_token_ids=EOS,
        priority=priority,
        order=float(number),
    )


def make_scheduler(num_blocks: int = 64, **settings: int) -> Scheduler:
    values = {"max_running": 8, "step_tokens": 128, "chunk_tokens": 64} | settings
    return Scheduler(Ledger(num_blocks), SchedulerSettings(**values))  # type: ignore[arg-type] # ints only


def finish(scheduler: Scheduler, batch: Batch, token_id: int = 7) -> list[Sequence]:
    drawn = tuple(Drawn(row.sequence_id, (token_id,)) for row in batch.rows if row.sample)
    with_token = scheduler.complete(StepResult(batch.step_id, drawn, 0.0, 0.0))
    scheduler.check()
    return [sequence for sequence, _ in with_token]


def schedule(scheduler: Scheduler) -> Batch | None:
    """A step of a worker that computes all prompts itself."""
    for sequence in scheduler.unplaced():
        sequence.is_placed = True
    return scheduler.schedule()


def step(scheduler: Scheduler) -> Batch:
    batch = schedule(scheduler)
    assert batch is not None
    finish(scheduler, batch)
    return batch


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(row.sequence_id, row.start, row.start + len(row.token_ids)) for row in batch.rows]


def test_a_short_prompt_is_one_row_that_samples() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 40))
    batch = schedule(scheduler)
    assert batch is not None
    assert spans(batch) == [(1, 0, 40)]
    assert batch.rows[0].sample is not None
    assert batch.rows[0].sample.position == 40
    assert len(batch.rows[0].blocks) == 2


def test_no_step_is_scheduled_while_one_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 4))
    assert schedule(scheduler) is not None
    scheduler.add(make_sequence(2, 4))
    assert schedule(scheduler) is None


def test_a_long_prompt_is_cut_on_the_chunk_grid() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 150))
    assert [spans(step(scheduler))[0] for _ in range(3)] == [
        (1, 0, 64),
        (1, 64, 128),
        (1, 128, 150),
    ]


def test_chunks_end_on_the_grid_whatever_else_is_in_the_step() -> None:
    """So a text does not depend on company, even where chunk boundaries change rounding."""
    scheduler = make_scheduler(step_tokens=64)
    scheduler.add(make_sequence(1, 20))
    step(scheduler)
    scheduler.add(make_sequence(2, 150, first=500))
    steps = [spans(step(scheduler)) for _ in range(3)]
    assert [span for spans_ in steps for span in spans_ if span[0] == 2] == [
        (2, 0, 64),
        (2, 64, 128),
        (2, 128, 150),
    ]
    assert all(span[0] == 1 for span, _ in steps)


def test_a_running_sequence_decodes_one_token_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 5))
    step(scheduler)
    assert spans(step(scheduler)) == [(1, 5, 6)]
    assert spans(step(scheduler)) == [(1, 6, 7)]


def test_a_short_prompt_passes_beside_a_long_one() -> None:
    """A long prompt must not keep short ones waiting until it is done."""
    scheduler = make_scheduler(num_blocks=512)
    scheduler.add(make_sequence(1, 1000))
    scheduler.add(make_sequence(2, 900, first=2000))
    scheduler.add(make_sequence(3, 10, first=4000))
    assert spans(step(scheduler)) == [(1, 0, 64), (3, 0, 10)]


def test_a_higher_priority_goes_first() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_sequence(1, 10))
    scheduler.add(make_sequence(2, 10, priority=1))
    assert spans(step(scheduler)) == [(2, 0, 10)]


def test_full_blocks_are_found_again_except_the_one_with_the_last_token() -> None:
    scheduler = make_scheduler()
    first = make_sequence(1, 64)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    again = make_sequence(2, 64)
    scheduler.add(again)
    assert spans(step(scheduler)) == [(2, 32, 64)]
    assert again.num_cached == 32


def test_a_sequence_with_all_but_its_last_token_cached_starts_at_once() -> None:
    """One row in the step of its admission: nobody would ask for another step."""
    scheduler = make_scheduler()
    first = make_sequence(1, 65)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    scheduler.add(make_sequence(2, 65))
    assert spans(step(scheduler)) == [(2, 64, 65)]


def test_generated_tokens_are_found_again_too() -> None:
    """A chat's next turn holds this turn's answer."""
    scheduler = make_scheduler()
    first = make_sequence(1, 60)
    scheduler.add(first)
    for _ in range(8):
        step(scheduler)
    text = first.token_ids[:]
    scheduler.remove(first)
    again = make_sequence(2, 1)
    again.token_ids = text + array("I", [99])
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 67


def test_without_a_prefix_cache_nothing_is_found() -> None:
    scheduler = make_scheduler(has_prefix_cache=False)
    for number in (1, 2):
        sequence = make_sequence(number, 64)
        scheduler.add(sequence)
        assert spans(step(scheduler)) == [(number, 0, 64)]
        scheduler.remove(sequence)
    assert scheduler.ledger.num_cached == 0


def test_a_prompt_without_room_waits() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence(1, 90, max_tokens=6), make_sequence(2, 60, first=500)
    scheduler.add(first)
    scheduler.add(second)
    assert spans(step(scheduler))[0][0] == 1
    assert second.sequence_id in scheduler.waiting
    scheduler.remove(first)
    assert spans(step(scheduler)) == [(2, 0, 60)]


def test_growth_of_the_running_is_left_free() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(1, 30, max_tokens=40))
    step(scheduler)
    assert scheduler.reserve() == 2
    assert scheduler.has_room(1)
    assert not scheduler.has_room(2)


def test_the_youngest_is_preempted_and_computed_again_from_all_its_tokens() -> None:
    """Two sequences that each think that they end soon, in an arena with no block to spare."""
    scheduler = make_scheduler(num_blocks=4)
    old, young = make_sequence(1, 62), make_sequence(2, 60, first=500)
    for sequence in (old, young):
        scheduler.add(sequence)
        scheduler.park(sequence, 2)
        scheduler.join(sequence, scheduler.ledger.allocate(2) or [], 7, num_sealed=0)
    for _ in range(3):
        step(scheduler)
    assert scheduler.waiting == {young.sequence_id: young}
    assert young.num_preemptions == 1
    kept = len(young.token_ids)
    assert kept > 61
    scheduler.remove(old)
    assert spans(step(scheduler)) == [(2, 32, kept)]


def test_a_sequence_removed_in_its_step_keeps_its_blocks_until_the_step_returns() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, 40)
    scheduler.add(sequence)
    batch = schedule(scheduler)
    assert batch is not None
    scheduler.remove(sequence)
    assert scheduler.ledger.num_held == 2
    assert finish(scheduler, batch) == []
    assert scheduler.ledger.num_free == scheduler.ledger.num_blocks


def test_blocks_of_another_arena_are_neither_allocated_nor_released() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, 60)
    sequence.arena, sequence.blocks = ArenaId("decode-0@1"), array("I", [9, 8])
    sequence.num_given = 32
    scheduler.add(sequence)
    batch = schedule(scheduler)
    assert batch is not None
    assert spans(batch) == [(1, 32, 60)]
    assert batch.rows[0].arena == "decode-0@1"
    finish(scheduler, batch)
    scheduler.remove(sequence)
    assert scheduler.ledger.num_free == scheduler.ledger.num_blocks


def test_a_parked_sequence_joins_with_its_first_token() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, 40)
    scheduler.add(sequence)
    scheduler.park(sequence, 2)
    assert schedule(scheduler) is None
    blocks = scheduler.ledger.allocate(2)
    assert blocks is not None
    scheduler.join(sequence, blocks, 77, num_sealed=0)
    scheduler.check()
    assert spans(step(scheduler)) == [(1, 40, 41)]
    assert scheduler.ledger.num_cached == 1


def test_a_parked_sequence_reserves_its_growth_only() -> None:
    """Its prompt has its blocks in the grant already."""
    scheduler = make_scheduler(num_blocks=100)
    sequence = make_sequence(1, 60 * 32, max_tokens=10)
    scheduler.add(sequence)
    scheduler.park(sequence, 60)
    assert scheduler.reserve() == 1


def test_a_sequence_that_is_not_placed_waits() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 4))
    assert scheduler.schedule() is None
    assert [s.sequence_id for s in scheduler.unplaced()] == [1]


def test_blocks_from_the_cache_are_not_sealed_again_when_a_preempted_sequence_joins() -> None:
    scheduler = make_scheduler()
    first = make_sequence(1, 96)
    scheduler.add(first)
    for _ in range(3):
        step(scheduler)
    again = make_sequence(2, 96)
    again.num_cached, again.num_preemptions = 0, 1
    scheduler.add(again)
    scheduler.park(again, 3)
    prefix = scheduler.ledger.take_prefix(scheduler.cache.hashes(again))
    assert len(prefix) == 2
    blocks = [*prefix, *(scheduler.ledger.allocate(1) or [])]
    scheduler.join(again, blocks, 7, num_sealed=2)
    scheduler.check()


def test_an_abandoned_step_gives_its_sequences_back() -> None:
    scheduler = make_scheduler()
    kept, removed = make_sequence(1, 4), make_sequence(2, 4)
    scheduler.add(kept)
    scheduler.add(removed)
    schedule(scheduler)
    scheduler.remove(removed)
    assert scheduler.abandon_step() == [kept]
    assert scheduler.ledger.num_held == 1


def ahead(scheduler: Scheduler, *lengths: int, **params: float) -> Batch | None:
    """Sequences of these lengths are in a step; the one behind it."""
    for number, length in enumerate(lengths, 1):
        sequence = make_sequence(number, length, first=1000 * number)
        sequence.params = SamplingParams(**params)  # type: ignore[arg-type] # of SamplingParams
        scheduler.add(sequence)
    assert schedule(scheduler) is not None
    batch = scheduler.schedule_ahead()
    scheduler.check()
    return batch


def test_a_step_made_ahead_is_the_one_that_would_come() -> None:
    """Prompts that end in the running step decode in the next one, growing by a block."""
    scheduler, plain = make_scheduler(), make_scheduler()
    batch = ahead(scheduler, 32, 5)
    assert batch is not None
    assert batch.follows
    for other in (scheduler, plain):
        if other is plain:
            assert ahead(plain, 32, 5) is not None
            plain.ahead, plain._in_ahead = None, []
        assert other.step is not None
        drawn = tuple(Drawn(row.sequence_id, (7 + row.sequence_id,)) for row in other.step.rows)
        result = StepResult(other.step.step_id, drawn, 0.0, 0.0)
        other.complete(result)
    fill(batch, result)
    assert scheduler.step is batch
    expected = plain.schedule()
    assert expected is not None
    assert batch.rows == expected.rows
    assert [len(row.blocks) for row in batch.rows] == [2, 1]


def test_only_one_step_is_made_ahead() -> None:
    scheduler = make_scheduler()
    assert ahead(scheduler, 4) is not None
    assert scheduler.schedule_ahead() is None
    assert scheduler.schedule() is None


def test_no_step_is_made_ahead_of_what_it_depends_on() -> None:
    """An unfinished prompt, a penalty on tokens that are being drawn, somebody who waits."""
    assert ahead(make_scheduler(), 100) is None
    assert ahead(make_scheduler(), 4, repetition_penalty=2.0) is None
    assert ahead(make_scheduler(max_running=1), 4, 4) is None
    assert make_scheduler().schedule_ahead() is None


def test_no_step_is_made_ahead_that_would_preempt() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for number in (1, 2):
        sequence = make_sequence(number, 63, first=1000 * number)
        scheduler.add(sequence)
        scheduler.park(sequence, 2)
        scheduler.join(sequence, scheduler.ledger.allocate(2) or [], 7, num_sealed=0)
    assert schedule(scheduler) is not None
    assert scheduler.schedule_ahead() is None
    scheduler.check()


def test_a_sequence_that_ends_by_its_length_is_not_in_the_step_ahead() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 4, max_tokens=1))
    scheduler.add(make_sequence(2, 4, max_tokens=2, first=500))
    assert schedule(scheduler) is not None
    batch = scheduler.schedule_ahead()
    assert batch is not None
    assert spans(batch) == [(2, 4, 5)]


def test_a_sequence_removed_with_a_step_ahead_keeps_its_blocks_until_that_returns() -> None:
    scheduler = make_scheduler()
    first = ahead(scheduler, 4, 4)
    assert first is not None
    gone = scheduler.running[SequenceId(1)]
    assert scheduler.step is not None
    finish(scheduler, scheduler.step)
    scheduler.remove(gone)
    assert scheduler.ledger.num_held == 2
    assert [s.sequence_id for s in finish(scheduler, first)] == [2]
    assert scheduler.ledger.num_held == 1


def test_a_failed_step_is_abandoned_with_the_one_behind_it() -> None:
    scheduler = make_scheduler()
    assert ahead(scheduler, 4, 4) is not None
    for sequence in scheduler.abandon_step():
        scheduler.remove(sequence)
    scheduler.check()
    assert scheduler.ledger.num_held == 2
    assert scheduler.abandon_step() == []
    scheduler.check()
    assert scheduler.ledger.num_held == 0


def test_a_row_that_failed_gives_the_step_behind_it_some_token() -> None:
    """Its sequence ends: nobody looks at what is drawn from it."""
    scheduler = make_scheduler()
    batch = ahead(scheduler, 4)
    assert batch is not None
    error = InternalError("a logit is nan")
    fill(batch, StepResult(1, (Drawn(SequenceId(1), (), error=error),), 0.0, 0.0))
    assert batch.rows[0].token_ids == array("I", [0])


def test_policy_orders_the_oldest_first_then_the_shortest() -> None:
    sequences = [make_sequence(1, 50), make_sequence(2, 90), make_sequence(3, 20)]
    assert [s.sequence_id for s in prefill_order(sequences)] == [1, 3, 2]
    assert prefill_order([]) == []


def test_policy_preempts_the_youngest_of_the_lowest_priority() -> None:
    sequences = [make_sequence(1, 9), make_sequence(2, 9), make_sequence(3, 9, priority=1)]
    for sequence in sequences:
        sequence.blocks.append(BlockId(1))
    assert preemption_victim(sequences) is sequences[1]
    sequences[1].in_step = True
    assert preemption_victim(sequences) is sequences[0]


def test_policy_reserves_growth_until_the_next_end() -> None:
    first, second = make_sequence(1, 30, max_tokens=10), make_sequence(2, 32, max_tokens=500)
    first.blocks.append(BlockId(0))
    second.blocks.append(BlockId(1))
    assert growth_reserve([first, second]) == 2
    assert growth_reserve([]) == 0


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=8),
    st.integers(8, 20),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_every_sequence_gets_all_its_tokens_with_any_room(
    shapes: list[tuple[int, int]], num_blocks: int, rng: Random
) -> None:
    """Whatever is preempted on the way, and made ahead or not; and all blocks come back."""
    scheduler = make_scheduler(num_blocks=num_blocks)
    sequences = [
        make_sequence(i, length, max_tokens=wanted, first=1000 * i)
        for i, (length, wanted) in enumerate(shapes)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(3000):
        batch = scheduler.step or schedule(scheduler)
        if batch is None:
            break
        if rng.random() < 0.7:
            scheduler.schedule_ahead()
        for row in batch.rows:
            assert row.arena == LOCAL_ARENA
        for sequence in finish(scheduler, batch):
            if len(sequence.token_ids) == sequence.max_length:
                scheduler.remove(sequence)
        scheduler.ledger.check()
    assert all(len(s.token_ids) == s.max_length for s in sequences)
    assert scheduler.ledger.num_held == 0


def test_sequences_of_two_salts_never_share_a_block() -> None:
    scheduler = make_scheduler()
    starts = []
    for number, salt in enumerate((b"", b"a", b"b", b"a"), start=1):
        sequence = make_sequence(number, 100, max_tokens=1)
        sequence.salt = salt
        scheduler.add(sequence)
        batch = step(scheduler)
        starts.append(batch.rows[0].start)
        while scheduler.running[sequence.sequence_id].num_generated == 0:
            step(scheduler)
        scheduler.remove(sequence)
    assert starts == [0, 0, 0, 99]


def test_a_cached_block_that_changed_is_computed_anew() -> None:
    """And so is what comes behind it, which was computed from it."""
    content = dict.fromkeys(range(64), 0)
    scheduler = Scheduler(
        Ledger(64, checksum=lambda block: content[block]),
        SchedulerSettings(step_tokens=128, chunk_tokens=128),
    )
    starts = []
    for number in (1, 2, 3):
        sequence = make_sequence(number, 100, max_tokens=1)
        scheduler.add(sequence)
        batch = step(scheduler)
        starts.append(batch.rows[0].start)
        scheduler.remove(sequence)
        if number == 1:
            content[batch.rows[0].blocks[1]] += 1
    assert starts == [0, 32, 99]
    assert scheduler.ledger.num_bad_seals == 1
    assert scheduler.ledger.num_held == 0


def test_a_prompt_waits_for_the_blocks_that_another_one_computes() -> None:
    scheduler = make_scheduler(step_tokens=256, chunk_tokens=128)
    first, second = make_sequence(1, 200), make_sequence(2, 200)
    second.token_ids = first.token_ids[:130] + array("I", range(5000, 5040))
    scheduler.add(first)
    scheduler.add(second)
    assert spans(step(scheduler)) == [(1, 0, 128)]
    assert spans(step(scheduler)) == [(1, 128, 200), (2, 128, 170)]
    assert second.num_cached == 128
    scheduler.check()


def test_a_prompt_does_not_wait_for_one_that_has_gone() -> None:
    scheduler = make_scheduler(step_tokens=128, chunk_tokens=128)
    first, second = make_sequence(1, 300), make_sequence(2, 300)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.remove(first)
    assert spans(step(scheduler)) == [(2, 128, 256)]


def test_a_prompt_does_not_wait_for_a_much_longer_one_elsewhere() -> None:
    """What is parked comes all at once: for a short beginning that would take too long."""
    scheduler = make_scheduler()
    long, short, same = make_sequence(1, 1000), make_sequence(2, 100), make_sequence(3, 1000)
    for sequence in (long, short, same):
        scheduler.add(sequence)
    scheduler.cache.hashes(long)
    scheduler.park(long, 32)
    assert not scheduler.awaits_prefix(short)
    assert scheduler.awaits_prefix(same)
    scheduler.unpark(long)
    assert not scheduler.awaits_prefix(same)


def test_the_last_block_goes_to_whoever_comes_first() -> None:
    scheduler = make_scheduler()
    first = make_sequence(1, 40)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    sequences = [make_sequence(number, 42) for number in (2, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert spans(step(scheduler)) == [(2, 40, 42), (3, 32, 42)]
    assert sequences[0].blocks[0] == sequences[1].blocks[0]
    assert sequences[0].blocks[1] != sequences[1].blocks[1]


def test_a_preempted_sequence_computes_one_token_again() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, 40)
    scheduler.add(sequence)
    for _ in range(5):
        step(scheduler)
    scheduler._preempt(sequence)
    sequence.is_placed = True
    assert spans(step(scheduler)) == [(1, 44, 45)]
