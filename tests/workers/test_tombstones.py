"""Ends are remembered by key and attempt, and only so many."""

from llmrt.wire.ids import Attempt
from llmrt.workers.tombstones import MAX_TOMBSTONES, Tombstones


def test_an_end_covers_its_attempt_and_those_before_it() -> None:
    ended: Tombstones[str] = Tombstones()
    ended.bury("a", Attempt(2, 3))
    ended.bury("a", Attempt(1, 9))
    covered = [Attempt(1, 9), Attempt(2, 3), Attempt(2, 4), Attempt(3, 1)]
    assert [ended.covers("a", attempt) for attempt in covered] == [True, True, False, False]
    assert not ended.covers("b", Attempt(1, 1))


def test_the_oldest_end_is_forgotten_first_and_one_that_came_again_is_not_old() -> None:
    ended: Tombstones[int] = Tombstones()
    for key in (*range(MAX_TOMBSTONES), 0, MAX_TOMBSTONES):
        ended.bury(key)
    assert [ended.covers(key) for key in (0, 1, 2, MAX_TOMBSTONES)] == [True, False, True, True]
