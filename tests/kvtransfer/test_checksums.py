"""Checksums: one changed bit is seen, and both sides choose the same blocks."""

import random

import pytest

from llmrt.kvtransfer.checksums import CheckedBlocks, block_checksums
from llmrt.wire.ids import RequestId

BLOCK_BYTES = 4096


def checked(mode: str, *, request_id: int = 0, first: int = 0, end: int = 200) -> CheckedBlocks:
    return CheckedBlocks(mode, RequestId(request_id.to_bytes(16, "little")), first, end)


def test_one_bit_anywhere_changes_the_checksum_of_its_block_alone() -> None:
    rng = random.Random(0)
    buffer = bytearray(rng.randbytes(4 * BLOCK_BYTES))
    before = block_checksums(memoryview(buffer), BLOCK_BYTES, range(4))
    for _ in range(500):
        bit = rng.randrange(8 * len(buffer))
        buffer[bit // 8] ^= 1 << bit % 8
        after = block_checksums(memoryview(buffer), BLOCK_BYTES, range(4))
        assert [i for i in range(4) if after[i] != before[i]] == [bit // 8 // BLOCK_BYTES]
        buffer[bit // 8] ^= 1 << bit % 8


def test_checksums_come_in_the_order_asked_for() -> None:
    buffer = memoryview(random.Random(1).randbytes(3 * BLOCK_BYTES))
    one, two, three = block_checksums(buffer, BLOCK_BYTES, (0, 1, 2))
    assert block_checksums(buffer, BLOCK_BYTES, (2, 0, 1, 2)).tolist() == [three, one, two, three]
    assert len({one, two, three}) == 3


def test_off_checks_nothing_and_full_all_that_is_handed_over() -> None:
    assert checked("off").within(0, 200) == []
    assert checked("full", first=3, end=9).within(0, 200) == [3, 4, 5, 6, 7, 8]
    assert checked("full", first=3, end=9).within(5, 7) == [5, 6]


@pytest.mark.parametrize("request_id", range(0, 1 << 128, (1 << 128) // 50))
def test_sampled_takes_both_ends_and_one_in_16_in_whatever_parts(request_id: int) -> None:
    sample = checked("sampled", request_id=request_id, first=10, end=170)
    whole = sample.within(0, 1000)
    assert whole[0] == 10
    assert whole[-1] == 169
    assert 10 <= len(whole) <= 12
    assert [i for start in range(0, 180, 7) for i in sample.within(start, start + 7)] == whole


def test_sampled_takes_every_block_in_some_request() -> None:
    taken = {
        i
        for number in range(16)
        for i in checked("sampled", request_id=number << 112).within(0, 200)
    }
    assert taken == set(range(200))
