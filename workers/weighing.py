"""Weighs where prompts are computed: facts for `placement`, and what is learned after. Pure."""

from dataclasses import replace

from llmrt.engine.sequence import Sequence
from llmrt.wire.ids import WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.context import WorkerContext
from llmrt.workers.handover import Arrival
from llmrt.workers.links import GRANT, PeerLinks
from llmrt.workers.placement import Placement, PlacementCosts, choose_prefill
from llmrt.workers.request import OwnedRequest


class Weighing:
    """Stands between the requests of an owner and its measured costs."""

    def __init__(self, context: WorkerContext, links: PeerLinks) -> None:
        self._context = context
        self._links = links
        self._costs = context.costs

    def choose(self, request: OwnedRequest, sequence: Sequence) -> Placement:
        """Where the prompt of a waiting sequence should be computed, as things are now."""
        named = request.named_prefill
        remote = named if named is not None and named not in request.excluded else None
        mode = None if remote is None else self._links.mode_to(remote)
        placement = self._context.settings.placement
        num_cached = self._num_cached(sequence)
        facts = PlacementCosts(
            num_uncached=len(sequence.token_ids) - num_cached,
            remote=remote,
            remote_mode=mode,
        )
        if placement == "auto" and remote is not None and mode is not None:
            facts = self._weighed(facts, remote, sequence, num_cached)
        return choose_prefill(placement, facts)

    def offered(self, peer: WorkerName, sequence: Sequence) -> None:
        """A prefill worker is asked for the prompt."""
        seconds = self._there_s(peer, sequence, self._num_cached(sequence))
        self._costs.offered(peer, sequence.sequence_id, seconds, self._context.now)

    def arrived(self, request: OwnedRequest, arrival: Arrival) -> None:
        """It has computed it."""
        commit, sequence, now = arrival.commit, arrival.sequence, self._context.now
        self.gone(sequence)
        if request.named_prefill is None:
            return
        busy_s = (commit.queue_ms + commit.prefill_ms) / 1000
        self._costs.prefilled(
            request.named_prefill,
            self._costs.prefill.of(commit.num_cached, len(sequence.token_ids)),
            commit.prefill_ms / 1000,
            max(0.0, now - arrival.offered_at - busy_s),
            now,
        )

    def gone(self, sequence: Sequence) -> None:
        """No prefill worker has the prompt any more. Idempotent."""
        self._costs.settled(sequence.sequence_id, self._context.now)

    def _weighed(
        self, facts: PlacementCosts, remote: WorkerName, sequence: Sequence, num_cached: int
    ) -> PlacementCosts:
        costs, now, scheduler = self._costs, self._context.now, self._context.scheduler
        if not costs.prefill.is_measured:
            return facts
        running = scheduler.running.values()
        placed = (s for s in scheduler.waiting.values() if s.is_placed)
        prefilling = [*(s for s in running if s.is_prefilling), *placed]
        return replace(
            facts,
            here_s=costs.prefill.of(num_cached, len(sequence.token_ids)),
            there_s=self._there_s(remote, sequence, num_cached),
            queue_here_s=sum(
                costs.prefill.of(s.num_computed, len(s.token_ids)) for s in prefilling
            ),
            queue_there_s=costs.queue_s(remote, now),
            handover_s=costs.handover_s(remote),
            num_decoding=sum(not s.is_prefilling for s in running),
            num_here=len(prefilling),
            num_there=costs.num_offered,
            decode_slowdown=costs.decode.slowdown,
            prefill_slowdown=costs.prefill.slowdown,
        )

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens of the prompt whose KV is in our cache."""
        hashes = self._context.scheduler.cache.hashes(sequence)
        return self._context.ledger.lookup(hashes) * BLOCK_TOKENS

    def _there_s(self, peer: WorkerName, sequence: Sequence, num_cached: int) -> float:
        """Seconds of the prompt at a prefill worker, which reads our cache in place only."""
        start = num_cached if self._links.mode_to(peer) == GRANT else 0
        seconds = self._costs.prefill.of(start, len(sequence.token_ids))
        return seconds * self._costs.factor(peer, self._context.now)
