"""What one engine step computes, and what came of it: the seam between scheduler and device.

A device runs any mix of prefill chunks and decodes as one batch. Everything here is plain data;
the compiled step, the torch path and the simulated device take the same `Batch`.

What is made per row or per step is a struct: a tenth of the time of a frozen dataclass, on a path
where the device waits.
"""

from array import array
from collections.abc import Callable, Sequence
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

    def behind(self, token_ids: "array[int]") -> "SampleSpec":
        """How to draw the token behind `token_ids`, which come next in the sequence."""
        position = self.position + len(token_ids)
        is_banned = position - self.num_prompt < self.params.min_tokens
        return SampleSpec(
            self.params,
            self.seed,
            position,
            self.token_ids + token_ids if self.token_ids else self.token_ids,
            self.num_prompt,
            self.banned if is_banned else (),
        )


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `token_ids` at positions `start` on.

    `blocks` is the block table in `arena`: entry i holds positions [i * 32, (i + 1) * 32).
    KV of positions below `start` is there already; the step writes that of the new positions.
    `sample` is None for a prefill chunk that is not the last. The last `num_drafts` of `token_ids`
    are guesses of what is drawn behind the tokens before them; `sample` then is of the first of
    these places, whose token is the one in front of the drafts.
    """

    sequence_id: SequenceId
    arena: ArenaId
    token_ids: "array[int]"
    start: int
    blocks: "array[int]"
    sample: SampleSpec | None = None
    num_drafts: int = 0

    @property
    def num_logits(self) -> int:
        """The last so many tokens are drawn behind."""
        return 0 if self.sample is None else self.num_drafts + 1


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The rows of a step.

    One that `follows` was made while the step before, which has no drafts, ran. Each of its rows is
    a decode, whose first token that step draws: whoever runs it calls `fill` in between, and runs
    it only if that step did not fail.
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
    """The tokens drawn for a row with `sample`, with log probabilities of each if wanted.

    It is one token, and one more for each draft that is what was drawn at its place. `error` is
    set, and there is no token, if this row alone failed (its logits are not finite).
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
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
    token_ids = {drawn.sequence_id: drawn.token_ids for drawn in before.drawn}
    for row in batch.rows:
        row.token_ids[0] = next(iter(token_ids[row.sequence_id]), 0)


def draw_behind(
    row: Row, sample: SampleSpec, draw: Callable[[int, SampleSpec], tuple[int, Logprobs | None]]
) -> Drawn:
    """Draw the token of a row, and the next one while it is the draft at its place.

    `draw(place, spec)` draws behind the token of one of the row's `num_logits` places. An error
    behind the first one ends the row there: the step that begins with that place meets it again.
    """
    first = len(row.token_ids) - row.num_drafts
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    for place in range(row.num_drafts + 1):
        spec = sample.behind(row.token_ids[first : first + place]) if place else sample
        try:
            token_id, of_token = draw(place, spec)
        except LlmrtError as error:
            if not place:
                return Drawn(row.sequence_id, (), error=error)
            break
        token_ids.append(token_id)
        if of_token is not None:
            logprobs.append(of_token)
        if place == row.num_drafts or token_id != row.token_ids[first + place]:
            break
    return Drawn(row.sequence_id, tuple(token_ids), tuple(logprobs))


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
