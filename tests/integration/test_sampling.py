"""A request's tokens depend on its own parameters alone: not on company, layout or streaming."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_cluster import RunningCluster

from llmrt.client import Client
from llmrt.wire.errors import InvalidRequest

pytestmark = pytest.mark.integration

PROMPT = "The quick brown fox"
# The first bytes of many emoji: never a whole character by itself.
HALF_A_CHARACTER = 10813

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "one two three four five six", "temperature": 0.0},
    "frequency": {"prompt": "word " * 299, "frequency_penalty": 1.05},
    "repetition": {"prompt": "a b c", "repetition_penalty": 1.2},
    "presence": {"prompt": "some more words " * 23, "presence_penalty": -1.0},
    "seeded": {"prompt": PROMPT, "temperature": 0.8, "seed": 42, "top_p": 0.9},
}


def tokens_of(client: Client, name: str) -> tuple[int, ...]:
    return client.generate(**REQUESTS[name], max_tokens=16).token_ids


@pytest.fixture(scope="module")
def alone(colocated: RunningCluster) -> dict[str, tuple[int, ...]]:
    """What each request gives without company, colocated."""
    with Client(colocated.bind) as client:
        return {name: tokens_of(client, name) for name in REQUESTS}


def test_company_changes_no_token(client: Client, alone: dict[str, tuple[int, ...]]) -> None:
    groups = [*itertools.combinations(REQUESTS, 1), *itertools.combinations(REQUESTS, 2)]
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for group in (*groups, tuple(REQUESTS), tuple(REQUESTS)):
            together = pool.map(lambda name: (name, tokens_of(client, name)), group)
            assert dict(together) == {name: alone[name] for name in group}, group


def test_penalties_change_tokens(client: Client, alone: dict[str, tuple[int, ...]]) -> None:
    """Else the test above could not fail for them."""
    for name, field in (("frequency", "frequency_penalty"), ("presence", "presence_penalty")):
        strong = {**REQUESTS[name], field: 2.0, "logit_bias": {alone[name][0]: 6.0}}
        plain = {**strong, field: 0.0}
        assert client.generate(**strong, max_tokens=16).token_ids != (
            client.generate(**plain, max_tokens=16).token_ids
        )


@pytest.mark.parametrize("other", [{}, {"seed": 7}, {"seed": 42}])
def test_a_seeded_request_ignores_those_beside_it(
    client: Client, alone: dict[str, tuple[int, ...]], other: dict[str, Any]
) -> None:
    with client.stream("something else", temperature=1.0, max_tokens=400, **other) as beside:
        next(iter(beside))
        assert tokens_of(client, "seeded") == alone["seeded"]
    assert tokens_of(client, "seeded") == alone["seeded"]  # and after that one was cancelled


def test_seeds_differ_and_repeat(client: Client) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        return client.generate(PROMPT, temperature=1.5, seed=seed, max_tokens=8).token_ids

    drawn = [draw(seed) for seed in range(4)]
    assert len(set(drawn)) == 4
    assert [draw(seed) for seed in range(4)] == drawn


def test_no_seed_is_a_new_one_each_time(client: Client) -> None:
    runs = {client.generate(PROMPT, temperature=2.0, max_tokens=8).token_ids for _ in range(3)}
    assert len(runs) == 3


def test_temperatures_near_zero_are_greedy(client: Client) -> None:
    prompt = "word"
    greedy = client.generate(prompt, max_tokens=24, logprobs=2)
    assert greedy.logprobs is not None
    leads = [entry.top[0][1] - entry.top[1][1] for entry in greedy.logprobs]
    assert min(leads) > 0.1  # else a tie could be drawn either way
    for draw in (
        *({"temperature": value} for value in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)),
        *({"temperature": 0.0, "top_k": k} for k in (1, 0, -1)),
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
    ):
        options: dict[str, Any] = {**draw, "max_tokens": 24}
        assert client.generate(prompt, **options).token_ids == greedy.token_ids, draw


def test_logprobs_are_of_the_drawn_token(client: Client) -> None:
    result = client.generate(PROMPT, max_tokens=6, logprobs=3)
    assert result.logprobs is not None
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.top[0] == (token_id, entry.drawn)
        assert entry.drawn <= 0
        assert [value for _, value in entry.top] == sorted(
            (value for _, value in entry.top), reverse=True
        )


def streamed(client: Client, **options: Any) -> tuple[str, str]:
    with client.stream(PROMPT, **options) as stream:
        text = "".join(event.text for event in stream)
    return text, stream.result.finish_reason


def test_a_stop_string_before_min_tokens_is_ordinary_text(client: Client) -> None:
    """The text is one word over and over, so that the stop string is everywhere."""
    [word_id] = client.tokenize(" the", add_special=False)
    options: dict[str, Any] = {"logit_bias": {word_id: 100.0}, "min_tokens": 20, "max_tokens": 64}
    for stop, num_words in ((" the", 19), (" the the", 18), (" the" * 5, 15)):
        result = client.generate(PROMPT, stop=stop, **options)
        assert result.text == " the" * num_words
        assert (result.finish_reason, result.stop) == ("stop", stop)
        assert result.usage.completion_tokens == 20
        assert streamed(client, stop=stop, **options) == (result.text, "stop")


def test_without_a_later_match_the_text_ends_by_length(client: Client) -> None:
    text = client.generate(PROMPT, max_tokens=30).text
    early = text[3:9]
    assert text.count(early) == 1
    result = client.generate(PROMPT, max_tokens=30, min_tokens=20, stop=early)
    assert (result.text, result.finish_reason) == (text, "length")


def test_no_part_of_a_stop_string_reaches_the_reader(client: Client) -> None:
    """Many places of the text, so that some lie across tokens; the earlier match wins."""
    text = client.generate(PROMPT, max_tokens=8).text
    for start in range(0, len(text) - 12, 2):
        stop, later = text[start : start + 6], text[start + 4 : start + 12]
        expected = text[: text.index(stop)]
        assert streamed(client, max_tokens=8, stop=stop) == (expected, "stop"), stop
        assert streamed(client, max_tokens=8, stop=[later, stop]) == (expected, "stop")
    assert client.generate(PROMPT, max_tokens=8, stop=stop).text == expected


@pytest.mark.parametrize("stop", [[""], ["a", ""], ["a"] * 17])
def test_an_empty_stop_string_is_refused(client: Client, stop: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        client.generate(PROMPT, max_tokens=2, stop=stop)


def test_no_stop_strings_are_no_limit(client: Client) -> None:
    assert client.generate(PROMPT, max_tokens=4, stop=[]).finish_reason == "length"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_limit_that_cuts_a_character_gives_valid_text(client: Client, num_tokens: int) -> None:
    options: dict[str, Any] = {
        "logit_bias": {HALF_A_CHARACTER: 100.0},
        "max_tokens": num_tokens,
    }
    result = client.generate(PROMPT, **options)
    assert result.token_ids == (HALF_A_CHARACTER,) * num_tokens
    assert result.text == "\ufffd" * num_tokens
    assert streamed(client, **options) == (result.text, "length")
