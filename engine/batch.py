"""What one engine step computes, and what came of it: the seam between scheduler and device.

A device runs any mix of prefill chunks and decodes as one batch. Everything here is plain data;
the compiled step, the torch path and the simulated device take the same `Batch`.

What is made per row or per step is a struct: a tenth of the time of a frozen dataclass, on a path
where the device waits.
"""

from array import array
from collections.abc import Sequence
from typing import NewType, Protocol

import msgspec

from llmrt.wire.errors import LlmrtError
from llmrt.wire.sampling import SamplingParams

SequenceId = NewType("SequenceId", int)
ArenaId = NewType("ArenaId", str)
"""`local`, or the name and epoch of the peer whose arena is mapped here."""

LOCAL_ARENA = ArenaId("local")


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """How to draw the token after a row's last one.

    `position` is the index that the drawn token takes in its sequence; with `seed` it decides the
    random number, and nothing else does. `token_ids` holds the sequence so far, of which the
    first `num_prompt` are the prompt. `banned` tokens cannot be drawn (end tokens before
    min_tokens).
    """

    params: SamplingParams
    seed: int
    position: int
    token_ids: "array[int]"
    num_prompt: int
    banned: tuple[int, ...] = ()


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `token_ids` at positions `start` on.

    `blocks` is the block table in `arena`: entry i holds positions [i * 32, (i + 1) * 32).
    KV of positions below `start` is there already; the step writes that of the new positions.
    `sample` is None for a prefill chunk that is not the last.
    """

    sequence_id: SequenceId
    arena: ArenaId
    token_ids: "array[int]"
    start: int
    blocks: "array[int]"
    sample: SampleSpec | None = None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The rows of a step.

    One that `follows` was made while the step before ran. Each of its rows is a decode, whose token
    that step draws: whoever runs it calls `fill` in between, and runs it only if that step did not
    fail.
    """

    step_id: int
    rows: tuple[Row, ...]
    follows: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probability of the drawn token, and the best alternatives (id, log probability).

    Of the model's distribution, before temperature and filters.
    """

    drawn: float
    top: tuple[tuple[int, float], ...]


class Drawn(msgspec.Struct, frozen=True):
    """The token drawn for a row with `sample`, with log probabilities if wanted.

    `error` is set, and `token_id` is -1, if this row alone failed (its logits are not finite).
    """

    sequence_id: SequenceId
    token_id: int
    logprobs: Logprobs | None = None
    error: LlmrtError | None = None


class StepResult(msgspec.Struct, frozen=True):
    """`drawn` has one entry per row with a `sample`, in the order of the rows.

    The step took `duration_s` in all, of which the model's computation took `computed_s`; the
    rest is Python's.
    """

    step_id: int
    drawn: tuple[Drawn, ...]
    duration_s: float
    computed_s: float


def fill(batch: Batch, before: StepResult) -> None:
    """Put the tokens that the step before drew into the rows of one that follows it.

    A row that failed there gets some token: its sequence has ended, and so its row counts no more.
    """
    token_ids = {drawn.sequence_id: drawn.token_id for drawn in before.drawn}
    for row in batch.rows:
        row.token_ids[0] = max(0, token_ids[row.sequence_id])


class Device(Protocol):
    """Executes steps over arenas of KV blocks. Called from one thread only."""

    numerics_id: str

    def run(self, batch: Batch) -> StepResult:
        """Execute one step; returns when its KV writes are visible to other processes."""
        ...

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None:
        """Make `buffer` (num_blocks * block_bytes, in the layout of the contract) usable."""
        ...

    def remove_arena(self, arena: ArenaId) -> None:
        """Forget an arena; no later batch names it."""
        ...


class Vocabulary(Protocol):
    """What detokenizing and stopping need to know of a tokenizer."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Bytes that each token id adds to the text; empty for control tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def strips_leading_space(self) -> bool:
        """The first space of a decoded text is an artefact of the tokenizer (SentencePiece)."""
        ...
