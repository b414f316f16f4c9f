"""Placement as vectors: candidates in, choice out."""

from collections import Counter

import pytest

from llmrt.broker.placement import (
    FULL_LOAD_TOKENS,
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


def busy(name: str, load: float, num_queued: int = 0, num_cached: int = 0) -> Candidate:
    return Candidate(WorkerId(name), load, num_queued=num_queued, num_cached=num_cached)


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


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([busy("a", 0.1), busy("b", 0.1, num_cached=64)], "b"),
        ([busy("a", 0.1), busy("b", 0.2, num_cached=64)], "a"),
        ([busy("a", 0.1), busy("b", 0.2, num_cached=FULL_LOAD_TOKENS)], "b"),
        ([busy("a", 0.1), busy("b", 0.1, num_queued=600, num_cached=500)], "a"),
        ([busy("a", 0.9), busy("b", 1.0, num_cached=100_000)], "a"),
        ([busy("a", 1.5), busy("b", 1.6, num_cached=1000)], "b"),
    ],
    ids=["cached", "load", "much cached", "queue", "no free place", "nobody has a place"],
)
def test_a_cached_prefix_counts_as_much_as_it_saves(
    workers: list[Candidate], expected: str
) -> None:
    assert chosen("prefix-aware", workers) == [expected]


def test_a_hot_prefix_does_not_overload_its_worker() -> None:
    """It is computed a second time before one worker has a quarter of its places more."""
    counts, cached = Counter[str](), {"a": 1000, "b": 0}
    for _ in range(32):
        workers = [busy(name, counts[name] / 32, num_cached=cached[name]) for name in cached]
        (name,) = chosen("prefix-aware", workers)
        counts[name] += 1
        cached[name] = 1000
        assert counts["a"] - counts["b"] <= 8
    assert abs(counts["a"] - counts["b"]) <= 8
    assert counts["b"] >= 12
