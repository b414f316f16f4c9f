"""Step messages: sliced by their index alone, whatever the bytes."""

import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmrt.wire.envelope import decode_header
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.steps import (
    NUM_STEP_FRAMES,
    StepRow,
    decode_step,
    encode_step,
    make_row,
    token_ids_of,
)

U32 = st.integers(0, 2**32 - 1)
ROWS = st.builds(
    StepRow,
    st.binary(min_size=16, max_size=16).map(RequestId),
    st.builds(Attempt, st.integers(0, 2**64 - 1), U32),
    U32,
    st.lists(st.binary(min_size=4, max_size=4), max_size=4).map(b"".join),
    st.binary(max_size=9),
    st.binary(max_size=9),
)
ROW = struct.Struct("<16sQIIIII")


def make_frames(*rows: StepRow) -> list[bytes]:
    return encode_step(rows or [make_row(RequestId(b"r" * 16), Attempt(1, 2), 3, [4, 5], "ab")])


@given(st.lists(ROWS, max_size=6))
def test_rows_survive_the_way(rows: list[StepRow]) -> None:
    assert decode_step(encode_step(rows)) == rows


def test_a_row_gives_its_tokens() -> None:
    (row,) = decode_step(make_frames())
    assert (token_ids_of(row), row.num_tokens, row.text) == ([4, 5], 2, b"ab")


def test_the_kind_is_in_the_header() -> None:
    assert decode_header(encode_step([], kind="events")[0]).kind == "events"


@pytest.mark.parametrize("num_frames", [0, 1, 4, 6])
def test_a_wrong_number_of_frames_is_refused(num_frames: int) -> None:
    with pytest.raises(ProtocolError, match="frames"):
        decode_step((make_frames() * 2)[:num_frames])


def test_a_torn_index_is_refused() -> None:
    frames = make_frames()
    frames[1] = frames[1][:-1]
    with pytest.raises(ProtocolError, match="multiple"):
        decode_step(frames)


@pytest.mark.parametrize("column", [4, 5, 6])
@pytest.mark.parametrize("value", [0, 1, 3, 2**30, 2**32 - 1])
def test_an_index_must_account_for_every_byte(column: int, value: int) -> None:
    """More tokens, text or extras than came, or fewer; also far beyond the end."""
    frames = make_frames(make_row(RequestId(b"a" * 16), Attempt(1, 1), 0, [7, 8], "xy", b"zz"))
    fields = list(ROW.unpack(frames[1]))
    fields[column] = value
    frames[1] = ROW.pack(*fields)
    with pytest.raises(ProtocolError, match="accounts for"):
        decode_step(frames)


@pytest.mark.parametrize("frame", [2, 3, 4])
def test_bytes_that_no_row_names_are_refused(frame: int) -> None:
    frames = make_frames()
    frames[frame] += b"more"
    with pytest.raises(ProtocolError, match="accounts for"):
        decode_step(frames)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=100), max_size=7))
@example([b""] * NUM_STEP_FRAMES)
def test_any_frames_are_taken_or_refused(frames: list[bytes]) -> None:
    try:
        rows = decode_step(frames)
    except ProtocolError:
        return
    assert encode_step(rows)[1:] == frames[1:]


@settings(max_examples=150)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    place=st.integers(0, 200),
    value=st.integers(0, 255),
)
def test_a_changed_index_is_taken_whole_or_refused(
    rows: list[StepRow], place: int, value: int
) -> None:
    frames = encode_step(rows)
    index = bytearray(frames[1])
    index[place % len(index)] = value
    frames[1] = bytes(index)
    try:
        taken = decode_step(frames)
    except ProtocolError:
        return
    assert encode_step(taken)[1:] == frames[1:]


def test_a_hostile_index_costs_little() -> None:
    """Rows without content are the dearest: some 10 times their bytes."""
    index = bytes(ROW.size * 20_000)
    tracemalloc.start()
    rows = decode_step([b"", index, b"", b"", b""])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 20_000
    assert peak < 20 * len(index)
