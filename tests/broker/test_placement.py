"""Placement as vectors: candidates in, choice out."""

from collections import Counter

import pytest

from llmrt.broker.placement import (
    POLICIES,
    Candidate,
    choose,
    decode_load,
    prefill_load,
)
from llmrt.wire.ids import WorkerId


def candidate(
    name: str, load: float = 0.0, pressure: float = 0.0, *, is_stale: bool = False
) -> Candidate:
    return Candidate(WorkerId(name), load, pressure, is_stale)


def chosen(policy: str, candidates: list[Candidate], num_choices: int = 1) -> list[str]:
    choices = (choose(policy, candidates, cursor) for cursor in range(num_choices))
    return [choice.worker_id for choice in choices]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    workers = [candidate("a", 9), candidate("b"), candidate("c", 3)]
    assert chosen("round-robin", workers, 5) == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([candidate("a", 2), candidate("b", 1)], "b"),
        ([candidate("a", 1, 0.9), candidate("b", 1, 0.1)], "b"),
        ([candidate("a", 1), candidate("b", 0, is_stale=True)], "a"),
        ([candidate("a", 1, is_stale=True), candidate("b", 0, is_stale=True)], "b"),
    ],
    ids=["load", "pressure", "stale worker", "all stale"],
)
def test_the_least_loaded_is_chosen(workers: list[Candidate], expected: str) -> None:
    assert chosen("least-loaded", workers) == [expected]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_workers_share_evenly(policy: str) -> None:
    """Short requests that never overlap always find every worker idle."""
    workers = [candidate("a"), candidate("b"), candidate("c")]
    assert Counter(chosen(policy, workers, 30)) == {"a": 10, "b": 10, "c": 10}


def test_waiting_requests_count_twice_and_places_divide() -> None:
    assert decode_load(4, 0, 8) == 0.5
    assert decode_load(4, 4, 8) == 1.0
    assert decode_load(4, 0, 16) < decode_load(4, 0, 8)
    assert decode_load(0, 0, 0) == 0.0
    assert prefill_load(2, 3, 5) == 1.0
