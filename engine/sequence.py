"""A sequence: the tokens of one request, and the blocks that hold their KV."""

from array import array
from dataclasses import dataclass, field

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, SampleSpec, SequenceId
from llmrt.wire.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler from `add` to `remove`.

    `token_ids` is the prompt (the first `num_prompt`) and what was generated. KV of the first
    `num_computed` of them is in `blocks` of `arena`; blocks of another worker's arena are given,
    never allocated here, and hold the KV of the first `num_given` tokens from the start. The first
    `num_sealed` blocks are in the prefix cache. `num_cached` prompt tokens were found there when
    the sequence first ran; it is told to the user, and nothing is decided by it. A waiting sequence
    starts here once `is_placed`; while it is parked, `num_parked` blocks are granted for it.
    `max_length` bounds `token_ids`. `order` sorts sequences of one priority, oldest first.
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
    block_hashes: list[bytes] = field(default_factory=list)
    in_step: bool = False
    is_removed: bool = False
    num_preemptions: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

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

    def sample_spec(self) -> SampleSpec:
        """How to draw the token behind the last one. History is copied only if it is needed."""
        params = self.params
        has_penalty = params.repetition_penalty != 1.0 or (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        return SampleSpec(
            params=params,
            seed=self.seed,
            position=len(self.token_ids),
            token_ids=self.token_ids[:] if has_penalty else array("I"),
            num_prompt=self.num_prompt,
            banned=tuple(sorted(self.banned_token_ids())),
        )

    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that may not be drawn now: what would end the text before `min_tokens`."""
        if self.num_generated < self.params.min_tokens:
            return self.end_token_ids | frozenset(self.params.stop_token_ids)
        return frozenset()
