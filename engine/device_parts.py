"""What every device on host memory does alike: refuse what does not fit, and warm up."""

from array import array
from collections.abc import Collection
from typing import Protocol

from llmrt.engine.batch import ArenaId, Batch, Row, SampleSpec, SequenceId, StepResult
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams

_WARM_UP_ARENA = ArenaId("warm-up")


class HostDevice(Protocol):
    """A `Device`, with the sizes that it was made for."""

    max_context: int
    kv_block_bytes: int

    def run(self, batch: Batch) -> StepResult: ...

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None: ...

    def remove_arena(self, arena: ArenaId) -> None: ...


def warm_up(device: HostDevice) -> None:
    """Run tiny steps of both kinds, so that the first request finds everything set up."""
    num_tokens = min(BLOCK_TOKENS, device.max_context)
    device.add_arena(_WARM_UP_ARENA, memoryview(bytearray(device.kv_block_bytes)))
    prompt = array("I", [0]) * num_tokens
    sample = SampleSpec(SamplingParams(), 0, num_tokens, prompt, num_tokens)
    for start in (0, num_tokens - 1):
        row = Row(SequenceId(0), _WARM_UP_ARENA, prompt[start:], start, array("I", [0]), sample)
        device.run(Batch(0, (row,)))
    device.remove_arena(_WARM_UP_ARENA)


def check_new_arena(
    arena: ArenaId, buffer: memoryview, known: Collection[ArenaId], block_bytes: int
) -> None:
    """Raise `ValueError` if the arena is known or the buffer is not a whole number of blocks."""
    if arena in known:
        raise ValueError(f"arena {arena!r} was added before: remove it first")
    if buffer.readonly or not buffer.nbytes or buffer.nbytes % block_bytes:
        raise ValueError(
            f"arena {arena!r} has {buffer.nbytes} bytes{' read-only' * buffer.readonly}: "
            f"a writable multiple of {block_bytes} is needed"
        )


def no_arena(arena: ArenaId) -> ValueError:
    return ValueError(f"there is no arena {arena!r}")


# -- what is wrong with a row -----------------------------------------------------------------


def unknown_arena(row: Row, known: Collection[ArenaId]) -> ValueError:
    return ValueError(f"{_name(row)} is in arena {row.arena!r}: only {list(known)} exist")


def out_of_range(row: Row, max_context: int) -> ValueError:
    return ValueError(
        f"{_name(row)} computes positions {row.start} to {_end(row)}: at least one token, below "
        f"the context of {max_context}, is needed"
    )


def short_table(row: Row) -> ValueError:
    return ValueError(f"{_name(row)} ends at token {_end(row)}, past its {len(row.blocks)} blocks")


def unknown_block(row: Row, num_blocks: int) -> ValueError:
    bad = next(block for block in row.blocks if not 0 <= block < num_blocks)
    return ValueError(
        f"{_name(row)} names block {bad} of arena {row.arena!r}, which has {num_blocks}"
    )


def unknown_token(row: Row, vocab_size: int) -> ValueError:
    bad = next(token for token in row.token_ids if not 0 <= token < vocab_size)
    return ValueError(f"{_name(row)} has token {bad}: the vocabulary has {vocab_size}")


def wrong_arrays(row: Row) -> ValueError:
    return ValueError(f"{_name(row)} has tokens or blocks that are no array of 'I'")


def _name(row: Row) -> str:
    return f"sequence {row.sequence_id}"


def _end(row: Row) -> int:
    return row.start + len(row.token_ids)
