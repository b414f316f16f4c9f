"""The detokenizer against a plain oracle, for any tokens, stop strings and places to resume."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.engine.detokenizer import Detokenizer


@dataclass
class Pieces:
    token_bytes: Sequence[bytes]
    eos_token_ids: frozenset[int] = frozenset()
    strips_leading_space: bool = False


# Few letters and broken characters, so that random tokens meet random stop strings.
PIECES = Pieces(
    [b"a", b"b", b"ab", b"bab", b"", b" ", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"\xff"]
)
token_lists = st.lists(st.integers(0, len(PIECES.token_bytes)), max_size=24)
stop_lists = st.lists(
    st.text(st.sampled_from("ab \u00e9\U0001f600\ufffd"), min_size=1, max_size=5), max_size=4
).map(tuple)


def oracle(tokens: Sequence[int], stop: tuple[str, ...], min_tokens: int) -> tuple[str, str | None]:
    """Character by character: the first that completes a stop string ends the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for n, token in enumerate([*tokens, None], 1):
        is_end = token is None
        raw = (
            b"" if token is None or token >= len(PIECES.token_bytes) else PIECES.token_bytes[token]
        )
        for char in decoder.decode(raw, final=is_end):
            text += char
            found = [s for s in stop if text.endswith(s)]
            if found and min(n, len(tokens)) >= min_tokens:
                longest = max(found, key=len)
                return text.removesuffix(longest), longest
    return text, None


def run(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@settings(deadline=None)
@given(tokens=token_lists, stop=stop_lists, min_tokens=st.integers(0, 12))
def test_pieces_join_to_what_the_oracle_says(
    tokens: list[int], stop: tuple[str, ...], min_tokens: int
) -> None:
    detokenizer = Detokenizer(PIECES, stop=stop, min_tokens=min_tokens)
    pieces = run(detokenizer, tokens)
    assert ("".join(pieces), detokenizer.matched_stop) == oracle(tokens, stop, min_tokens)


@settings(deadline=None)
@given(tokens=token_lists, stop=stop_lists)
def test_the_text_never_contains_a_stop_string(tokens: list[int], stop: tuple[str, ...]) -> None:
    text = "".join(run(Detokenizer(PIECES, stop=stop), tokens))
    assert not [s for s in stop if s in text]


@settings(deadline=None)
@given(tokens=token_lists)
def test_without_stop_strings_the_text_is_the_decoded_bytes(tokens: list[int]) -> None:
    raw = b"".join(PIECES.token_bytes[i] for i in tokens if i < len(PIECES.token_bytes))
    assert "".join(run(Detokenizer(PIECES), tokens)) == raw.decode(errors="replace")


@settings(deadline=None)
@given(tokens=token_lists, stop=stop_lists, min_tokens=st.integers(0, 12), cut=st.integers(0, 24))
def test_another_instance_goes_on_where_the_first_was(
    tokens: list[int], stop: tuple[str, ...], min_tokens: int, cut: int
) -> None:
    whole = Detokenizer(PIECES, stop=stop, min_tokens=min_tokens)
    expected = run(whole, tokens)
    resumed = Detokenizer(PIECES, stop=stop, min_tokens=min_tokens, previous_token_ids=tokens[:cut])
    assert run(resumed, tokens[cut:]) == expected[min(cut, len(tokens)) :]
    assert resumed.matched_stop == whole.matched_stop


def words(*texts: str) -> Pieces:
    return Pieces([text.encode() for text in texts])


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    vocabulary = words("alpha be", "ta", " gam", "x")
    detokenizer = Detokenizer(vocabulary, stop=("ta gamma",))
    assert [detokenizer.feed(i) for i in (0, 1, 2, 3)] == ["alpha be", "", "", "ta gamx"]


@pytest.mark.parametrize("stop", [("gamma", "ta gam"), ("ta gam", "gamma")])
def test_of_two_stop_strings_the_one_complete_first_wins(stop: tuple[str, ...]) -> None:
    detokenizer = Detokenizer(words("alpha ", "beta", " gamma", " delta"), stop=stop)
    assert "".join(run(detokenizer, (0, 1, 2, 3))) == "alpha be"
    assert detokenizer.matched_stop == "ta gam"


def test_of_two_stop_strings_complete_at_once_the_longest_wins() -> None:
    detokenizer = Detokenizer(words("one two three"), stop=("three", "two three"))
    assert detokenizer.feed(0) == "one "
    assert detokenizer.matched_stop == "two three"


def test_a_stop_string_before_min_tokens_is_text_and_a_later_one_ends_it() -> None:
    detokenizer = Detokenizer(words("a stop", " b", " stop c"), stop=("stop",), min_tokens=3)
    assert [detokenizer.feed(i) for i in (0, 1, 2)] == ["a stop", " b", " "]
    assert detokenizer.matched_stop == "stop"


def test_an_early_match_is_not_counted_once_min_tokens_is_reached() -> None:
    """It is still held as the beginning of the longer one when the second token comes."""
    detokenizer = Detokenizer(words("ab", "x"), stop=("ab", "abcd"), min_tokens=2)
    assert [detokenizer.feed(0), detokenizer.feed(1)] == ["", "abx"]
    assert detokenizer.matched_stop is None


def test_tokens_after_a_stop_string_add_nothing() -> None:
    detokenizer = Detokenizer(words("a.", "b"), stop=(".",))
    assert [detokenizer.feed(0), detokenizer.feed(1), detokenizer.flush()] == ["a", "", ""]


def test_half_a_character_waits_and_becomes_a_replacement_only_at_the_end() -> None:
    vocabulary = Pieces([b"x\xf0\x9f", b"\x98\x80"])
    whole, cut = Detokenizer(vocabulary), Detokenizer(vocabulary)
    assert [whole.feed(0), whole.feed(1), whole.flush()] == ["x", "\U0001f600", ""]
    assert [cut.feed(0), cut.flush()] == ["x", "\ufffd"]


def test_the_first_space_of_a_text_is_stripped_once() -> None:
    vocabulary = Pieces([b"", b" hi", b" you"], strips_leading_space=True)
    assert "".join(run(Detokenizer(vocabulary), (0, 1, 2))) == "hi you"
    assert "".join(run(Detokenizer(vocabulary, continues=True), (0, 1, 2))) == " hi you"
    assert "".join(run(Detokenizer(vocabulary, previous_token_ids=(0, 1)), (1,))) == " hi"


def test_an_empty_stop_string_stops_nothing() -> None:
    detokenizer = Detokenizer(words("a"), stop=("",))
    assert detokenizer.feed(0) == "a"
    assert detokenizer.matched_stop is None
