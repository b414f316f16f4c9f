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


def grant_order(sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
    """Whoever was preempted comes before all grants for others, whatever their priority."""
    return (not sequence.num_preemptions, sequence.sort_key)


def preemption_victim(running: Iterable[Sequence]) -> Sequence | None:
    """The youngest of the lowest priority among those whose blocks can be taken now."""
    candidates = [sequence for sequence in running if not sequence.in_step and sequence.blocks]
    return max(candidates, key=lambda sequence: sequence.sort_key, default=None)


def growth_reserve(running: Iterable[Sequence]) -> int:
    """Blocks that `running` will take until the next of them must end at the latest.

    That is one that decodes, if any does: whoever still waits for his prompt ends by no step yet.
    """
    sequences = list(running)
    if not sequences:
        return 0
    decoding = [s for s in sequences if not s.num_parked and not s.is_prefilling] or sequences
    horizon = min(sequence.max_length - len(sequence.token_ids) for sequence in decoding)
    return sum(
        max(0, blocks_for(min(len(s.token_ids) + horizon, s.max_length)) - _num_blocks(s))
        for s in sequences
    )


def _num_blocks(sequence: Sequence) -> int:
    """What it has, or what is granted for it."""
    return max(len(sequence.blocks), sequence.num_parked)
