"""The extras of a step row: log probabilities of its tokens, as msgpack."""

from collections.abc import Sequence

import msgpack

from llmrt.engine.batch import Logprobs


def encode_extras(logprobs: Sequence[Logprobs]) -> bytes:
    """Log probabilities of tokens: a list of [drawn, [[id, log probability], ...]] of each."""
    if not logprobs:
        return b""
    packed: bytes = msgpack.packb([[of.drawn, [list(pair) for pair in of.top]] for of in logprobs])
    return packed


def join_extras(first: bytes, then: bytes) -> bytes:
    """The extras of two rows of ours in one."""
    if not first:
        return then
    packed: bytes = msgpack.packb(msgpack.unpackb(first) + msgpack.unpackb(then))
    return packed
