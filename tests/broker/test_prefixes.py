"""What the broker remembers of prompts, by their bytes."""

import random
from array import array

import pytest

from llmrt.broker.prefixes import (
    BYTES_PER_TOKEN,
    MAX_HASHED_BYTES,
    PrefixIndex,
    Prompt,
    make_prompt,
    prompt_of,
)
from llmrt.wire.arrays import pack_u32
from llmrt.wire.envelope import encode_body
from llmrt.wire.messages import ChatMessage, Generate
from llmrt.wire.sampling import SamplingParams

GREEDY = SamplingParams()


def words(num_bytes: int, seed: str = "") -> bytes:
    return random.Random(seed).randbytes(num_bytes // 2).hex().encode()


def chat(*contents: str, temperature: float = 0.0) -> Prompt:
    turns = [
        ChatMessage(role="assistant" if i % 2 else "user", content=content)
        for i, content in enumerate(contents)
    ]
    sampling = SamplingParams(temperature=temperature)
    body = Generate(prompt_kind="chat", sampling=sampling, messages=tuple(turns))
    return prompt_of([encode_body(body), b""])


def index(*prompts: Prompt, max_tokens: int = 1 << 20) -> PrefixIndex:
    made = PrefixIndex(max_tokens)
    for prompt in prompts:
        made.note(prompt)
    return made


@pytest.mark.parametrize("num_bytes", [1280, 12_800, 200_000])
def test_a_prompt_is_known_up_to_where_it_differs(num_bytes: int) -> None:
    """To 256 bytes, or an eighth."""
    first = words(num_bytes)
    known = index(make_prompt(first)).num_known_tokens(make_prompt(first + b"and more" * 99))
    assert num_bytes * 7 // 8 - 256 <= known * BYTES_PER_TOKEN <= num_bytes
    other = first[: num_bytes // 2] + b"X" + first[num_bytes // 2 + 1 :]
    known = index(make_prompt(first)).num_known_tokens(make_prompt(other))
    assert num_bytes * 7 // 16 - 256 <= known * BYTES_PER_TOKEN <= num_bytes // 2


def test_the_next_turn_of_a_chat_begins_with_the_one_before() -> None:
    """Whatever else the client asks for."""
    question, answer = words(600).decode(), words(300, "answer").decode()
    known = index(chat(question)).num_known_tokens(
        chat(question, answer, "And now?", temperature=0.7)
    )
    assert 600 - 256 <= known * BYTES_PER_TOKEN <= 600 + 6
    assert index(chat(question)).num_known_tokens(chat("Now: " + question)) == 0


def test_who_says_it_counts() -> None:
    question = words(600).decode()
    swapped = chat("", question)
    assert index(chat(question)).num_known_tokens(swapped) == 0


def test_token_ids_are_counted_exactly() -> None:
    body = encode_body(Generate(prompt_kind="tokens", sampling=GREEDY))
    prompt = prompt_of([body, pack_u32(array("I", range(320)))])
    assert prompt.num_tokens == 320
    assert index(prompt).num_known_tokens(prompt) == 320


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x80"], [b"\xc1", b"x" * 200], [b"\x90"]])
def test_whatever_a_client_sends_is_some_prompt(frames: list[bytes]) -> None:
    assert prompt_of(frames).num_tokens <= 50


def test_what_is_remembered_fits_the_arena_and_the_oldest_goes_first() -> None:
    prompts = [make_prompt(words(1280, str(i))) for i in range(10)]
    remembered = index(*prompts, max_tokens=1100)
    known = [remembered.num_known_tokens(prompt) for prompt in prompts]
    assert known[:6] == [0] * 6
    assert known[7:] == [320] * 3
    assert known[6] == 128, "of one prompt the end goes first"


def test_a_prefix_that_is_used_stays() -> None:
    shared = words(1280)
    remembered = PrefixIndex(1000)
    for i in range(20):
        remembered.note(make_prompt(shared + words(640, str(i))))
        assert remembered.num_known_tokens(make_prompt(shared)) == 320


def test_a_prompt_of_any_length_has_few_checksums() -> None:
    prompt = make_prompt(bytes(4 * MAX_HASHED_BYTES))
    assert len(prompt.checksums) < 60
    assert index(prompt).num_known_tokens(prompt) * BYTES_PER_TOKEN >= MAX_HASHED_BYTES
