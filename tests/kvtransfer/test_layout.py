from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmrt.kvtransfer.layout import block_views, blocks_for, coalesce


def test_tokens_round_up_to_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 31, 32, 33, 64, 65)] == [0, 1, 1, 1, 2, 2, 3]


def test_neighbours_make_one_run_in_the_order_given() -> None:
    assert coalesce([]) == []
    assert coalesce([4]) == [(4, 1)]
    assert coalesce([3, 4, 5, 9, 8, 0, 1]) == [(3, 3), (9, 1), (8, 1), (0, 2)]
    assert coalesce([2, 2, 3]) == [(2, 1), (2, 2)]


@given(st.lists(st.integers(0, 20)))
def test_runs_are_the_blocks_and_as_few_as_possible(blocks: list[int]) -> None:
    runs = coalesce(blocks)
    assert [start + i for start, count in runs for i in range(count)] == blocks
    assert all(a + n != b for (a, n), (b, _) in pairwise(runs))


def test_views_are_the_memory_itself() -> None:
    raw = bytearray(range(12))
    views = block_views(memoryview(raw), 2, [1, 2, 5])
    assert [bytes(view) for view in views] == [bytes([2, 3, 4, 5]), bytes([10, 11])]
    views[0][0] = 99
    assert raw[2] == 99
