"""Sampling parameters and their limits: one check, used by the SDK and by workers."""

import math

import msgspec

from llmrt.wire.errors import InvalidRequest, shown

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1
# Above any context; a smaller limit is the model's and is checked by the worker.
MAX_TOKENS = 1 << 24


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when to stop.

    `max_tokens` None means up to the end of the context. `temperature` 0 is greedy. `top_k` 0
    and -1 mean no limit. A request without a `seed` is given one by the SDK, so that a second
    try draws the same tokens. `logprobs` is the number of alternatives to report per token.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


def check_sampling(params: SamplingParams) -> None:
    """Raise `InvalidRequest` that names the first field out of range, its value and the range."""
    _whole("max_tokens", params.max_tokens, 1, MAX_TOKENS)
    _whole("min_tokens", params.min_tokens, 0, MAX_TOKENS)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}: "
            "lower min_tokens or raise max_tokens"
        )
    _number("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _whole("top_k", params.top_k, -1, MAX_TOKENS)
    _number("top_p", params.top_p, 0.0, 1.0, above_low=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("repetition_penalty", params.repetition_penalty, 0.0, 10.0, above_low=True)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _count("logit_bias", params.logit_bias, MAX_LOGIT_BIAS)
    for token_id, bias in params.logit_bias.items():
        _whole("logit_bias key", token_id, 0, 2**32 - 1)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    _whole("seed", params.seed, 0, MAX_SEED)
    _count("stop", params.stop, MAX_STOP_STRINGS)
    for text in params.stop:
        if not text:
            raise InvalidRequest("stop holds an empty string: leave it out, or give its text")
        if len(text[: MAX_STOP_BYTES + 1].encode(errors="surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequest(
                f"a stop string of {len(text)} characters is too long: "
                f"at most {MAX_STOP_BYTES} bytes are allowed"
            )
    _count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS)
    for token_id in params.stop_token_ids:
        _whole("stop_token_ids", token_id, 0, 2**32 - 1)
    _whole("logprobs", params.logprobs, 0, MAX_LOGPROBS)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            f"{name} is {shown(value)}: a whole number from {low} to {high} is needed"
        )


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        in_range = low < value <= high if above_low else low <= value <= high
        if in_range:
            return
    bound = "above" if above_low else "from"
    raise InvalidRequest(
        f"{name} is {shown(value)}: a number {bound} {low:g} to {high:g} is needed"
    )


def _count(name: str, values: "tuple[object, ...] | dict[int, float]", most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{name} has {len(values)} entries: at most {most} are allowed")
