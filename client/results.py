"""What callers get: the events of a stream, and the result at its end."""

from dataclasses import dataclass, field
from typing import TypeAlias

from llmrt.wire.errors import LlmrtError
from llmrt.wire.messages import Finished, PsReply, Usage, Welcome


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of the drawn token, and of the best alternatives as (id, log probability)."""

    drawn: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New tokens of a stream, and the text that became certain with them.

    `seq` is the sequence number of the first of `token_ids`, counted from 0. `text` may lag
    behind the tokens: half a character or half a stop string is held back. `logprobs` has one
    entry per token, or is None if none were asked for.
    """

    seq: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    `request_id` is in hex, as in logs. `finish_reason` is stop or length; `stop` is the stop
    string or token id that ended it. `timings_ms` has the time of every stage. `decode_worker`
    emitted the tokens, `prefill_worker` computed the prompt. Speculative decoding guessed
    `num_drafted` tokens, `num_accepted` of them rightly. `placement` says why the prompt was
    computed where it was, `placement_ms` the delays that were weighed for that, if they were.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings_ms: dict[str, float]
    decode_worker: str
    prefill_worker: str
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    placement: str = ""
    placement_ms: dict[str, float] = field(default_factory=dict)


Outcome: TypeAlias = Finished | PsReply | tuple[int, ...] | Welcome | LlmrtError
"""How a call ended; a tuple holds the token ids of a tokenized text."""
