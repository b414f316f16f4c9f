"""Hashes of a prompt's start, and the workers that have seen it."""

from array import array
from typing import Any

from llmrt.broker.prefixes import MAX_PIECES, PIECE_BYTES, SeenPrefixes, prompt_pieces
from llmrt.wire.arrays import pack_u32
from llmrt.wire.envelope import encode_body
from llmrt.wire.messages import ChatMessage, Generate
from llmrt.wire.sampling import SamplingParams


def chat(*contents: str, **sampling: Any) -> tuple[bytes, ...]:
    roles = ("system", *("user", "assistant") * len(contents))
    turns = tuple(
        ChatMessage(role=role, content=content)
        for role, content in zip(roles, contents, strict=False)
    )
    body = Generate(prompt_kind="chat", sampling=SamplingParams(**sampling), messages=turns)
    return prompt_pieces([encode_body(body)])


def text(prompt: bytes) -> tuple[bytes, ...]:
    body = Generate(prompt_kind="text", sampling=SamplingParams())
    return prompt_pieces([encode_body(body), prompt])


def test_a_longer_chat_begins_with_the_pieces_of_a_shorter_one() -> None:
    system, question, answer = "s" * 700, "q" * 700, "a" * 700
    short = chat(system, question, max_tokens=10, seed=1)
    longer = chat(system, question, answer, "and then?", max_tokens=99, seed=2)
    assert len(short) == 2
    assert longer[:2] == short
    assert len(longer) == 4


def test_what_differs_early_differs_from_there_on() -> None:
    one, other = text(b"a" * 2000), text(b"a" * 600 + b"b" + b"a" * 1399)
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other)


def test_turns_are_told_from_their_neighbours() -> None:
    assert chat("x" * 300, "y" * 300) != chat("x" * 299, "x" + "y" * 300)


def test_token_ids_count_by_their_bytes() -> None:
    ids = array("I", range(1000))
    longer = array("I", range(1200))
    assert text(pack_u32(longer))[:7] == text(pack_u32(ids))


def test_less_than_a_piece_is_nothing_and_long_prompts_are_bounded() -> None:
    assert text(b"a" * (PIECE_BYTES - 1)) == ()
    assert len(text(b"a" * PIECE_BYTES)) == 1
    assert len(text(b"a" * (PIECE_BYTES * (MAX_PIECES + 9)))) == MAX_PIECES


def test_a_body_that_nobody_can_read_has_no_pieces() -> None:
    assert prompt_pieces([b"\xc1"]) == ()
    assert prompt_pieces([b"\x80", b""]) == ()


def test_overlap_counts_from_the_first_piece() -> None:
    seen = SeenPrefixes(10_000)
    seen.add([b"1", b"2", b"3"])
    assert seen.overlap([b"1", b"2", b"9", b"3"]) == 2
    assert seen.overlap([b"9", b"2"]) == 0
    assert seen.overlap([]) == 0


def test_the_tail_of_what_was_not_used_for_long_goes_first() -> None:
    # A cache of 8,192 tokens holds 64 pieces.
    seen = SeenPrefixes(8192)
    old = [b"old %d" % i for i in range(40)]
    new = [b"new %d" % i for i in range(40)]
    seen.add(old)
    seen.add(new)
    assert seen.overlap(new) == 40
    assert seen.overlap(old) == 24
