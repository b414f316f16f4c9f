"""The extras of a step row: log probabilities of its tokens, as msgpack."""

import msgpack

from llmrt.engine.batch import Logprobs


def encode_extras(logprobs: Logprobs | None) -> bytes:
    """One token's log probabilities: a list of one [drawn, [[id, log probability], ...]]."""
    if logprobs is None:
        return b""
    packed: bytes = msgpack.packb([[logprobs.drawn, [list(pair) for pair in logprobs.top]]])
    return packed


def join_extras(first: bytes, then: bytes) -> bytes:
    """The extras of two rows of ours in one."""
    if not first:
        return then
    packed: bytes = msgpack.packb(msgpack.unpackb(first) + msgpack.unpackb(then))
    return packed
