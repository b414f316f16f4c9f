"""Limits of sampling parameters: one check for the SDK and for workers."""

import math
from typing import Any

import pytest

from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.errors import InvalidRequest
from llmrt.wire.sampling import MAX_SEED, MAX_TOKENS, SamplingParams, check_sampling

NAN, INF = math.nan, math.inf


def test_defaults_are_greedy_and_valid() -> None:
    check_sampling(SamplingParams())
    assert SamplingParams().temperature == 0.0


def test_defaults_take_no_room_on_the_wire() -> None:
    assert encode_body(SamplingParams()) == b"\x80"
    assert decode_body(b"\x80", SamplingParams) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 1, MAX_TOKENS),
        ("min_tokens", 0, MAX_TOKENS),
        ("temperature", 0.0, 100.0),
        ("top_k", -1, MAX_TOKENS),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-9, 10.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2, 2),
        ("seed", 0, MAX_SEED),
        ("logprobs", 0, 20),
        ("logit_bias", {0: -100.0}, {2**32 - 1: 100.0}),
        ("stop", ("a",) * 16, ("x" * 1024,)),
        ("stop_token_ids", (0,) * 64, (2**32 - 1,)),
    ],
)
def test_the_ends_of_a_range_are_taken(name: str, low: Any, high: Any) -> None:
    for value in (low, high):
        check_sampling(SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", MAX_TOKENS + 1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", 1e999),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", NAN),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", NAN),
        ("presence_penalty", -INF),
        ("frequency_penalty", NAN),
        ("seed", 2**64),
        ("seed", -1),
        ("seed", 1.5),
        ("logprobs", 21),
        ("logit_bias", {2**32: 0.0}),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", ("é" * 513,)),
        ("stop_token_ids", (2**32,)),
        ("stop_token_ids", (0,) * 65),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    """NaN and infinity arrive as floats of msgpack; one of them must not reach an engine."""
    field = "a stop string" if name == "stop" and value == ("é" * 513,) else name
    with pytest.raises(InvalidRequest, match=field):
        check_sampling(SamplingParams(**{name: value}))


def test_min_tokens_may_not_pass_max_tokens() -> None:
    check_sampling(SamplingParams(min_tokens=4, max_tokens=4))
    with pytest.raises(InvalidRequest, match="min_tokens is 5, above max_tokens 4"):
        check_sampling(SamplingParams(min_tokens=5, max_tokens=4))
