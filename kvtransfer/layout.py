"""Where blocks lie in an arena: block-major, so that a block is one contiguous piece."""

from collections.abc import Iterable

from llmrt.wire.kv import BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """How many blocks `num_tokens` tokens take; the last one may be partly filled."""
    return -(-num_tokens // BLOCK_TOKENS)


def coalesce(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of neighbours as (first block, number of blocks), in the order given."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    for block in blocks:
        if block == end:
            end += 1
            continue
        if end > start:
            runs.append((start, end - start))
        start, end = block, block + 1
    if end > start:
        runs.append((start, end - start))
    return runs


def block_views(buffer: memoryview, block_bytes: int, blocks: Iterable[int]) -> list[memoryview]:
    """The bytes of `blocks` as few views of `buffer`, in the order given; nothing is copied."""
    return [
        buffer[start * block_bytes : (start + count) * block_bytes]
        for start, count in coalesce(blocks)
    ]
