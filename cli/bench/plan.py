"""What to measure: three metrics, each a list of points, and never one number for them all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrt.kvtransfer.layout import blocks_for
from llmrt.wire.errors import ConfigError
from llmrt.wire.kv import BLOCK_TOKENS

TTFT, DECODE, THROUGHPUT = METRICS = ("ttft", "decode", "throughput")
ALL = "all"
LIMITS = ("ttft", "itl", "tpot", "e2el")
INPUT_LENGTHS = (128, 512, 2048)
CONCURRENCY = (1, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A load of `num_prompts` equal requests.

    Closed loop: `concurrency` of them run at any time. Open loop: `concurrency` is None, and they
    arrive at `request_rate` per second whether or not earlier ones have ended.
    """

    metric: str
    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int | None = 1
    request_rate: float | None = None

    @property
    def context(self) -> int:
        """Tokens of a request at its end."""
        return self.input_len + self.output_len

    @property
    def label(self) -> str:
        return label(self.metric, self.input_len, self.concurrency, self.request_rate)


def label(metric: str, input_len: int, concurrency: int | None, request_rate: Any) -> str:
    """What is measured, in words."""
    if metric == TTFT:
        return f"ttft of {input_len} tokens"
    if metric == DECODE:
        return "decode of one stream"
    if concurrency is None:
        return f"throughput at {request_rate:g} requests/s"
    return f"throughput of {concurrency} stream{'s' if concurrency > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What was asked for. `goodput` has limits in ms by the names of `LIMITS`.

    `input_lengths` are for ttft, `prompt_tokens` and `output_tokens` for the other two, and
    `concurrency` or `request_rates` for throughput. `burstiness` is the shape of the gamma
    distribution of the time between two arrivals: 1 makes them a Poisson process, less comes in
    bursts, more is even. Every point is measured `repeats` times.
    """

    metric: str = ALL
    input_lengths: tuple[int, ...] = INPUT_LENGTHS
    prompt_tokens: int = 128
    output_tokens: int = 128
    concurrency: tuple[int, ...] | None = None
    request_rates: tuple[float, ...] = ()
    burstiness: float = 1.0
    num_prompts: int | None = None
    repeats: int = 3
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)


def make_points(settings: BenchSettings) -> list[Point]:
    """In the order in which they are measured; raises `ConfigError` naming the flag at fault."""
    _check(settings)
    wanted = METRICS if settings.metric == ALL else (settings.metric,)
    points: list[Point] = []
    if TTFT in wanted:
        num_prompts = settings.num_prompts or 4
        points += [
            Point(metric=TTFT, input_len=length, output_len=1, num_prompts=num_prompts)
            for length in settings.input_lengths
        ]
    lengths = {"input_len": settings.prompt_tokens, "output_len": settings.output_tokens}
    if DECODE in wanted:
        points.append(Point(metric=DECODE, num_prompts=settings.num_prompts or 1, **lengths))
    if THROUGHPUT in wanted and settings.request_rates:
        points += [
            Point(
                metric=THROUGHPUT,
                num_prompts=settings.num_prompts or 32,
                concurrency=None,
                request_rate=rate,
                **lengths,
            )
            for rate in settings.request_rates
        ]
    elif THROUGHPUT in wanted:
        points += [
            Point(
                metric=THROUGHPUT,
                num_prompts=settings.num_prompts or max(4, 2 * streams),
                concurrency=streams,
                **lengths,
            )
            for streams in settings.concurrency or CONCURRENCY
        ]
    return points


def kv_tokens_for(points: list[Point]) -> int:
    """Tokens that an arena must hold so that no request of any point waits for room."""
    return max(
        # A block more: the one that the next token will need.
        (point.concurrency or point.num_prompts) * (blocks_for(point.context) + 1) * BLOCK_TOKENS
        for point in points
    )


def _check(settings: BenchSettings) -> None:
    if settings.metric not in (*METRICS, ALL):
        raise ConfigError(
            f"--metric is {settings.metric!r}: one of {', '.join((*METRICS, ALL))} is needed"
        )
    numbers = {
        "--input-lengths": min(settings.input_lengths, default=0),
        "--prompt-tokens": settings.prompt_tokens,
        "--concurrency": min(settings.concurrency or (1,)),
        "--num-prompts": 1 if settings.num_prompts is None else settings.num_prompts,
        "--repeats": settings.repeats,
    }
    for flag, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{flag} is {number}: at least 1 is needed")
    if settings.output_tokens < 2:
        raise ConfigError(
            f"--output-tokens is {settings.output_tokens}: at least 2 are needed, since a rate "
            "is measured from the first token on"
        )
    if settings.metric == DECODE and settings.concurrency not in (None, (1,)):
        raise ConfigError(
            "--metric decode is about one stream: for more, use --metric throughput --concurrency"
        )
    if settings.request_rates and settings.concurrency is not None:
        raise ConfigError(
            "--request-rate is an open loop, --concurrency a closed one: give one of them"
        )
    for rate in settings.request_rates:
        _check_positive("--request-rate", rate)
    _check_positive("--burstiness", settings.burstiness)
    for name, limit_ms in settings.goodput.items():
        if name not in LIMITS or not _is_positive(limit_ms):
            raise ConfigError(
                f"--goodput has {name}:{limit_ms:g}: a limit in ms above 0 for one of "
                f"{', '.join(LIMITS)} is needed"
            )


def _check_positive(flag: str, number: float) -> None:
    if not _is_positive(number):
        raise ConfigError(f"{flag} is {number:g}: a finite number above 0 is needed")


def _is_positive(number: float) -> bool:
    return math.isfinite(number) and number > 0
