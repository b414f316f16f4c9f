"""Limits are exact, and the same in every layout: context, small max_tokens, end tokens."""

import re
from array import array

import pytest
from tests.integration.probes import check_stream, wait_until_idle

from llmrt.client import Client, Result
from llmrt.wire.errors import ContextLengthExceeded, InvalidRequest

pytestmark = pytest.mark.integration

CONTEXT = 4096
EOS = 2


def streamed(client: Client, prompt: str | list[int], **options: object) -> Result:
    """As `generate`, read as a stream; what a stream shows is what its result says."""
    with client.stream(prompt, **options) as stream:  # type: ignore[arg-type]
        events = list(stream)
    check_stream(events)
    result = stream.result
    assert "".join(event.text for event in events) == result.text
    assert sum(len(event.token_ids) for event in events) == result.usage.completion_tokens
    return result


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_tokens"),
    [(CONTEXT - 1, 1, 1), (CONTEXT - 1, None, 1), (CONTEXT - 6, None, 6), (CONTEXT - 3, 3, 3)],
)
def test_the_context_is_used_to_its_end(
    client: Client, num_prompt: int, max_tokens: int | None, num_tokens: int
) -> None:
    prompt = [5] * num_prompt
    result = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
    assert result.usage.prompt_tokens == num_prompt
    assert len(result.token_ids) == result.usage.completion_tokens == num_tokens
    assert result.finish_reason == "length"
    assert streamed(client, prompt, max_tokens=max_tokens, ignore_eos=True).text == result.text


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"),
    [
        (CONTEXT - 1, 2),
        (CONTEXT, 1),
        (CONTEXT, None),
        (CONTEXT + 1, 1),
        (1, CONTEXT),
        (4 * CONTEXT, None),
    ],
)
def test_one_token_more_is_refused_with_all_three_numbers(
    client: Client, num_prompt: int, max_tokens: int | None
) -> None:
    with pytest.raises(ContextLengthExceeded) as refusal:
        client.generate([5] * num_prompt, max_tokens=max_tokens)
    numbers = [int(number) for number in re.findall(r"\d+", str(refusal.value))]
    assert numbers == [num_prompt, *([max_tokens] if max_tokens else []), CONTEXT]
    stream = client.stream([5] * num_prompt, max_tokens=max_tokens)
    with pytest.raises(ContextLengthExceeded):
        next(iter(stream))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("prompt", ["hi", "word " * 70])
def test_small_limits_give_exactly_so_many_tokens(
    client: Client, prompt: str, num_tokens: int
) -> None:
    longer = client.generate(prompt, max_tokens=8)
    for result in (
        client.generate(prompt, max_tokens=num_tokens),
        streamed(client, prompt, max_tokens=num_tokens),
    ):
        assert result.token_ids == longer.token_ids[:num_tokens]
        assert result.usage.completion_tokens == num_tokens
        assert result.finish_reason == "length"


def test_zero_tokens_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        client.generate("hi", max_tokens=0)


def test_a_request_of_one_token_leaves_no_block_granted(client: Client) -> None:
    for num_words in range(1, 100, 9):
        client.generate("word " * num_words, max_tokens=1)
    wait_until_idle(client)


def test_the_first_token_can_be_a_stop_string(client: Client) -> None:
    first = client.generate("hi", max_tokens=1).text
    for result in (
        client.generate("hi", max_tokens=3, stop=first),
        streamed(client, "hi", max_tokens=3, stop=first),
    ):
        assert (result.text, result.finish_reason, result.stop) == ("", "stop", first)
        assert result.usage.completion_tokens == 1


def test_the_end_token_as_first_token_ends_the_text(client: Client) -> None:
    for result in (
        client.generate("hi", max_tokens=8, logit_bias={EOS: 100.0}),
        streamed(client, "hi", max_tokens=8, logit_bias={EOS: 100.0}),
    ):
        assert (result.text, result.finish_reason) == ("", "stop")
        assert result.token_ids == (EOS,)
        assert result.usage.completion_tokens == 1


def test_ignore_eos_holds_from_the_first_token_on(client: Client) -> None:
    result = client.generate("hi", max_tokens=8, logit_bias={EOS: 100.0}, ignore_eos=True)
    assert result.token_ids == (EOS,) * 8
    assert (result.text, result.finish_reason) == ("", "length")


def test_min_tokens_holds_from_the_first_token_on(client: Client) -> None:
    result = client.generate("hi", max_tokens=8, logit_bias={EOS: 100.0}, min_tokens=3)
    assert EOS not in result.token_ids[:3]
    assert result.token_ids[3:] == (EOS,)
    assert result.finish_reason == "stop"


def test_token_ids_may_come_as_an_array(client: Client) -> None:
    assert client.generate(array("I", [5, 6]), max_tokens=1).usage.prompt_tokens == 2
