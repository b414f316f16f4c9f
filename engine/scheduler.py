"""Which tokens of which sequences the next step computes. Pure.

A sequence is *waiting* (no blocks), *running* (has blocks, or blocks of another worker's arena)
or *parked* (its prompt is computed elsewhere; its blocks lie in a grant). Each step takes one
token of every running sequence that decodes, then prefill chunks up to the budget.

Rules that are hard to see in the code:

- A prefill chunk ends on the next multiple of `chunk_tokens`, or with the prompt, whatever else is
  in the step: so chunk boundaries, and with them the text, do not depend on company. The first
  chunk of a step is taken even if decodes have used up the budget.
- A local prompt gets blocks for its whole length when it starts; only decodes can run out, and
  then the policy names whom to preempt. A preempted sequence waits and is computed again from
  its tokens, by the same code as a new one.
- With `num_drafts`, a decode of a sequence that repeats itself takes guesses along
  (`llmrt.engine.drafting`).
- While a step runs, the sequences in it keep their blocks, even if they are removed.
- While a step runs, the next one may be made *ahead*, if it consists of decodes alone, as if every
  sequence went on: its tokens are filled in by whoever runs it, between the two, so that the
  device need not wait for the scheduler. A sequence that ends with the first of the two has a row
  in the second one for nothing; what that draws is dropped. Whoever waits for room or has just
  come keeps the next step from being made ahead, so that he is in it. Nor is one made behind a
  step with drafts: how many tokens that gives is not known. One that is made ahead may have drafts
  itself: what is guessed behind the token that is being drawn, if that is guessed rightly, too.
"""

from array import array
from dataclasses import dataclass

from llmrt.engine import policy
from llmrt.engine.batch import LOCAL_ARENA, Batch, Drawn, Row, SequenceId, StepResult
from llmrt.engine.drafting import NO_DRAFTS, Drafting
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.block_hash import hash_blocks
from llmrt.kvtransfer.layout import blocks_for
from llmrt.kvtransfer.ledger import Ledger
from llmrt.wire.ids import BlockId
from llmrt.wire.kv import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """`step_tokens` bounds a step; `chunk_tokens` is the grid on which prefill chunks end.

    A step that takes two chunks lets a short prompt pass beside a long one. `num_drafts` is the
    most guesses in a decode; 0 guesses nothing.
    """

    max_running: int = 32
    step_tokens: int = 512
    chunk_tokens: int = 256
    has_prefix_cache: bool = True
    num_drafts: int = 0


