"""Any cutting and repetition of a stream reads the same."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.client.results import StreamEvent, TokenLogprob
from llmrt.client.sequencer import Sequencer, Skipped
from llmrt.wire.errors import InternalError, ProtocolError
from llmrt.wire.ids import NO_ATTEMPT, RequestId
from llmrt.wire.steps import StepRow, make_row

ID = RequestId(b"r" * 16)


def row(seq: int, token_ids: list[int], text: str, extras: bytes = b"") -> StepRow:
    return make_row(ID, NO_ATTEMPT, seq, token_ids, text, extras)


def cut(texts: list[str], sizes: list[int]) -> list[StepRow]:
    """Rows of a stream whose token i has id i and makes `texts[i]` certain."""
    rows, start = [], 0
    for size in [*sizes, len(texts)]:
        end = min(start + size, len(texts))
        if start < end:
            rows.append(row(start, list(range(start, end)), "".join(texts[start:end])))
        start = end
    return rows


TEXTS = st.lists(st.sampled_from(["", "a", "bc", "é", "🙂", "\n"]), min_size=1, max_size=12)
SIZES = st.lists(st.integers(1, 4), max_size=8)


@given(texts=TEXTS, first=SIZES, second=SIZES, num_first=st.integers(0, 12))
def test_a_repetition_from_the_start_reads_on_where_it_stopped(
    texts: list[str], first: list[int], second: list[int], num_first: int
) -> None:
    sequencer = Sequencer()
    events = []
    for piece in cut(texts, first)[:num_first] + cut(texts, second):
        taken = sequencer.take(piece)
        assert taken is not Skipped.GAP
        if isinstance(taken, StreamEvent):
            events.append(taken)
    token_ids = [token_id for event in events for token_id in event.token_ids]
    assert token_ids == list(range(len(texts)))
    assert "".join([event.text for event in events]) == "".join(texts)


def test_missing_tokens_are_a_gap() -> None:
    sequencer = Sequencer()
    assert sequencer.take(row(1, [1], "b")) is Skipped.GAP
    assert sequencer.next_seq == 0


def test_a_partly_old_row_of_unknown_start_is_a_gap() -> None:
    """Where its text was cut before cannot be told."""
    sequencer = Sequencer()
    sequencer.take(row(0, [0, 1], "ab"))
    assert sequencer.take(row(1, [1, 2], "bc")) is Skipped.GAP
    assert sequencer.take(row(2, [2], "c")) == StreamEvent(2, "c", (2,))


@pytest.mark.parametrize(
    ("piece", "at"),
    [
        (row(0, [0, 9], "ab"), 1),  # nothing new
        (row(0, [9, 1, 2], "abc"), 0),  # something new behind it
        (row(1, [9, 2], "bc"), 1),  # a cut that cannot be used either way
    ],
)
def test_a_repetition_that_differs_is_an_error(piece: StepRow, at: int) -> None:
    """Dropping it in silence would join the beginning of one answer to the end of another."""
    sequencer = Sequencer()
    sequencer.take(row(0, [0], "a"))
    sequencer.take(row(1, [1], "b"))
    with pytest.raises(InternalError, match=f"token {at} .* was {at} and came again as 9"):
        sequencer.take(piece)


def test_text_behind_the_last_token_comes_once() -> None:
    sequencer = Sequencer()
    sequencer.take(row(0, [0], ""))
    assert sequencer.take(row(1, [], "held back")) == StreamEvent(1, "held back", ())
    assert sequencer.take(row(1, [], "held back")) is Skipped.DUPLICATE


def test_log_probabilities_go_with_their_tokens() -> None:
    extras = msgpack.packb([[-0.5, [[7, -0.5], [8, -1.0]]], [-2.0, []]])
    sequencer = Sequencer()
    sequencer.take(row(0, [7], "a"))
    taken = sequencer.take(row(0, [7, 9], "ab", extras))
    assert taken == StreamEvent(1, "b", (9,), (TokenLogprob(-2.0),))


@pytest.mark.parametrize(
    "extras", [b"\xc1", msgpack.packb([[0.0, []]]), msgpack.packb([["x", []]] * 2)]
)
def test_damaged_log_probabilities_are_refused(extras: bytes) -> None:
    with pytest.raises(ProtocolError):
        Sequencer().take(row(0, [7, 9], "ab", extras))
