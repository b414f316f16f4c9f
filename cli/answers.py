"""How an answer is shown: its text on stdout as it comes, then its numbers on stderr."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrt.client import AsyncClient, Result, Stream


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, and what its reader measured, in seconds from the request."""

    result: "Result"
    ttft_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens behind the first."""
        num_gaps = len(self.result.token_ids) - 1
        return num_gaps / max(self.total_s - self.ttft_s, 1e-9) if num_gaps > 0 else 0.0


def given(options: Mapping[str, object]) -> dict[str, Any]:
    """The options that were given; empty lists count as not given. Biases become a mapping."""
    found: dict[str, Any] = {n: value for n, value in options.items() if value not in (None, [])}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    return found


async def show(stream: "Stream", *, as_json: bool) -> Answer:
    """Write the text as it comes, or one JSON object at the end."""
    start = time.monotonic()
    first = None
    async with stream:
        async for event in stream:
            first = first or time.monotonic()
            if not as_json:
                write(event.text)
    end = time.monotonic()
    answer = Answer(stream.result, (first or end) - start, end - start)
    print(json.dumps(as_dict(answer)) if as_json else "", flush=True)
    return answer


def write(text: str) -> None:
    """To stdout at once, whatever its encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def as_dict(answer: Answer) -> dict[str, object]:
    import msgspec

    fields: dict[str, object] = msgspec.to_builtins(answer.result)
    return fields | {
        "ttft_ms": round(answer.ttft_s * 1e3, 3),
        "total_ms": round(answer.total_s * 1e3, 3),
        "tokens_per_s": round(answer.tokens_per_s, 2),
    }


def summary(answer: Answer) -> str:
    """One line of numbers: who did it, how much, how fast."""
    result = answer.result
    where = result.decode_worker
    if result.prefill_worker != result.decode_worker:
        where = f"prompt by {result.prefill_worker}, answer by {where}"
    usage = result.usage
    return (
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after "
        f"{answer.ttft_s * 1e3:.0f} ms, then {answer.tokens_per_s:.1f} tokens/s "
        f"({result.finish_reason}; {where})"
    )


async def has_chat_template(client: "AsyncClient") -> bool:
    """Whether the model can chat: a worker refuses to render a chat without a template."""
    from llmrt.wire.errors import InvalidRequest

    try:
        await client.tokenize([{"role": "user", "content": "hello"}])
    except InvalidRequest:
        return False
    return True
