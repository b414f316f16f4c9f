"""What a caller may ask for, and the message for what not."""

import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.client.events import Submit
from llmrt.client.requests import (
    Options,
    encode_prompt,
    make_generate,
    make_messages,
    make_sampling,
    make_tokenize,
    parse_request_id,
)
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.envelope import MAX_RAW_BYTES, decode_body
from llmrt.wire.errors import InvalidRequest, LocalError, MessageTooLarge
from llmrt.wire.messages import ChatMessage, Generate, Tokenize
from llmrt.wire.sampling import SamplingParams


def make(prompt: Any = "hello", **options: Any) -> Submit:
    return make_generate(prompt, None, Options(**options), 600.0)  # type: ignore[typeddict-item]  # wrong ones too


def test_keywords_are_the_fields_of_sampling_params() -> None:
    of_calls = {"deadline_s", "priority", "model", "request_id"}
    assert set(SamplingParams.__struct_fields__) | of_calls == set(Options.__annotations__)


def test_every_keyword_reaches_the_body() -> None:
    submit = make(
        max_tokens=5, stop="END", stop_token_ids=[1, 2], logit_bias={3: 1}, priority=-4, model="m"
    )
    generate = decode_body(submit.frames[0], Generate)
    assert (generate.model, generate.priority, generate.prompt_kind) == ("m", -4, "text")
    assert generate.sampling == SamplingParams(
        max_tokens=5, stop=("END",), stop_token_ids=(1, 2), logit_bias={3: 1.0}
    )


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="temprature: did you mean temperature"):
        make(temprature=1.0)
    with pytest.raises(InvalidRequest, match="max_token: did you mean max_tokens"):
        make(max_token=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", float("nan")),
        ("top_p", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", -3),
        ("seed", 2**64),
        ("seed", -1),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("ignore_eos", "yes"),
        ("logprobs", 1000),
        ("priority", 1.5),
        ("priority", 2**40),
        ("model", 7),
        ("deadline_s", 0),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
        ("deadline_s", "soon"),
        ("request_id", "short"),
        ("request_id", b"x"),
        ("request_id", 5),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        make(**{name: value})


def test_a_random_request_gets_a_seed() -> None:
    """So that a second try draws the same tokens."""
    first, second = make_sampling({"temperature": 1.0}), make_sampling({"temperature": 1.0})
    assert first.seed is not None
    assert first.seed != second.seed
    assert make_sampling({"temperature": 1.0, "seed": 0}).seed == 0
    assert make_sampling({}).seed is None


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_token_ids_are_packed(token_ids: list[int]) -> None:
    for prompt in (token_ids, tuple(token_ids), array("Q", token_ids)):
        kind, raw = encode_prompt(prompt)
        assert kind == "tokens"
        assert unpack_u32(raw).tolist() == token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (7, "int"),
        ({1: 2}, "dict"),
        ([1, -1], r"prompt\[1\] is -1"),
        ([2**32], r"prompt\[0\] is 4294967296"),
        (["a"], r"prompt\[0\] is 'a'"),
        ([1, 1.5], r"prompt\[1\] is 1.5"),
        ("a\ud800b", "surrogate .* at character 1"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode_prompt(prompt)


def test_a_huge_prompt_is_refused_without_a_copy() -> None:
    text = "x" * (64 << 20)
    token_ids = range(1 << 30)
    tracemalloc.start()
    for prompt in (text, token_ids):
        with pytest.raises(MessageTooLarge, match="at most"):
            encode_prompt(prompt)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(MessageTooLarge):
        encode_prompt("é" * (MAX_RAW_BYTES // 2 + 1))


def test_turns_may_be_mappings_or_messages() -> None:
    turn = ChatMessage(role="user", content="hi")
    assert make_messages([turn, {"role": "user", "content": "hi"}]) == (turn, turn)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "type str"),
        ({"role": "user", "content": "hi"}, "type dict"),
        ([], "empty"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x", "name": "y"}], r"messages\[0\]"),
        ([{"role": "user", "content": None}], "content"),
        (5, "type int"),
    ],
)
def test_wrong_turns_are_refused(messages: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_messages(messages)


def test_surrogates_anywhere_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        make_generate(None, [{"role": "user", "content": "\ud800"}], Options(), 1.0)
    with pytest.raises(InvalidRequest, match="surrogate"):
        make(stop="\ud800")
    with pytest.raises(InvalidRequest, match="surrogate"):
        make(model="\ud800")


def test_long_chats_are_too_large() -> None:
    with pytest.raises(MessageTooLarge, match="turns"):
        make_messages([{"role": "user", "content": "x" * (1 << 20)}, {"role": "a", "content": "y"}])
    with pytest.raises(MessageTooLarge, match="shorten the messages"):
        make_generate(None, [{"role": "user", "content": "x"}] * 70_000, Options(), 1.0)


def test_tokenize_takes_text_or_turns() -> None:
    text = make_tokenize("héllo", False, 1.0)
    assert text.frames[1] == "héllo".encode()
    assert decode_body(text.frames[0], Tokenize) == Tokenize(add_special=False)
    chat = make_tokenize([{"role": "user", "content": "x"}], True, 1.0)
    assert len(decode_body(chat.frames[0], Tokenize).messages) == 1


def test_tokenize_may_name_the_model() -> None:
    assert decode_body(make_tokenize("x", True, 1.0, "m").frames[0], Tokenize).model == "m"
    with pytest.raises(InvalidRequest, match="model is "):
        make_tokenize("x", True, 1.0, "m" * 2000)


def test_request_ids_are_hex_or_bytes() -> None:
    assert parse_request_id("00" * 16) == parse_request_id(bytes(16)) == bytes(16)
    assert parse_request_id(None) != parse_request_id(None)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(Options.__annotations__)), value=ANYTHING)
def test_any_value_is_taken_or_refused_as_ours(name: str, value: object) -> None:
    """Whatever is taken survives the way over the wire."""
    try:
        submit = make(**{name: value})
    except LocalError:
        return
    generate = decode_body(submit.frames[0], Generate)
    taken = msgspec.structs.asdict(generate.sampling) | {"priority": generate.priority}
    if name in taken and not isinstance(value, dict | list | str):
        assert taken[name] == value


@settings(max_examples=60, deadline=None)
@given(ANYTHING)
def test_any_prompt_is_taken_or_refused_as_ours(prompt: object) -> None:
    try:
        kind, raw = encode_prompt(prompt)
    except LocalError:
        return
    expected = prompt if isinstance(prompt, str) else list(prompt)  # type: ignore[call-overload]
    assert (raw.decode() if kind == "text" else unpack_u32(raw).tolist()) == expected
