"""Drafts for the decodes of a step: which they take along, and what became of them.

They are computed as if they had been drawn, and count up to the first one that was not. They take
what decodes, prefills and whoever waits leave of the step and of the blocks, and preempt nobody.
Blocks that only rejected ones needed go back when the step returns; garbage in others lies behind
`num_computed`, is never sealed, and later steps overwrite it.
"""

from array import array
from collections.abc import Callable

from llmrt.engine.batch import LOCAL_ARENA, Drawn, Row
from llmrt.engine.ngram_drafter import NgramDrafter
from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.layout import blocks_for
from llmrt.kvtransfer.ledger import Ledger
from llmrt.wire.ids import BlockId
from llmrt.wire.kv import BLOCK_TOKENS

NO_DRAFTS = array("I")
# With more tokens than this a step takes a CPU longer by nearly what their own steps would.
_MAX_STEP_TOKENS = 17


class Drafting:
    """`num_drafts` is the most in a row; 0 guesses nothing."""

    def __init__(self, ledger: Ledger, num_drafts: int) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._ledger = ledger
        self._num_drafts = num_drafts

    def propose(
        self,
        decodes: list[Sequence],
        budget: int,
        has_room: Callable[[int], bool],
        *,
        num_ahead: int = 0,
    ) -> "list[array[int]]":
        """What may follow each, behind `num_ahead` tokens that are being drawn.

        Together at most `budget` tokens. `has_room` tells whether so many blocks may be taken.
        """
        budget = min(budget, _MAX_STEP_TOKENS - len(decodes))
        drafts = []
        for sequence in decodes:
            drafts.append(self._propose(sequence, budget, has_room, num_ahead))
            budget -= len(drafts[-1])
        return drafts

    def settle(self, sequence: Sequence, row: Row, drawn: Drawn) -> None:
        """The drafts of a row, whose tokens the sequence has now: those accepted have KV."""
        assert sequence.drafter is not None
        num_accepted = max(0, len(drawn.token_ids) - 1)
        sequence.num_computed += num_accepted
        sequence.drafter.learn(row.num_drafts, num_accepted)
        self.num_drafted += row.num_drafts
        self.num_accepted += num_accepted
        num_blocks = blocks_for(len(sequence.token_ids))
        self._ledger.release([BlockId(block) for block in sequence.blocks[num_blocks:]])
        del sequence.blocks[num_blocks:]

    def _propose(
        self, sequence: Sequence, budget: int, has_room: Callable[[int], bool], num_ahead: int
    ) -> "array[int]":
        length = len(sequence.token_ids) + num_ahead
        # The token behind the last draft is drawn as well.
        num_drafts = min(self._num_drafts, budget, sequence.max_length - length - 1)
        if num_drafts < 1 or sequence.arena != LOCAL_ARENA:
            return NO_DRAFTS
        if sequence.drafter is None:
            sequence.drafter = NgramDrafter()
        drafts = sequence.drafter.propose(sequence.token_ids, num_ahead + num_drafts)[num_ahead:]
        missing = blocks_for(length + len(drafts)) - len(sequence.blocks)
        if missing > 0:
            blocks = self._ledger.allocate(missing) if has_room(missing) else None
            if blocks is None:
                return drafts[: len(sequence.blocks) * BLOCK_TOKENS - length]
            sequence.blocks.extend(blocks)
        return drafts
