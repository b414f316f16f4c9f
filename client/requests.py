"""Checks what a caller wants and turns it into frames, before anything is sent."""

import difflib
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from llmrt.client.events import Submit
from llmrt.wire.arrays import U32_BYTES, pack_u32
from llmrt.wire.envelope import MAX_BODY_BYTES, MAX_RAW_BYTES, encode_body
from llmrt.wire.errors import InvalidRequest, MessageTooLarge, shown
from llmrt.wire.ids import REQUEST_ID_BYTES, RequestId
from llmrt.wire.messages import GENERATE, TOKENIZE, ChatMessage, Generate, Tokenize
from llmrt.wire.sampling import SamplingParams, check_sampling

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Iterable[ChatMessage | Mapping[str, str]]


class Options(TypedDict, total=False):
    """Keywords of every generation: those of a call, then the fields of `SamplingParams`.

    `deadline_s` counts from the call. A higher `priority` runs first. `request_id` is 16 bytes
    or 32 hex digits; without one a random id is drawn. `stop` may be one string.
    """

    deadline_s: float | None
    priority: int
    model: str | None
    request_id: str | bytes | None

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None


_SAMPLING_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_MAX_PRIORITY = 1 << 31
_MAX_MODEL_LENGTH = 1024
# A year: beyond it nobody means a number.
_MAX_DEADLINE_S = 366 * 86400


def make_generate(
    prompt: Prompt | None, messages: Messages | None, options: Options, default_deadline_s: float
) -> Submit:
    """The request for a prompt or for a chat; raises `InvalidRequest` or `MessageTooLarge`."""
    keywords: dict[str, Any] = dict(options)
    deadline_s = keywords.pop("deadline_s", None)
    priority = keywords.pop("priority", 0)
    model = keywords.pop("model", None)
    request_id = keywords.pop("request_id", None)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MAX_PRIORITY:
        raise InvalidRequest(f"priority is {shown(priority)}: a whole number of 32 bits is needed")
    check_model_name(model)
    sampling = make_sampling(keywords)
    if messages is not None:
        turns = make_messages(messages)
        generate = Generate(
            prompt_kind="chat", messages=turns, sampling=sampling, model=model, priority=priority
        )
        frames = (_body(generate), b"")
    else:
        kind, raw = encode_prompt(prompt)
        generate = Generate(prompt_kind=kind, sampling=sampling, model=model, priority=priority)
        frames = (_body(generate), raw)
    return Submit(
        parse_request_id(request_id),
        GENERATE,
        check_deadline(default_deadline_s if deadline_s is None else deadline_s),
        frames,
    )


def make_tokenize(
    prompt: str | Messages, add_special: bool, deadline_s: float, model: str | None = None
) -> Submit:
    """The request for the token ids of a text, or of a chat behind its template."""
    check_model_name(model)
    if isinstance(prompt, str):
        tokenize, raw = Tokenize(add_special=add_special, model=model), _utf8(prompt)
    else:
        turns, raw = make_messages(prompt), b""
        tokenize = Tokenize(messages=turns, add_special=add_special, model=model)
    return Submit(new_request_id(), TOKENIZE, deadline_s, (_body(tokenize), raw))


def make_sampling(keywords: Mapping[str, Any]) -> SamplingParams:
    """Checked parameters; one that draws at random gets a seed, so that a retry draws the same."""
    fields = {}
    for name, value in keywords.items():
        if name not in _SAMPLING_TYPES:
            raise InvalidRequest(_unknown_keyword(name))
        is_one_stop = name == "stop" and isinstance(value, str)
        try:
            fields[name] = msgspec.convert(
                (value,) if is_one_stop else value, _SAMPLING_TYPES[name]
            )
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{name} is {shown(value)}: {error}") from None
    params = SamplingParams(**fields)
    check_sampling(params)
    if params.temperature > 0 and params.seed is None:
        params = msgspec.structs.replace(params, seed=secrets.randbits(64))
    return params


def encode_prompt(prompt: object) -> tuple[str, bytes]:
    """Prompt kind and raw frame. Sizes are checked first: a huge prompt is never copied."""
    if isinstance(prompt, str):
        raw = _utf8(prompt)
        kind = "text"
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        raw = _pack_ids(prompt)
        kind = "tokens"
    else:
        raise InvalidRequest(
            f"prompt is of type {type(prompt).__name__}: a str or a sequence of token ids is "
            "needed (of an array: its tolist())"
        )
    if not raw:
        raise InvalidRequest("the prompt is empty: give at least one character or token id")
    return kind, raw


