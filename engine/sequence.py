"""A sequence: the tokens of one request, and the blocks that hold their KV."""

from array import array
from dataclasses import dataclass, field

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, SampleSpec, SequenceId
from llmrt.engine.ngram_drafter import NgramDrafter
from llmrt.wire.sampling import SamplingParams

_NO_HISTORY = array("I")


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler from `add` to `remove`.

    `token_ids` is the prompt (the first `num_prompt`) and what was generated. KV of the first
    `num_computed` of them is in `blocks` of `arena`; blocks of another worker's arena are given,
    never allocated here, and hold the KV of the first `num_given` tokens from the start. The first
    `num_sealed` blocks are in the prefix cache. `num_cached` prompt tokens were found there when
    the sequence first ran; it is told to the user, and nothing is decided by it. A waiting sequence
    starts here once `is_placed`; while it is parked, `num_parked` blocks are granted for it.
    A waiting sequence may find so many blocks cached once that of `awaited` has computed them.
    `max_length` bounds `token_ids`. `drafter` is there once it decodes with drafts. `order` sorts
    sequences of one priority, oldest first.
    """

    sequence_id: SequenceId
    token_ids: "array[int]"
    num_prompt: int
    params: SamplingParams
    seed: int
    max_length: int
    end_token_ids: frozenset[int]
    priority: int = 0
    order: float = 0.0
    arena: ArenaId = LOCAL_ARENA
    blocks: "array[int]" = field(default_factory=lambda: array("I"))
    num_computed: int = 0
    num_given: int = 0
    num_cached: int = 0
    num_sealed: int = 0
    num_parked: int = 0
    is_placed: bool = False
    salt: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    awaited: "tuple[Sequence, int] | None" = None
    in_step: bool = False
    is_removed: bool = False
    num_preemptions: int = 0
    drafter: NgramDrafter | None = None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_drafted(self) -> int:
        return self.drafter.num_drafted if self.drafter else 0

    @property
    def num_accepted(self) -> int:
        return self.drafter.num_accepted if self.drafter else 0

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_pending > 1 or self.num_computed == 0

    @property
    def sort_key(self) -> tuple[int, float, int]:
        return (-self.priority, self.order, self.sequence_id)

    @property
    def needs_history(self) -> bool:
        """What is drawn depends on the tokens so far by more than their KV."""
        params = self.params
        return params.repetition_penalty != 1.0 or (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    def sample_spec(self, num_ahead: int = 0) -> SampleSpec:
        """How to draw the token behind the last one, or behind `num_ahead` more that will come.

        History is copied only if it is needed.
        """
        return SampleSpec(
            self.params,
            self.seed,
            len(self.token_ids) + num_ahead,
            self.token_ids[:] if self.needs_history else _NO_HISTORY,
            self.num_prompt,
            self._banned_token_ids(self.num_generated + num_ahead),
        )

    def _banned_token_ids(self, num_generated: int) -> tuple[int, ...]:
        """Tokens that may not be drawn then: what would end the text before `min_tokens`."""
        if num_generated < self.params.min_tokens:
            return tuple(sorted(self.end_token_ids | frozenset(self.params.stop_token_ids)))
        return ()
