"""What no worker can serve is refused at once with a code and a remedy; the next request works."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from local_cluster import RunningCluster
from tests.integration.raw_peer import RawPeer, raw_peer

from llmrt.client import Client
from llmrt.wire.arrays import pack_u32
from llmrt.wire.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LlmrtError,
    MessageTooLarge,
    ModelNotFound,
    ProtocolError,
)

pytestmark = pytest.mark.integration

NAN, INFINITY = float("nan"), float("inf")
HUGE = 256 << 20
# What a refusal may take beside the prompt itself.
MAX_GROWTH_BYTES = 32 << 20


@pytest.fixture(autouse=True)
def _serves_on(client: Client) -> Iterator[None]:
    before = client.generate("The quick brown fox", max_tokens=4)
    yield
    after = client.generate("The quick brown fox", max_tokens=4)
    assert after.token_ids == before.token_ids
    assert len(after.token_ids) == 4


@pytest.fixture
def peer(layout: RunningCluster) -> Iterator[RawPeer]:
    with raw_peer(layout.bind) as connected:
        yield connected


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ("", {}, InvalidRequest, "the prompt is empty"),
        ([], {}, InvalidRequest, "the prompt is empty"),
        (b"bytes", {}, InvalidRequest, "bytes"),
        ("\ud83d", {}, InvalidRequest, "lone surrogate"),
        ([49152], {}, InvalidRequest, "49152 is unknown; the vocabulary has ids 0 to 49151"),
        ([2**32 - 1], {}, InvalidRequest, "4294967295 is unknown"),
        ([2**32], {}, InvalidRequest, r"prompt\[0\] is 4294967296"),
        ([1, -1], {}, InvalidRequest, r"prompt\[1\] is -1"),
        ([1, "a"], {}, InvalidRequest, r"prompt\[1\] is 'a'"),
        ([5] * 5000, {}, ContextLengthExceeded, "5000 tokens .* 1; the context holds 4096"),
        ("word " * 5000, {}, ContextLengthExceeded, "5001 tokens .* 1; the context holds 4096"),
        ("hi", {"max_tokens": 0}, InvalidRequest, "max_tokens is 0"),
        ("hi", {"max_tokens": -1}, InvalidRequest, "max_tokens is -1"),
        ("hi", {"max_tokens": 2**40}, InvalidRequest, f"max_tokens is {2**40}"),
        ("hi", {"max_tokens": 1 << 24}, ContextLengthExceeded, "16777216; .* holds 4096"),
        ("hi", {"max_tokens": 1.5}, InvalidRequest, "max_tokens is 1.5"),
        ("hi", {"temperature": NAN}, InvalidRequest, "temperature is nan"),
        ("hi", {"temperature": "0.5"}, InvalidRequest, "temperature is '0.5'"),
        ("hi", {"temperature": True}, InvalidRequest, "temperature is True"),
        ("hi", {"seed": 2**64}, InvalidRequest, "seed is 18446744073709551616"),
        ("hi", {"seed": 10**5000}, InvalidRequest, "seed is <int of 16610 bits>"),
        ("hi", {"temperature": 10**400}, InvalidRequest, "temperature is <int"),
        ("hi", {"temprature": 1.0}, InvalidRequest, "did you mean temperature"),
        ("hi", {"logit_bias": {49152: 1.0}}, InvalidRequest, "logit_bias names token 49152"),
        ("hi", {"stop_token_ids": [50000]}, InvalidRequest, "stop_token_ids names token 50000"),
        ("hi", {"stop": ["a"] * 17}, InvalidRequest, "stop has 17 entries"),
        ("hi", {"model": "zebra"}, ModelNotFound, "'zebra' is not served here: .* tiny"),
        ("hi", {"deadline_s": 0}, InvalidRequest, "deadline_s is 0"),
    ],
)
def test_the_sdk_refuses_naming_the_value(
    client: Client, prompt: Any, options: dict[str, Any], error: type[LlmrtError], text: str
) -> None:
    with pytest.raises(error, match=text):
        client.generate(prompt, **{"max_tokens": 1, **options})


BAD_FIELDS: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (NAN, INFINITY, -0.1, 101, "0.5", True)),
    *(("top_p", value) for value in (NAN, 0, 1.1)),
    ("min_p", NAN),
    *(("top_k", value) for value in (-2, 2**40, 1.5)),
    *(("repetition_penalty", value) for value in (NAN, 0)),
    ("presence_penalty", NAN),
    ("frequency_penalty", INFINITY),
    *(("seed", value) for value in (-1, 1.5, "7")),
    *(("max_tokens", value) for value in (0, -5, 2**40, 2**63)),
    ("min_tokens", -1),
    *(("stop", value) for value in ([""], ["a"] * 17, ["a" * 1025], "text", [1])),
    *(("logit_bias", value) for value in ({5: NAN}, {5: 101}, {70000: 1.0}, {"x": 1.0})),
    ("stop_token_ids", [99999]),
    ("logprobs", 21),
]


def test_a_worker_refuses_what_no_sdk_sends_naming_the_field(peer: RawPeer) -> None:
    def is_refused(field: str, value: Any) -> bool:
        try:
            peer.ask(**{"max_tokens": 2, field: value})
        except (InvalidRequest, ProtocolError) as refusal:
            return field in refusal.message
        return False

    assert [case for case in BAD_FIELDS if not is_refused(*case)] == []


CHAT = {"prompt_kind": "chat", "sampling": {"max_tokens": 1}}
TEXT = {**CHAT, "prompt_kind": "text"}


@pytest.mark.parametrize(
    ("body", "raw", "text"),
    [
        (TEXT, b"ab\xff", "not UTF-8: byte 2 is 0xff"),
        (TEXT, b"\xed\xa0\xbd", "not UTF-8: byte 0"),
        (TEXT, b"", "the prompt is empty"),
        ({**TEXT, "prompt_kind": "tokens"}, b"", "the prompt is empty"),
        ({**TEXT, "prompt_kind": "tokens"}, b"abc", "3 bytes are no array of 4-byte integers"),
        ({**TEXT, "prompt_kind": "tokens"}, pack_u32([49152]), "49152 is unknown"),
        ({**TEXT, "prompt_kind": "image"}, b"x", "'image': text, tokens or chat is needed"),
        ({**CHAT, "messages": []}, b"", "messages is empty"),
        ({**CHAT, "messages": [{"role": "user", "content": ""}]}, b"", "the messages have no text"),
        ({**CHAT, "messages": [{"role": "user", "content": None}]}, b"", r"messages\[0\]\.content"),
        ({**CHAT, "messages": [{"role": "user", "content": ["a"]}]}, b"", r"messages\[0\]"),
        ({**CHAT, "messages": [{"role": "user"}]}, b"", "content"),
        ({**TEXT, "priority": "high"}, b"x", "priority"),
        ({"prompt_kind": "text"}, b"x", "sampling"),
        ([1, 2], b"x", "object"),
        (7, b"x", "object"),
    ],
)
def test_a_body_that_is_no_request_is_answered_at_once(
    peer: RawPeer, body: Any, raw: bytes, text: str
) -> None:
    """Not by trying one worker after the other, none of which can read it."""
    with pytest.raises((InvalidRequest, ProtocolError), match=text):
        peer.ask_body(body, raw)


def test_unknown_fields_are_ignored(peer: RawPeer) -> None:
    body: Mapping[str, Any] = {**TEXT, "of_a_later_version": {"x": [1]}}
    assert peer.ask_body(body, b"hi").usage.completion_tokens == 1


def test_the_largest_seed_is_reproducible(client: Client) -> None:
    runs = [
        client.generate("hi", max_tokens=8, temperature=1.0, seed=2**64 - 1).token_ids
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_budget_that_is_spent_is_refused(peer: RawPeer) -> None:
    peer.generate(msgspec.msgpack.encode(TEXT), b"hi", budget_ms=0)
    assert peer.failure().code == "deadline_exceeded"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, text: client.generate(text),
        lambda client, text: client.tokenize(text),
        lambda client, text: client.chat([{"role": "user", "content": text}]),
        lambda client, text: client.generate("hi", stop=text),
        lambda client, text: client.generate("hi", model=text),
        lambda client, text: client.generate("hi", request_id=text),
        lambda client, text: client.chat([{"role": "user", "content": "hi", "name": text}]),
        lambda client, text: client.generate(range(HUGE)),
    ],
    ids=["prompt", "tokenize", "chat", "stop", "model", "request_id", "unknown", "token ids"],
)
def test_a_huge_value_is_refused_without_a_copy(
    client: Client, ask: Callable[[Client, str], object]
) -> None:
    text = "a" * HUGE
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before = _peak_bytes()
    with pytest.raises((MessageTooLarge, InvalidRequest)) as refusal:
        ask(client, text)
    assert len(str(refusal.value)) < 1000
    assert _peak_bytes() - before < MAX_GROWTH_BYTES


def _peak_bytes() -> int:
    """Highest resident memory of this process since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak_kib,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(peak_kib) * 1024
