"""The text, and how it is cut."""

import hashlib
from array import array
from pathlib import Path

import pytest

from llmrt.cli.bench.quality.corpus import FIXED_TEXT, Corpus, read_text
from llmrt.cli.bench.quality.measure import Chunk, make_chunks
from llmrt.wire.errors import ConfigError


def corpus(num_tokens: int, prefix: tuple[int, ...] = ()) -> Corpus:
    return Corpus(array("I", prefix), array("I", range(100, 100 + num_tokens)))


def test_windows_cover_the_text_once() -> None:
    windows = corpus(10).windows(4)
    assert [window.tolist() for window in windows] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109],
    ]


def test_each_window_begins_with_the_prefix() -> None:
    assert [list(window) for window in corpus(4, (1,)).windows(4)] == [
        [1, 100, 101, 102],
        [1, 103],
    ]


def test_a_window_without_a_prediction_is_left_out() -> None:
    assert [list(window) for window in corpus(5).windows(4)] == [[100, 101, 102, 103]]


def test_chunks_are_bounded_and_have_the_next_token_as_target() -> None:
    """A vocabulary of 4 million: 2 tokens of logits are 32 MiB."""
    chunks = make_chunks(corpus(5, (1,)), 4, 1 << 22)
    window, last = array("I", [1, 100, 101, 102]), array("I", [1, 103, 104])
    assert chunks == [
        Chunk(window, 0, 2),
        Chunk(window, 2, 4),
        Chunk(last, 0, 2),
        Chunk(last, 2, 3),
    ]
    assert [chunk.targets.tolist() for chunk in chunks] == [[100, 101], [102], [103, 104], []]


def test_prompts_reach_from_the_first_to_the_last_token() -> None:
    prompts = corpus(11, (1,)).prompts(3, 5)
    assert [prompt.tolist() for prompt in prompts] == [
        [1, *range(100, 105)],
        [1, *range(103, 108)],
        [1, *range(106, 111)],
    ]
    assert corpus(3).prompts(1, 5) == [array("I", [100, 101, 102])]


def test_the_fixed_text_is_what_the_figures_were_measured_on() -> None:
    """Figures in docs/quality.md name this hash: another text needs new ones."""
    text = read_text(None)
    assert text.sha256 == hashlib.sha256(FIXED_TEXT.read_bytes()).hexdigest()
    assert text.sha256[:16] == "aa178d3aa9ba8a44"
    assert text.content.isascii()
    assert text.content.startswith("CHAPTER VI\n\nPig and Pepper\n\n")
    assert 20_000 < len(text.content) < 40_000


def test_a_text_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(ConfigError, match=r"a\.txt"):
        read_text(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a\.txt"):
        read_text(path)
    path.write_text("Grüße")
    assert read_text(path).content == "Grüße"
