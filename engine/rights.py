"""Where a step may write: of another worker's arena, only what that worker granted.

What is granted comes from the offer and not from the scheduler, so that no mistake in what becomes
a row can write into blocks that are someone else's.
"""

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Row, SequenceId


class WriteRight(msgspec.Struct, frozen=True, gc=False):
    """A sequence may write into `blocks` of `arena` from position `start` on."""

    arena: ArenaId
    blocks: "array[int]"
    start: int


def check_rights(rows: Iterable[Row], rights: Mapping[SequenceId, WriteRight]) -> None:
    """Raise `ValueError` if a row would write into another worker's arena beyond its right."""
    for row in rows:
        if row.arena == LOCAL_ARENA:
            continue
        right = rights.get(row.sequence_id)
        if right is None or right.arena != row.arena:
            raise ValueError(
                f"sequence {row.sequence_id} has no grant in arena {row.arena!r}"
                + (f", but in {right.arena!r}" if right else "")
            )
        if row.blocks != right.blocks:
            raise ValueError(
                f"sequence {row.sequence_id} names blocks of arena {row.arena!r} that differ from "
                f"its grant: {_difference(row.blocks, right.blocks)}"
            )
        if row.start < right.start:
            raise ValueError(
                f"sequence {row.sequence_id} writes from position {row.start} on: its grant in "
                f"arena {row.arena!r} begins at {right.start}"
            )


def _difference(named: "array[int]", granted: "array[int]") -> str:
    for i, (a, b) in enumerate(zip(named, granted, strict=False)):
        if a != b:
            return f"block {i} of the table is {a} and not {b}"
    return f"{len(named)} blocks and not {len(granted)}"
