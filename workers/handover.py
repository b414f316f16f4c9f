"""One prompt on its way into our blocks: what both ways of it have in common. Pure.

    offered  OFFER sent, again every beat until P says that it holds it
    held     P says so every beat; silent for too long, it is given up
    ending   not wanted any more: WITHDRAW every beat until STOPPED or COMMIT
    over     the ledger's grant has ended, and with it this record

A hand-over may outlive its request, whose sequence then waits again or has gone.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.checksums import CheckedBlocks
from llmrt.kvtransfer.ledger import Grant
from llmrt.wire import messages as m
from llmrt.wire.ids import Attempt, BlockId, GrantId, RequestId, WorkerName
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import HashBlocks

# Beats of P that may be lost in a row; much less than the deadline of any request.
SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt's KV is complete in our blocks, and verified to be what P committed."""

    sequence: Sequence
    blocks: list[BlockId]
    num_sealed: int
    commit: m.Commit
    offered_at: float


class PromptOwner(Protocol):
    """Learns what became of a parked sequence: exactly one of the two, unless it was withdrawn."""

    def prompt_arrived(self, arrival: Arrival) -> None: ...

    def prompt_failed(self, sequence: Sequence, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class OutgoingOffer:
    """What P is asked, as often as it takes."""

    request_id: RequestId
    attempt: Attempt
    deadline: float | None
    body: m.Offer
    raw: list[bytes]


class BlockChecks:
    """The blocks of ours that are being hashed for hand-overs, by the id of the hash."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._under_way: dict[int, Handover] = {}

    def start(self, handover: "Handover", blocks: Seq[BlockId]) -> int:
        hash_id = self._context.new_hash_id()
        self._under_way[hash_id] = handover
        self._context.do(HashBlocks(hash_id, None, array("I", blocks)))
        return hash_id

    def returned(self, hash_id: int) -> "Handover | None":
        """For whom that was."""
        return self._under_way.pop(hash_id, None)


@dataclass(slots=True, eq=False)
class Handover(ABC):
    """A grant that has not ended. `sequence` is None once its request has gone elsewhere."""

    context: WorkerContext
    owner: PromptOwner
    checks: BlockChecks
    peer: WorkerName
    grant: Grant
    offer: OutgoingOffer
    sequence: Sequence | None
    offered_at: float = field(init=False)
    silent_beats: int = field(default=0, init=False)
    is_held: bool = field(default=False, init=False)
    is_ending: bool = field(default=False, init=False)
    ending_beats: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.offered_at = self.context.now

    @property
    def grant_id(self) -> GrantId:
        return self.grant.grant_id

    @property
    def request_id(self) -> RequestId:
        return self.offer.request_id

    @property
    def checked(self) -> CheckedBlocks:
        """Which blocks are compared before anything is decoded from them."""
        first, end = len(self.grant.prefix), len(self.grant.all_blocks)
        return CheckedBlocks(self.offer.body.checksums, self.request_id, first, end)

    @property
    def checked_indices(self) -> list[int]:
        return self.checked.within(0, len(self.grant.all_blocks))

    @property
    def silent_s(self) -> float:
        """At least so long; by beats and not by the clock: a process that was stopped has heard
        nobody either. The first beat may come right behind a word of P.
        """
        return max(0, self.silent_beats - 1) * self.context.settings.beat_s

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENCE_S

    @property
    def is_overdue(self) -> bool:
        """P speaks, and does not stop: no step of use to a request takes so long."""
        return (self.ending_beats - 1) * self.context.settings.beat_s >= SILENCE_S

    # -- what differs ------------------------------------------------------------------------

    @abstractmethod
    def committed(self, commit: m.Commit, checksums: bytes) -> None:
        """P has computed everything; the same commit may come again."""

    @abstractmethod
    def hashed(self, hash_id: int, checksums: "array[int]") -> None:
        """Blocks of ours were hashed, which `checks` had started."""

    @abstractmethod
    def stopped(self, reason: str) -> None:
        """P does nothing for this grant any more."""

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """P is silent and may still be at work: its prompt goes elsewhere."""

    @abstractmethod
    def died(self) -> None:
        """P is dead for certain."""

    @abstractmethod
    def withdraw(self) -> None:
        """Nobody waits for the prompt any more."""

    def beat(self) -> None:
        """Say again what was not answered."""
        if self.is_ending:
            self.ending_beats += 1
            self.send_withdraw()
        elif not self.is_held:
            self.send_offer()

    # -- what is shared ----------------------------------------------------------------------

    def send_offer(self) -> None:
        offer, now = self.offer, self.context.now
        self.context.send_peer(
            self.peer,
            m.OFFER,
            offer.body,
            request_id=offer.request_id,
            attempt=offer.attempt,
            budget_s=None if offer.deadline is None else offer.deadline - now,
            raw=offer.raw,
        )

    def send_withdraw(self) -> None:
        ref = m.GrantRef(grant_id=self.grant_id)
        self.context.send_peer(self.peer, m.WITHDRAW, ref, request_id=self.request_id)

    def begin_end(self) -> None:
        """Tell P that nobody wants it."""
        self.sequence = None
        if not self.is_ending:
            self.is_ending = True
            self.send_withdraw()

    def detach(self, reason: str) -> None:
        """The sequence, if it still is here, waits again."""
        sequence, self.sequence = self.sequence, None
        if sequence is not None:
            self.owner.prompt_failed(sequence, reason)

    def compare(
        self, indices: Seq[int], expected: Seq[int], actual: Seq[int], **fields: object
    ) -> bool:
        """Whether these blocks hold what P had; if not, it is counted, and logged with `fields`."""
        if expected == actual:
            return True
        context = self.context
        i = next(
            (i for i, a, b in zip(indices, expected, actual, strict=False) if a != b), indices[0]
        )
        context.counters["checksum_mismatches"] += 1
        context.log(
            "kv.checksum_mismatch",
            "warning",
            request_id=self.request_id.hex(),
            worker=context.settings.name.full_name,
            peer=self.peer.full_name,
            grant_id=self.grant_id,
            block_idx=i,
            block=self.grant.all_blocks[i],
            num_checked=len(indices),
            **fields,
        )
        return False

    def arrive(self, commit: m.Commit) -> None:
        """The sequence and its blocks go on to decode."""
        sequence, self.sequence, self.is_over = self.sequence, None, True
        blocks = self.context.ledger.commit(self.grant_id)
        assert sequence is not None
        assert blocks is not None
        num_sealed = len(self.grant.prefix)
        self.owner.prompt_arrived(Arrival(sequence, blocks, num_sealed, commit, self.offered_at))
