"""Scheduling policy: plain functions of the state, so that each can be replaced alone."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from llmrt.engine.sequence import Sequence
from llmrt.kvtransfer.layout import blocks_for


def prefill_order(prefilling: Seq[Sequence]) -> list[Sequence]:
    """The oldest first, so that it always moves; then the shortest, so that none waits for long."""
    if not prefilling:
        return []
    oldest, *others = sorted(prefilling, key=lambda sequence: sequence.sort_key)
    return [oldest, *sorted(others, key=lambda s: (-s.priority, s.num_pending, s.sort_key))]


def preemption_victim(running: Iterable[Sequence]) -> Sequence | None:
    """The youngest of the lowest priority among those whose blocks can be taken now."""
    candidates = [sequence for sequence in running if not sequence.in_step and sequence.blocks]
    return max(candidates, key=lambda sequence: sequence.sort_key, default=None)


def growth_reserve(running: Iterable[Sequence]) -> int:
    """Blocks that `running` will take until the next of them must end at the latest."""
    sequences = list(running)
    if not sequences:
        return 0
    horizon = min(sequence.max_length - len(sequence.token_ids) for sequence in sequences)
    return sum(
        max(0, blocks_for(len(sequence.token_ids) + horizon) - _num_blocks(sequence))
        for sequence in sequences
    )


def _num_blocks(sequence: Sequence) -> int:
    """What it has, or what is granted for it."""
    return max(len(sequence.blocks), sequence.num_parked)
