"""Drafts from a sequence's own n-grams."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from llmrt.engine.ngram_drafter import MAX_MISSES, MIN_NGRAM, NgramDrafter


def ids(*tokens: int) -> "array[int]":
    return array("I", tokens)


def test_what_followed_the_latest_occurrence_is_proposed() -> None:
    sequence = ids(1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 1, 2, 3)
    assert NgramDrafter().propose(sequence, 3) == ids(9, 4, 1)
    assert NgramDrafter().propose(sequence, 1) == ids(9)


def test_a_longer_match_beats_a_later_one() -> None:
    assert NgramDrafter().propose(ids(1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3), 1) == ids(7)


def test_a_shorter_match_is_taken_where_no_longer_one_is() -> None:
    assert NgramDrafter().propose(ids(2, 3, 7, 6, 2, 3), 2) == ids(7, 6)


def test_nothing_is_proposed_without_a_match() -> None:
    for sequence in (ids(), ids(1), ids(1, 1), ids(1, 2), ids(1, 2, 3, 4)):
        assert NgramDrafter().propose(sequence, 4) == ids()


def test_a_text_with_a_period_goes_on_with_it() -> None:
    assert NgramDrafter().propose(ids(5, 5, 5, 5), 4) == ids(5, 5, 5, 5)
    assert NgramDrafter().propose(ids(8, 1, 2, 3, 1, 2), 7) == ids(3, 1, 2, 3, 1, 2, 3)


def test_the_index_grows_with_the_sequence() -> None:
    drafter = NgramDrafter()
    sequence = ids(1, 2, 3)
    assert drafter.propose(sequence, 2) == ids()
    sequence.extend((4, 1, 2))
    assert drafter.propose(sequence, 2) == ids(3, 4)
    sequence.extend((9, 1, 2))
    assert drafter.propose(sequence, 2) == ids(9, 1)


def test_misses_make_drafts_rarer_and_a_hit_ends_that() -> None:
    drafter = NgramDrafter()
    sequence = ids(1, 2, 3, 1, 2)

    def pause() -> int:
        steps = 0
        while not drafter.propose(sequence, 4):
            steps += 1
        return steps

    assert drafter.propose(sequence, 4)
    pauses: list[int] = []
    for _ in range(MAX_MISSES + 1):
        drafter.learn(4, 0)
        pauses.append(pause())
    assert pauses == [1, 3, 7, 15, 31, 31]
    drafter.learn(4, 1)
    assert pause() == 0
    assert (drafter.num_drafted, drafter.num_accepted) == (28, 1)


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_a_grown_index_finds_what_a_new_one_does(tokens: list[int], steps: list[int]) -> None:
    drafter, sequence = NgramDrafter(), ids()
    for step in steps:
        sequence.extend(tokens[len(sequence) : len(sequence) + step])
        proposed = drafter.propose(sequence, 4)
        assert proposed == NgramDrafter().propose(sequence, 4)
        if proposed:
            assert len(proposed) == 4
            # It occurs in the text that it continues, before its own end.
            part, text = sequence[-MIN_NGRAM:] + proposed, sequence + proposed
            assert any(text[i : i + len(part)] == part for i in range(len(sequence) - MIN_NGRAM))
