"""From what a client sent to token ids. Runs off the loop: long texts take seconds."""

from array import array

from llmrt.models.chat_template import ChatTemplate
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import ContextLengthExceeded, InvalidRequest
from llmrt.wire.messages import Generate


class PromptEncoder:
    """Renders chats and tokenizes texts, refusing early what cannot fit `max_context`."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, max_context: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context = max_context

    def encode(
        self, generate: Generate, prompt: bytes, *, now: float, add_special: bool = True
    ) -> "array[int]":
        """Token ids of a text or chat. `now`, in seconds since 1970, is the time that a template
        may show. Raises `InvalidRequest` or `ContextLengthExceeded`.
        """
        if generate.prompt_kind == "chat":
            text, add_special = self._render(generate, now), False
        elif generate.prompt_kind == "text":
            text = _decode(prompt)
        else:
            raise InvalidRequest(
                f"prompt_kind is {generate.prompt_kind!r}: text, tokens or chat is needed"
            )
        at_least = self._tokenizer.min_tokens(text)
        if at_least >= self._max_context:
            raise ContextLengthExceeded(
                f"the prompt has at least {at_least} tokens; the context holds "
                f"{self._max_context}: shorten the prompt"
            )
        return self._tokenizer.encode(text, add_special=add_special)

    def _render(self, generate: Generate, now: float) -> str:
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: send a prompt by generate instead of a chat"
            )
        if not generate.messages:
            raise InvalidRequest("messages is empty: give at least one message")
        if not any(m.content for m in generate.messages):
            raise InvalidRequest("the messages have no text: give at least one token")
        messages = [{"role": m.role, "content": m.content} for m in generate.messages]
        return self._template.render(messages, add_generation_prompt=True, now=now)


def _decode(prompt: bytes) -> str:
    try:
        return prompt.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the prompt is not UTF-8: byte {error.start} is {prompt[error.start]:#04x}"
        ) from None
