"""A hand-over in place: P writes into our blocks, which it has in its memory. Pure.

The ledger's grant ends by COMMIT, by STOPPED or by the confirmed death of P. Until then nobody gets
its blocks: those of a silent P are quarantined.
"""

from llmrt.wire import messages as m
from llmrt.workers.handover import Handover


class GrantedPrefill(Handover):
    """P has the right to write."""

    __slots__ = ()

    def committed(self, commit: m.Commit) -> None:
        ref = m.GrantRef(grant_id=self.grant_id)
        self.context.send_peer(self.peer, m.COMMITTED, ref, request_id=self.request_id)
        if self.sequence is not None:
            self.arrive(commit)
        else:
            self._end()

    def stopped(self, reason: str) -> None:
        self.detach(reason)
        self._end()

    def abandon(self, reason: str) -> None:
        if self.context.ledger.quarantine(self.grant_id):
            self.context.log(
                "kv.grant_quarantined",
                "warning",
                request_id=self.request_id.hex(),
                peer=self.peer.worker_id,
                num_blocks=len(self.grant.blocks),
            )
        self.detach(reason)
        self.begin_end()

    def died(self) -> None:
        """The ledger has ended all grants of that writer."""
        self.detach("the prefill worker died")
        self.is_over = True

    def withdraw(self) -> None:
        self.begin_end()

    def _end(self) -> None:
        self.context.ledger.stop(self.grant_id)
        self.is_over = True