def make_messages(messages: object) -> tuple[ChatMessage, ...]:
    """The turns of a chat, from `ChatMessage`s or from mappings of `role` and `content`."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"messages is of type {type(messages).__name__}: a list of "
            '{"role": ..., "content": ...} is needed'
        )
    turns = tuple(_message(i, message) for i, message in enumerate(messages))
    if not turns:
        raise InvalidRequest("messages is empty: give at least one turn")
    size = sum(len(turn.role) + len(turn.content) for turn in turns)
    if size > MAX_BODY_BYTES:
        raise MessageTooLarge(
            f"messages of {size} characters; at most {MAX_BODY_BYTES} bytes are allowed: "
            "leave out old turns"
        )
    return turns


def parse_request_id(value: object) -> RequestId:
    """An id of the caller's, or a new one for None."""
    if value is None:
        return new_request_id()
    raw = value
    if isinstance(value, str) and len(value) <= 2 * REQUEST_ID_BYTES:
        try:
            raw = bytes.fromhex(value)
        except ValueError:
            raw = b""
    if not isinstance(raw, bytes) or len(raw) != REQUEST_ID_BYTES:
        raise InvalidRequest(
            f"request_id is {shown(value)}: {REQUEST_ID_BYTES} bytes or "
            f"{2 * REQUEST_ID_BYTES} hex digits are needed"
        )
    return RequestId(raw)


def new_request_id() -> RequestId:
    return RequestId(secrets.token_bytes(REQUEST_ID_BYTES))


def check_model_name(model: object) -> None:
    if model is not None and not (isinstance(model, str) and len(model) <= _MAX_MODEL_LENGTH):
        raise InvalidRequest(
            f"model is {shown(model)}: None or a name of at most {_MAX_MODEL_LENGTH} characters "
            "is needed"
        )


def check_deadline(deadline_s: object) -> float:
    is_number = not isinstance(deadline_s, bool)
    if is_number and isinstance(deadline_s, int | float) and 0 < deadline_s <= _MAX_DEADLINE_S:
        return float(deadline_s)
    raise InvalidRequest(
        f"deadline_s is {shown(deadline_s)}: a number of seconds above 0, at most "
        f"{_MAX_DEADLINE_S}, is needed"
    )


def _unknown_keyword(name: str) -> str:
    close = difflib.get_close_matches(name, Options.__annotations__, n=1)
    hint = (
        f": did you mean {close[0]}?"
        if close
        else f": known are {', '.join(sorted(Options.__annotations__))}"
    )
    return f"unknown keyword {name}{hint}"


def _utf8(text: str) -> bytes:
    if len(text) <= MAX_RAW_BYTES:  # a character is a byte at least
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt has a lone surrogate {text[error.start]!r} at character "
                f"{error.start}: it is no valid text; remove it"
            ) from None
        if len(raw) <= MAX_RAW_BYTES:
            return raw
    raise MessageTooLarge(
        f"prompt of {len(text)} characters; at most {MAX_RAW_BYTES} bytes are allowed: shorten it"
    )


def _pack_ids(token_ids: Sequence[object]) -> bytes:
    most = MAX_RAW_BYTES // U32_BYTES
    if len(token_ids) > most:
        raise MessageTooLarge(
            f"prompt of {len(token_ids)} token ids; at most {most} are allowed: shorten it"
        )
    try:
        return pack_u32(array("I", token_ids))  # type: ignore[arg-type]  # checked by array
    except (TypeError, OverflowError, ValueError):
        for i, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or not 0 <= token_id < 1 << 32:
                raise InvalidRequest(
                    f"prompt[{i}] is {shown(token_id)}: a token id from 0 to 2**32 - 1 is needed"
                ) from None
        raise


def _message(i: int, message: object) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    fields = dict(message) if isinstance(message, Mapping) else {}
    if fields.keys() != {"role", "content"}:
        raise InvalidRequest(
            f'messages[{i}] is {shown(message)}: {{"role": ..., "content": ...}} is needed'
        )
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"messages[{i}][{name!r}] is {shown(value)}: a str is needed")
    return ChatMessage(**fields)


def _body(message: Generate | Tokenize) -> bytes:
    try:
        return encode_body(message)
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a string of the request has a lone surrogate at character {error.start}: "
            "it is no valid text; remove it"
        ) from None
