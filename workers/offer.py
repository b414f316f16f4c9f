"""One offer as the prefill worker has it, and what an offer must be. Pure."""

from array import array
from dataclasses import dataclass, field

from llmrt.engine.batch import SequenceId
from llmrt.engine.rights import WriteRight
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.checksums import MODES, CheckedBlocks
from llmrt.kvtransfer.layout import blocks_for
from llmrt.wire import messages as m
from llmrt.wire.ids import Attempt, GrantId, LeaseId, RequestId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.context import CoreSettings
from llmrt.workers.links import GRANT

Key = tuple[WorkerName, int]


@dataclass(slots=True, eq=False)
class OfferedPrefill:
    """One offer taken. Times are this worker's.

    `right` is what the offer lets us write, None under a lease. Of the blocks, the first
    `num_complete` are computed and the first `num_announced` told to the owner; those between are
    `hashing`, by the id of the hash. `checksums` are by the index of their block.
    """

    owner: WorkerName
    grant_id: GrantId
    request_id: RequestId
    attempt: Attempt
    sequence: Sequence
    checked: CheckedBlocks
    right: WriteRight | None
    deadline: float | None
    received_at: float
    started_at: float | None = None
    returned_at: float | None = None
    lease_id: LeaseId | None = None
    leased_blocks: "array[int]" = field(default_factory=lambda: array("I"))
    num_complete: int = 0
    num_announced: int = 0
    hashing: dict[int, tuple[int, int]] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    commit: m.Commit | None = None
    is_withdrawn: bool = False

    @property
    def key(self) -> Key:
        return (self.owner, self.grant_id)

    @property
    def is_grant(self) -> bool:
        return self.right is not None

    @property
    def sequence_id(self) -> SequenceId:
        return self.sequence.sequence_id

    def hashed(self, hash_id: int, checksums: "array[int]") -> bool:
        """Take the checksums of the blocks that this hash is of; False if not all are there."""
        indices = self.checked.within(*self.hashing.pop(hash_id))
        self.checksums.update(zip(indices, checksums, strict=False))
        return len(checksums) == len(indices)

    def num_hashed(self) -> int:
        """So many blocks from the first on are complete and need no hash any more."""
        return min((first for first, _ in self.hashing.values()), default=self.num_complete)

    def checksums_of(self, first: int, last: int) -> list[int]:
        return [self.checksums[i] for i in self.checked.within(first, last)]


def misfit(
    offer: m.Offer,
    tokens: "array[int]",
    blocks: "array[int]",
    *,
    settings: CoreSettings,
    num_owner_blocks: int,
) -> str | None:
    """Why a prompt can never be computed here into these blocks of the owner, None if it can."""
    num_tokens = len(tokens)
    is_grant = offer.mode == GRANT
    if num_tokens == 0 or (is_grant and len(blocks) < blocks_for(num_tokens)):
        return "the offer does not cover its prompt"
    if max(tokens) >= settings.vocab_size:
        return f"token {max(tokens)} is unknown: the vocabulary has {settings.vocab_size}"
    if is_grant and max(blocks) >= num_owner_blocks:
        return f"the offer names block {max(blocks)}: the owner has {num_owner_blocks}"
    if len(set(blocks)) != len(blocks):
        return "the offer names a block twice"
    if not 0 <= offer.num_given < num_tokens:
        return f"{offer.num_given} of {num_tokens} tokens cannot be given: the last is computed"
    if not is_grant and offer.num_given % BLOCK_TOKENS:
        return f"{offer.num_given} tokens cannot be given under a lease: full blocks can"
    if offer.checksums not in MODES:
        return f"checksums are {offer.checksums!r}: this worker knows {', '.join(MODES)}"
    if num_tokens > settings.max_context:
        return f"{num_tokens} tokens are above the context of {settings.max_context} here"
    if not is_grant and blocks_for(num_tokens) > settings.num_blocks:
        return f"{num_tokens} tokens do not fit the arena of {settings.num_blocks} blocks here"
    return None
