"""Ends by force the process of a writer that is silent, or that holds too much of our arena. Pure.

What such a writer may still write is quarantined, and only its confirmed death gives it back. The
kernel has told us which process maps our arena, so that process is ended and no other; whoever
supervises it starts it again. A broker that starts anew lists nobody at first, and so puts every
grant into quarantine: a writer that is well is given the time to stop.
"""

from collections.abc import Iterable

from llmrt.wire.ids import WorkerName
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import FenceWriter
from llmrt.workers.granted import GrantedPrefill

MAX_QUARANTINED_SHARE = 0.1


class Fencing:
    """Knows whom it has condemned, until that process is dead."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._fenced: set[WorkerName] = set()

    def beat(self, grants: Iterable[GrantedPrefill]) -> None:
        """Condemn writers of these grants, those that nobody waits for among them."""
        settings, ledger = self._context.settings, self._context.ledger
        if not settings.has_fencing:
            return
        is_too_much = ledger.num_quarantined > MAX_QUARANTINED_SHARE * ledger.num_blocks
        grants = list(grants)
        for grant in grants:
            if grant.is_silent:
                self._fence(grant.peer, grants, f"silent for {grant.silent_s:g} s")
            elif is_too_much and grant.is_quarantined and grant.is_overdue:
                reason = f"{ledger.num_quarantined} of {ledger.num_blocks} blocks are quarantined"
                self._fence(grant.peer, grants, reason)

    def died(self, peer: WorkerName) -> None:
        self._fenced.discard(peer)

    def _fence(self, peer: WorkerName, grants: list[GrantedPrefill], reason: str) -> None:
        if peer in self._fenced:
            return
        self._fenced.add(peer)
        self._context.counters["writers_fenced"] += 1
        self._context.log(
            "peer.fenced",
            "warning",
            worker=self._context.settings.name.full_name,
            peer=peer.full_name,
            num_blocks=sum(len(grant.grant.blocks) for grant in grants if grant.peer == peer),
            reason=reason,
        )
        self._context.do(FenceWriter(peer))
