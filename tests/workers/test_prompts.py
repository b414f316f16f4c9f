"""From what a client sent to token ids, with the real tokenizer and template."""

from pathlib import Path

import pytest

from llmrt.models.chat_template import ChatTemplate
from llmrt.models.loading import open_model
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import ContextLengthExceeded, InvalidRequest
from llmrt.wire.messages import ChatMessage, Generate
from llmrt.wire.sampling import SamplingParams
from llmrt.workers.prompts import PromptEncoder


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_model(smollm2_path).metadata)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> PromptEncoder:
    assert tokenizer.chat_template is not None
    template = ChatTemplate(
        tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    return PromptEncoder(tokenizer, template, 8192)


def ask(kind: str, *turns: str) -> Generate:
    messages = tuple(ChatMessage(role="user", content=turn) for turn in turns)
    return Generate(prompt_kind=kind, sampling=SamplingParams(), messages=messages)


def test_a_chat_is_rendered_and_a_text_is_not(encoder: PromptEncoder) -> None:
    chat = encoder.encode(ask("chat", "hi"), b"", now=0.0)
    assert (len(chat), chat[0], chat[1]) == (31, 1, 9690)
    text = encoder.encode(ask("text"), b"hi", now=0.0)
    assert 0 < len(text) < 3


def test_the_time_in_a_template_is_that_of_admission(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    encoder = PromptEncoder(tokenizer, template, 8192)
    ids = encoder.encode(ask("chat", "hi"), b"", now=1e9)
    assert tokenizer.decode(ids) == "09 Sep 2001 hi"


@pytest.mark.parametrize(
    ("generate", "prompt", "text"),
    [
        (ask("text"), b"ab\xff", "byte 2 is 0xff"),
        (ask("chat"), b"", "messages is empty"),
        (ask("chat", ""), b"", "the messages have no text"),
        (ask("song"), b"", "prompt_kind is 'song'"),
    ],
)
def test_what_is_no_prompt_is_refused(
    encoder: PromptEncoder, generate: Generate, prompt: bytes, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        encoder.encode(generate, prompt, now=0.0)


def test_a_chat_without_a_template_names_the_remedy(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, None, 8192)
    with pytest.raises(InvalidRequest, match="no chat template: send a prompt by generate"):
        encoder.encode(ask("chat", "hi"), b"", now=0.0)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(encoder: PromptEncoder) -> None:
    with pytest.raises(ContextLengthExceeded, match="at least 14546 tokens"):
        encoder.encode(ask("text"), b"a" * 320_000, now=0.0)
