"""Whether a request can be served at all: plain functions of the worker's limits."""

from array import array

from llmrt.kvtransfer.layout import blocks_for
from llmrt.wire.errors import ContextLengthExceeded, InvalidRequest, OutOfBlocks
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams
from llmrt.workers.context import CoreSettings


def check_token_ids(settings: CoreSettings, params: SamplingParams) -> None:
    """Raise `InvalidRequest` if a parameter names a token that does not exist."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and max(ids) >= settings.vocab_size:
            raise InvalidRequest(
                f"{name} names token {max(ids)}; the vocabulary has ids 0 to "
                f"{settings.vocab_size - 1}"
            )


def max_length(settings: CoreSettings, prompt: "array[int]", max_tokens: int | None) -> int:
    """Tokens, prompt included, at which the request ends.

    Raises `InvalidRequest`, `ContextLengthExceeded` or `OutOfBlocks` if not even one token fits, or
    not as many as were asked for.
    """
    num_prompt, limit = len(prompt), settings.max_context
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty: give at least one token")
    if max(prompt) >= settings.vocab_size:
        raise InvalidRequest(
            f"prompt token {max(prompt)} is unknown; "
            f"the vocabulary has ids 0 to {settings.vocab_size - 1}"
        )
    if num_prompt + (max_tokens or 1) > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens or 'not set'}; "
            f"the context holds {limit}: shorten the prompt or lower max_tokens"
        )
    arena_tokens = settings.num_blocks * BLOCK_TOKENS
    if blocks_for(num_prompt + (max_tokens or 1)) > settings.num_blocks:
        raise OutOfBlocks(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens or 'not set'}; the "
            f"KV arena holds {arena_tokens}: lower them, or start the worker with a larger "
            "--kv-tokens"
        )
    return num_prompt + max_tokens if max_tokens else min(limit, arena_tokens)
