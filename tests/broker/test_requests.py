"""What is kept of a stream, and for how long."""

import pytest
from tests.broker.conftest import row

from llmrt.broker.requests import READER_WINDOW, Allowance, Stream
from llmrt.wire.arrays import pack_u32
from llmrt.wire.steps import StepRow


def make_stream(num_rows: int = 0, *, limit: int = 1 << 20) -> Stream:
    stream = Stream(Allowance(limit))
    for seq in range(num_rows):
        stream.accept(row(1, seq))
    stream.check()
    return stream


def accept(stream: Stream, *rows: StepRow) -> None:
    for each in rows:
        stream.accept(each)
        stream.check()


def seqs(rows: list[StepRow]) -> list[int]:
    return [each.seq for each in rows]


def test_rows_are_taken_once() -> None:
    stream = make_stream(2)
    assert seqs(stream.take_unsent()) == [0, 1]
    assert stream.take_unsent() == []
    accept(stream, row(1, 2))
    assert seqs(stream.take_unsent()) == [2]


def test_rows_are_kept_until_acknowledged() -> None:
    stream = make_stream(4)
    stream.take_unsent()
    stream.acknowledge(2)
    stream.check()
    assert stream.rewind(2)
    assert seqs(stream.take_unsent()) == [2, 3]
    stream.acknowledge(4)
    stream.acknowledge(1)
    stream.check()
    assert stream.kept_bytes == len(stream.token_ids) == 16
    stream.discard()
    assert stream.kept_bytes == 0


def test_a_repeat_from_before_an_acknowledged_token_begins_behind_it() -> None:
    stream = make_stream(4)
    stream.take_unsent()
    stream.acknowledge(2)
    assert stream.rewind(0)
    assert seqs(stream.take_unsent()) == [2, 3]


def test_a_row_of_several_tokens_is_never_cut() -> None:
    stream = make_stream()
    accept(stream, row(1, 0, 7, 8, 9), row(1, 3, 4))
    stream.take_unsent()
    stream.acknowledge(2)
    assert stream.rewind(2)
    assert seqs(stream.take_unsent()) == [0, 3]


def test_text_without_tokens_at_the_edge_is_sent_again() -> None:
    """Its number was acknowledged with the token before it, so it may not have been read."""
    stream = make_stream(2)
    bare = StepRow(row(1, 2).request_id, row(1, 2).attempt, 2, b"", b"tail")
    accept(stream, bare)
    stream.take_unsent()
    stream.acknowledge(2)
    assert stream.rewind(2)
    assert stream.take_unsent() == [bare]


def test_a_reader_without_credit_gets_no_more_until_it_acknowledges() -> None:
    stream = make_stream(READER_WINDOW + 3)
    assert len(stream.take_unsent()) == READER_WINDOW
    assert stream.is_behind
    stream.acknowledge(2)
    assert seqs(stream.take_unsent()) == [READER_WINDOW, READER_WINDOW + 1]
    assert seqs(stream.take_unsent(is_last=True)) == [READER_WINDOW + 2]
    assert not stream.is_behind


def test_nothing_can_be_acknowledged_before_it_was_sent() -> None:
    stream = make_stream(READER_WINDOW + 3)
    stream.take_unsent()
    stream.acknowledge(READER_WINDOW + 3)
    assert stream.acked_seq == READER_WINDOW


def test_above_the_allowance_only_unsent_rows_are_kept() -> None:
    allowance = Allowance(limit=2000)
    stream, other = Stream(allowance), Stream(allowance)
    accept(other, row(2, 0))
    for seq in range(10):
        accept(stream, row(1, seq))
    assert not stream.is_resumable
    assert other.is_resumable
    assert seqs(stream.take_unsent()) == list(range(10))
    stream.check()
    assert stream.kept_bytes == 0
    assert not stream.rewind(3)
    assert allowance.used == other.kept_bytes
    accept(stream, row(1, 10))
    assert seqs(stream.take_unsent()) == [10]
    stream.acknowledge(11)
    assert stream.acked_seq == 11


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_token_ids_are_kept_for_the_next_owner(num_tokens: int) -> None:
    stream = make_stream(num_tokens)
    stream.take_unsent()
    stream.acknowledge(num_tokens)
    assert bytes(stream.token_ids) == pack_u32(range(num_tokens))
