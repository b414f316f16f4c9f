"""Which worker gets a request: plain functions of what the broker knows."""

from collections.abc import Callable, Sequence

import msgspec

from llmrt.wire.ids import WorkerId

# A worker whose places are all taken, 32 as a rule, has as much to do as with a prompt of so many
# tokens: a stream has some hundred tokens to come, each about as dear as one of a prompt.
FULL_LOAD_TOKENS = 4096
# With these a prefill worker computes into the owner's blocks, or nothing yet: its own cache does
# not matter.
_WITHOUT_COPY = frozenset({"shm", "pending", "refused"})


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could take the request.

    `load` is the share of its places that is taken; at 1 the next request waits for one.
    `pressure` decides between equal loads. `num_queued` tokens of other prompts are computed
    before this one's, of which the worker may have the first `num_cached` in its cache. A stale
    worker has missed a beat: it is taken only if every candidate is stale.
    """

    worker_id: WorkerId
    load: float
    pressure: float = 0.0
    is_stale: bool = False
    num_queued: int = 0
    num_cached: int = 0


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
    return min(_from_turn(candidates, cursor), key=lambda c: (c.load, c.pressure))


def prefix_aware(candidates: Sequence[Candidate], cursor: int) -> Candidate:
    """Whoever has the least to compute until this prompt is done, streams counted as tokens.

    So a worker gets the prompts that begin with what it has cached, until it has more to do than
    another by what the cache saves. One without a free place gets none while another has one.
    """
    free = [candidate for candidate in candidates if candidate.load < 1.0] or candidates
    return min(_from_turn(free, cursor), key=lambda c: (_cost(c), c.pressure))


def _cost(candidate: Candidate) -> float:
    """In prompt tokens. What the prompt costs where nothing is cached is the same for all."""
    return candidate.num_queued - candidate.num_cached + FULL_LOAD_TOKENS * candidate.load


def _from_turn(candidates: Sequence[Candidate], cursor: int) -> list[Candidate]:
    turn = cursor % len(candidates)
    return [*candidates[turn:], *candidates[:turn]]


POLICIES: dict[str, Callable[[Sequence[Candidate], int], Candidate]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}


def decode_load(num_owned: int, num_waiting: int, max_running: int) -> float:
    """Requests per place. What waits counts twice: the worker lacks blocks for it."""
    return (num_owned + num_waiting) / max(1, max_running)


def prefill_load(num_reported: int, num_routed_since: int, max_running: int) -> float:
    """Prompts per place: as last reported, and those that its partners were told of since."""
    return (num_reported + num_routed_since) / max(1, max_running)


def fills_own_cache(transport: str) -> bool:
    """Whether a prefill worker computes in its own arena for an owner with this link to it."""
    return transport not in _WITHOUT_COPY
