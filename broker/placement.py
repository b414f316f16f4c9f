"""Which worker gets a request: plain functions of what the broker knows."""

from collections.abc import Callable, Sequence

import msgspec

from llmrt.wire.ids import WorkerId

LONGEST_PREFIX = "longest-prefix"
# Pieces, some thousand tokens: from here on a prefix is worth all the slack.
FULL_OVERLAP = 8


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could take the request.

    `load` is comparable between candidates only. `pressure` decides between equal loads. A
    stale worker has missed a beat: it is taken only if every candidate is stale. `overlap` counts
    the pieces at the start of the prompt that it has seen, for which it may have up to `slack` more
    load than another.
    """

    worker_id: WorkerId
    load: float
    pressure: float = 0.0
    is_stale: bool = False
    overlap: int = 0
    slack: float = 0.0


def choose(policy: str, candidates: Sequence[Candidate], cursor: int) -> Candidate:
    """The candidate, of at least one, that `policy` (a key of `POLICIES`) takes.

    `cursor` is the number of choices made before; it moves ties and turns on.
    """
    fresh = [candidate for candidate in candidates if not candidate.is_stale] or candidates
    return POLICIES[policy](fresh, cursor)


def round_robin(candidates: Sequence[Candidate], cursor: int) -> Candidate:
    return candidates[cursor % len(candidates)]


def least_loaded(candidates: Sequence[Candidate], cursor: int) -> Candidate:
    """Ties go round, so that equal workers share short requests that never overlap."""
    turn = cursor % len(candidates)
    return min(
        [*candidates[turn:], *candidates[:turn]],
        key=lambda candidate: (candidate.load, candidate.pressure),
    )


def longest_prefix(candidates: Sequence[Candidate], cursor: int) -> Candidate:
    """Whoever has seen most of the prompt, unless it is much busier than the least loaded one."""
    lowest = min(candidate.load for candidate in candidates)
    near = [c for c in candidates if c.overlap and c.load - lowest <= _tolerated(c)]
    if not near:
        return least_loaded(candidates, cursor)
    longest = max(candidate.overlap for candidate in near)
    return least_loaded([c for c in near if c.overlap == longest], cursor)


def _tolerated(candidate: Candidate) -> float:
    """A short overlap saves little, and is worth little waiting."""
    return candidate.slack * min(1.0, candidate.overlap / FULL_OVERLAP)


POLICIES: dict[str, Callable[[Sequence[Candidate], int], Candidate]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    LONGEST_PREFIX: longest_prefix,
}


def decode_load(num_owned: int, num_waiting: int, max_running: int) -> float:
    """Requests per place. What waits counts twice: the worker lacks blocks for it."""
    return (num_owned + num_waiting) / max(1, max_running)


def prefill_load(num_reported: int, num_routed_since: int) -> float:
    """Prompts in the queue: as last reported, and those that its partners were told of since."""
    return float(num_reported + num_routed_since)