class Scheduler:
    """Owns the sequences of one worker; allocates their blocks from the ledger."""

    def __init__(self, ledger: Ledger, settings: SchedulerSettings) -> None:
        self.ledger = ledger
        self.settings = settings
        self.waiting: dict[SequenceId, Sequence] = {}
        self.running: dict[SequenceId, Sequence] = {}
        self.parked: dict[SequenceId, Sequence] = {}
        self.step: Batch | None = None
        self.ahead: Batch | None = None
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.drafting = Drafting(ledger, settings.num_drafts)
        self._in_step: list[Sequence] = []
        self._in_ahead: list[Sequence] = []

    # -- sequences come and go ---------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its blocks, if it has any, lie in another worker's arena.

        It starts here once it `is_placed`; until then it may be parked.
        """
        self.waiting[sequence.sequence_id] = sequence

    def unplaced(self) -> list[Sequence]:
        """Waiting sequences whose place is not decided, in the order in which they get room."""
        unplaced = [s for s in self.waiting.values() if not s.is_placed]
        return sorted(unplaced, key=policy.grant_order)

    def park(self, sequence: Sequence, num_blocks: int) -> None:
        """Take a waiting sequence out while its prompt is computed elsewhere."""
        del self.waiting[sequence.sequence_id]
        sequence.num_parked = num_blocks
        self.parked[sequence.sequence_id] = sequence

    def unpark(self, sequence: Sequence) -> None:
        """Its prompt will not be computed elsewhere: wait again, without blocks."""
        del self.parked[sequence.sequence_id]
        sequence.num_parked = 0
        self.waiting[sequence.sequence_id] = sequence

    def join(
        self, sequence: Sequence, blocks: list[BlockId], token_id: int, *, num_sealed: int
    ) -> None:
        """A parked sequence runs: `blocks` hold the KV of all its tokens, `token_id` is next.

        The first `num_sealed` blocks were taken from the prefix cache.
        """
        del self.parked[sequence.sequence_id]
        sequence.num_parked = 0
        sequence.blocks = array("I", blocks)
        sequence.num_computed = len(sequence.token_ids)
        sequence.num_sealed = num_sealed
        self.running[sequence.sequence_id] = sequence
        self._seal(sequence)
        sequence.token_ids.append(token_id)

    def remove(self, sequence: Sequence) -> None:
        """Let go of a sequence and its blocks, at once or when the running step returns."""
        for table in (self.waiting, self.running, self.parked):
            table.pop(sequence.sequence_id, None)
        sequence.is_removed = True
        if not sequence.in_step:
            self._release(sequence)

    # -- prefix cache ------------------------------------------------------------------------

    def prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks before its last token: that one is always computed."""
        if not self.settings.has_prefix_cache:
            return []
        self._hash(sequence)
        return sequence.block_hashes[: (len(sequence.token_ids) - 1) // BLOCK_TOKENS]

    # -- steps -------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step, or None if one is running or nothing can run."""
        if self.step is not None:
            return None
        decodes = self._take_decodes()
        budget = self.settings.step_tokens - len(decodes)
        chunks = self._take_chunks(budget)
        if not decodes and not chunks:
            return None
        budget -= sum(num_tokens for _, num_tokens in chunks)
        drafts = self.drafting.propose(decodes, budget, self._has_spare)
        rows = [self._row(s, len(s.token_ids), of) for s, of in zip(decodes, drafts, strict=True)]
        rows += [self._row(s, s.num_computed + num_tokens) for s, num_tokens in chunks]
        self.num_steps += 1
        self.step = Batch(self.num_steps, tuple(rows))
        return self.step

    def schedule_ahead(self) -> Batch | None:
        """The step behind the running one, or None if it must not be made before that returns."""
        if self.step is None or self.ahead is not None or not self._is_steady():
            return None
        sequences = [
            s for s in self._in_step if not s.is_removed and len(s.token_ids) + 1 < s.max_length
        ]
        if not sequences or not all(map(self._grow_ahead, sequences)):
            return None
        self.num_steps += 1
        self.num_decode_tokens += len(sequences)
        self._in_ahead = sequences
        budget = self.settings.step_tokens - len(sequences)
        drafts = self.drafting.propose(sequences, budget, self._has_spare, num_ahead=1)
        rows = map(_row_ahead, sequences, drafts)
        self.ahead = Batch(self.num_steps, tuple(rows), follows=True)
        return self.ahead

    def complete(self, result: StepResult) -> list[tuple[Sequence, Drawn]]:
        """The running step returned: the sequences that have new tokens, or a failure instead.

        The step that was made ahead is the running one now.
        """
        assert self.step is not None
        assert self.step.step_id == result.step_id
        rows, sequences = self.step.rows, self._end_step()
        by_id = {drawn.sequence_id: drawn for drawn in result.drawn}
        with_tokens = []
        for sequence, row in zip(sequences, rows, strict=True):
            if sequence.is_removed:
                continue
            sequence.num_computed = row.start + len(row.token_ids) - row.num_drafts
            if row.sample is not None:
                drawn = by_id[sequence.sequence_id]
                sequence.token_ids.extend(drawn.token_ids)
                if row.num_drafts:
                    self.drafting.settle(sequence, row, drawn)
                    self.num_decode_tokens += max(0, len(drawn.token_ids) - 1)
                with_tokens.append((sequence, drawn))
            self._seal(sequence)
        return with_tokens

    def abandon_step(self) -> list[Sequence]:
        """The running step failed: what it computed is unknown, so its sequences are given back."""
        return [sequence for sequence in self._end_step() if not sequence.is_removed]

    def has_slot(self) -> bool:
        """True if one more sequence may run or be parked."""
        return len(self.running) + len(self.parked) < self.settings.max_running

    def has_room(self, num_blocks: int) -> bool:
        """True if `num_blocks` can be taken and what runs can still grow."""
        return num_blocks + self.reserve() <= self.ledger.available()

    def has_room_for_grant(self, sequence: Sequence, num_blocks: int) -> bool:
        """True if `num_blocks` can be granted for a waiting sequence, and whoever comes before it
        can still start here, however long it grows.
        """
        own_turn = policy.grant_order(sequence)
        claimed = sum(
            blocks_for(len(s.token_ids))
            for s in self.waiting.values()
            if s.is_placed and s.arena == LOCAL_ARENA and policy.grant_order(s) < own_turn
        )
        if claimed:
            claimed += blocks_for(sequence.max_length) - blocks_for(len(sequence.token_ids))
        return self.has_room(num_blocks + claimed)

    def reserve(self) -> int:
        """Blocks to leave for the growth of what runs or is parked here."""
        mine = [s for s in self.running.values() if s.arena == LOCAL_ARENA]
        return policy.growth_reserve([*mine, *self.parked.values()])

    def check(self) -> None:
        """Assert that every sequence is in one place and has the blocks that it needs."""
        tables = (self.waiting, self.running, self.parked)
        assert sum(map(len, tables)) == len(set().union(*tables))
        for sequence in self.running.values():
            assert not sequence.is_removed
            assert sequence.num_computed <= len(sequence.blocks) * BLOCK_TOKENS
            assert sequence.num_computed < len(sequence.token_ids) <= sequence.max_length
        for sequence in self.waiting.values():
            assert sequence.num_computed == 0
            assert not sequence.in_step
            assert not sequence.blocks or sequence.arena != LOCAL_ARENA
        assert (self.step is None) == (not self._in_step)
        assert (self.ahead is None) == (not self._in_ahead)
        assert self.step is not None or self.ahead is None
        assert all(sequence.in_step for sequence in [*self._in_step, *self._in_ahead])

    # -- details -----------------------------------------------------------------------------

    def _end_step(self) -> list[Sequence]:
        """The running step is over; the sequences that were in it."""
        sequences, self._in_step, self._in_ahead = self._in_step, self._in_ahead, []
        self.step, self.ahead = self.ahead, None
        for sequence in sequences:
            sequence.in_step = False
        for sequence in self._in_step:
            sequence.in_step = True
        for sequence in sequences:
            if sequence.is_removed and not sequence.in_step:
                self._release(sequence)
        return sequences

    def _is_steady(self) -> bool:
        """All that could run is in the running step, and decodes or will."""
        assert self.step is not None
        return (
            not self.waiting
            and all(sequence.in_step for sequence in self.running.values())
            and all(row.sample is not None and not row.num_drafts for row in self.step.rows)
            and not any(sequence.needs_history for sequence in self._in_step)
        )

    def _grow_ahead(self, sequence: Sequence) -> bool:
        """Room for the token that is being drawn; False if that would take preemption."""
        if len(sequence.blocks) * BLOCK_TOKENS <= len(sequence.token_ids):
            blocks = self.ledger.allocate(1)
            if blocks is None:
                return False
            sequence.blocks.extend(blocks)
        return True

    def _take_decodes(self) -> list[Sequence]:
        """All that decode, with room for their last token; nobody takes their blocks any more."""
        sequences = []
        for sequence in sorted(self.running.values(), key=lambda s: s.sort_key):
            if sequence.is_prefilling or sequence.sequence_id not in self.running:
                continue
            if self._grow(sequence):
                sequence.in_step = True
                sequences.append(sequence)
        self.num_decode_tokens += len(sequences)
        return sequences

    def _has_spare(self, num_blocks: int) -> bool:
        """Whether so many blocks are there that nobody waits for."""
        return not self.waiting and self.has_room(num_blocks)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decoding sequence room for its last token; False if it was preempted for that."""
        while len(sequence.blocks) * BLOCK_TOKENS < len(sequence.token_ids):
            blocks = self.ledger.allocate(1)
            if blocks is not None:
                sequence.blocks.extend(blocks)
                continue
            victim = policy.preemption_victim(
                s for s in self.running.values() if s.arena == LOCAL_ARENA
            )
            if victim is None or victim is sequence:
                self._preempt(sequence)
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        self._release(sequence)
        sequence.num_preemptions += 1
        sequence.is_placed = False
        self.waiting[sequence.sequence_id] = sequence

    def _take_chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """What prefills in this step, and how many tokens of it."""
        chunks: list[tuple[Sequence, int]] = []
        self._admit()
        # Also one that was admitted with all but its last token cached: it is no decode yet.
        prefilling = [s for s in self.running.values() if not s.in_step]
        for sequence in policy.prefill_order(prefilling):
            num_tokens = self._chunk_tokens(sequence)
            if num_tokens <= budget or not chunks:
                chunks.append((sequence, num_tokens))
                budget -= num_tokens
                self.num_prefill_tokens += num_tokens
        return chunks

    def _chunk_tokens(self, sequence: Sequence) -> int:
        """Tokens up to the next line of the grid, or to the end of the prompt."""
        grid = self.settings.chunk_tokens
        return min(grid - sequence.num_computed % grid, sequence.num_pending)

    def _admit(self) -> None:
        placed = [s for s in self.waiting.values() if s.is_placed]
        for sequence in sorted(placed, key=lambda s: s.sort_key):
            if not self.has_slot() or not self._start(sequence):
                return

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence blocks for its whole length, the cached prefix included."""
        if sequence.arena == LOCAL_ARENA:
            hashes = self.prefix_hashes(sequence)
            needed = blocks_for(len(sequence.token_ids))
            prefix = self.ledger.take_prefix(hashes)
            missing = needed - len(prefix)
            blocks = self.ledger.allocate(missing) if self.has_room(missing) else None
            if blocks is None:
                self.ledger.release(prefix)
                return False
            if not self.ledger.check_seals(prefix):
                self.ledger.release([*prefix, *blocks])
                return self._start(sequence)  # without the blocks that had changed
            sequence.blocks = array("I", [*prefix, *blocks])
            sequence.num_computed = len(prefix) * BLOCK_TOKENS
            sequence.num_sealed = len(prefix)
            if sequence.num_preemptions == 0:
                sequence.num_cached = sequence.num_computed
        else:
            sequence.num_computed = sequence.num_given
        del self.waiting[sequence.sequence_id]
        self.running[sequence.sequence_id] = sequence
        return True

    def _row(self, sequence: Sequence, end: int, drafts: "array[int]" = NO_DRAFTS) -> Row:
        sequence.in_step = True
        self._in_step.append(sequence)
        is_last = end == len(sequence.token_ids)
        return Row(
            sequence.sequence_id,
            sequence.arena,
            sequence.token_ids[sequence.num_computed : end] + drafts,
            sequence.num_computed,
            sequence.blocks[:],
            sequence.sample_spec() if is_last else None,
            len(drafts),
        )

    def _hash(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes
        num_full = len(sequence.token_ids) // BLOCK_TOKENS
        if len(hashes) < num_full:
            start = len(hashes) * BLOCK_TOKENS
            new = sequence.token_ids[start : num_full * BLOCK_TOKENS]
            parent = hashes[-1] if hashes else b""
            hashes += hash_blocks(new, salt=sequence.salt, parent=parent)

    def _seal(self, sequence: Sequence) -> None:
        """Put blocks that are complete into the prefix cache."""
        if sequence.arena != LOCAL_ARENA or not self.settings.has_prefix_cache:
            return
        num_full = sequence.num_computed // BLOCK_TOKENS
        if num_full > sequence.num_sealed:
            self._hash(sequence)
            for i in range(sequence.num_sealed, num_full):
                self.ledger.seal(BlockId(sequence.blocks[i]), sequence.block_hashes[i])
            sequence.num_sealed = num_full

    def _release(self, sequence: Sequence) -> None:
        if sequence.arena == LOCAL_ARENA:
            self.ledger.release([BlockId(block) for block in sequence.blocks])
            sequence.blocks = array("I")
            sequence.num_computed = sequence.num_sealed = 0


def _row_ahead(sequence: Sequence, drafts: "array[int]") -> Row:
    """The decode of the token that the running step draws, and of drafts behind it."""
    return Row(
        sequence.sequence_id,
        sequence.arena,
        array("I", (0,)) + drafts,
        len(sequence.token_ids),
        sequence.blocks[:],
        sequence.sample_spec(num_ahead=1),
        len(drafts),
    )
