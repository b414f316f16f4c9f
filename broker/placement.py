"""Which worker gets a request: plain functions of what the broker knows."""

from collections.abc import Callable, Sequence

import msgspec

from llmrt.wire.ids import WorkerId


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could take the request.

    `load` is comparable between candidates only. `pressure` decides between equal loads. A
    stale worker has missed a beat: it is taken only if every candidate is stale.
    """

    worker_id: WorkerId
    load: float
    pressure: float = 0.0
    is_stale: bool = False


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


POLICIES: dict[str, Callable[[Sequence[Candidate], int], Candidate]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
}


def decode_load(num_owned: int, num_waiting: int, max_running: int) -> float:
    """Requests per place. What waits counts twice: the worker lacks blocks for it."""
    return (num_owned + num_waiting) / max(1, max_running)


def prefill_load(num_reported: int, num_routed_since: int) -> float:
    """Prompts in the queue: as last reported, and those that its partners were told of since."""
    return float(num_reported + num_routed_since)
