"""A hand-over in place: P writes into our blocks, which it has in its memory. Pure.

The ledger's grant ends by COMMIT, by STOPPED or by the confirmed death of P. Until then nobody gets
its blocks: those of a silent P are quarantined. With checksums, the blocks of a COMMIT are compared
before the sequence goes on; P is done with them all the same.
"""

from array import array
from dataclasses import dataclass, field

from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u64
from llmrt.workers.handover import Handover


@dataclass(slots=True, eq=False)
class GrantedPrefill(Handover):
    """P has the right to write. `commit` is here while its blocks are compared."""

    commit: m.Commit | None = field(default=None, init=False)
    expected: "array[int]" = field(default_factory=lambda: array("Q"), init=False)

    @property
    def is_quarantined(self) -> bool:
        return self.context.ledger.is_quarantined(self.grant_id)

    def committed(self, commit: m.Commit, checksums: bytes) -> None:
        ref = m.GrantRef(grant_id=self.grant_id)
        self.context.send_peer(self.peer, m.COMMITTED, ref, request_id=self.request_id)
        if self.commit is not None:
            return  # it came again while its blocks are compared
        if self.sequence is None:
            self._end()
            return
        indices, self.expected = self.checked_indices, unpack_u64(checksums)
        if len(self.expected) != len(indices):
            self._refuse(f"{len(self.expected)} checksums came for {len(indices)} blocks")
        elif indices:
            self.commit = commit
            self.checks.start(self, [self.grant.all_blocks[i] for i in indices])
        else:
            self.arrive(commit)

    def hashed(self, hash_id: int, checksums: "array[int]") -> None:
        if self.sequence is None or self.commit is None:
            return  # its request or P ended meanwhile
        if self.compare(self.checked_indices, self.expected, checksums):
            self.arrive(self.commit)
        else:
            self._refuse("its blocks do not hold what the prefill worker wrote")

    def stopped(self, reason: str) -> None:
        self.detach(reason)
        self._end()

    def abandon(self, reason: str) -> None:
        if self.commit is not None:
            return  # P is done, and here it ends in a moment
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
        if self.commit is not None:
            self.sequence = None
            self._end()
        else:
            self.begin_end()

    def _refuse(self, reason: str) -> None:
        """P is done, and what it wrote is of no use."""
        self.detach(reason)
        self._end()

    def _end(self) -> None:
        self.context.ledger.stop(self.grant_id)
        self.is_over = True
