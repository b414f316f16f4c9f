"""What every engine is asked to do, and how it is timed.

An engine's file makes a `Generate` from a model and hands it to `measure`, which runs the wanted
metrics and prints one JSON object per line: `{"version": ...}` first, then
`{"metric": ..., "value": ...}`. Each engine runs this file in an environment of its own, so it
needs nothing beyond the standard library.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Prompt = list[int]


class Clock:
    """Notes when tokens come. It starts when it is made; `rest` is what follows `first_s`.

    `first_s` is the time until every stream has its first token, `rest_s` that from there to the
    last token, and `rest_tokens` the number of tokens in between, over all streams.
    """

    def __init__(self, num_streams: int) -> None:
        self.rest_tokens = 0
        self.first_s = self.rest_s = 0.0
        self._streams = range(num_streams)
        self._waiting = set(self._streams)
        self._started = time.perf_counter()

    def token(self, stream: int) -> None:
        elapsed_s = time.perf_counter() - self._started
        if not self._waiting:
            self.rest_tokens += 1
            self.rest_s = elapsed_s - self.first_s
            return
        self._waiting.discard(stream)
        if not self._waiting:
            self.first_s = elapsed_s

    def step(self) -> None:
        """One token for every stream."""
        for stream in self._streams:
            self.token(stream)


Generate = Callable[[Sequence[Prompt], int], Clock]
"""Runs these prompts at once, greedily, to exactly so many new tokens each.

The clock starts when the engine has the prompts as token ids. Prompts are of one length.
"""


@dataclass(frozen=True)
class Metric:
    """`kind` is start, decode, prefill or memory."""

    name: str
    kind: str
    unit: str
    streams: int
    prompt_tokens: int
    new_tokens: int

    @property
    def is_rate(self) -> bool:
        """Higher is better; of the others, lower is."""
        return self.kind in ("decode", "prefill")


METRICS = (
    Metric("first_token", "start", "s", 1, 32, 1),
    Metric("decode", "decode", "tok/s", 1, 32, 128),
    Metric("decode_8", "decode", "tok/s", 8, 32, 128),
    Metric("decode_16", "decode", "tok/s", 16, 32, 128),
    Metric("prefill_512", "prefill", "tok/s", 1, 512, 1),
    Metric("prefill_2048", "prefill", "tok/s", 1, 2048, 1),
    Metric("decode_at_128", "decode", "tok/s", 1, 128, 33),
    Metric("decode_at_4096", "decode", "tok/s", 1, 4096, 33),
    Metric("memory", "memory", "MiB", 8, 512, 64),
)
BY_NAME = {metric.name: metric for metric in METRICS}
MAX_KV_TOKENS = 8 * (512 + 64)
"""The most that one metric needs; engines that reserve room for the KV cache reserve this."""

# Prompts are cut to this before the call that counts: it is there to set up threads and kernels.
_WARM_UP_TOKENS = 512
# Ordinary tokens in the vocabulary of every Llama.
_TOKEN_IDS = range(300, 30_000)


@dataclass(frozen=True)
class Options:
    model: str
    threads: int
    metrics: tuple[str, ...]
    seed: int
    started_at: float


def parse_options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="file or folder in the engine's own format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--metrics", nargs="+", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--started-at", type=float, default=time.monotonic(), help="monotonic time of the start"
    )
    args = parser.parse_args()
    return Options(args.model, args.threads, tuple(args.metrics), args.seed, args.started_at)


def measure(options: Options, version: str, generate: Generate) -> None:
    """Run the metrics in their order and print each as soon as it is there."""
    _print(version=version)
    rng = random.Random(options.seed)
    generate(_prompts(rng, 1, BY_NAME["first_token"].prompt_tokens), 1)
    first_token_s = time.monotonic() - options.started_at
    for name in options.metrics:
        metric = BY_NAME[name]
        if metric.kind == "start":
            value = first_token_s
        else:
            length = min(metric.prompt_tokens, _WARM_UP_TOKENS)
            generate(_prompts(rng, metric.streams, length), min(metric.new_tokens, 4))
            prompts = _prompts(rng, metric.streams, metric.prompt_tokens)
            value = _rate(metric, generate(prompts, metric.new_tokens))
        _print(metric=name, value=value)


def _prompts(rng: random.Random, num_streams: int, length: int) -> list[Prompt]:
    return [rng.choices(_TOKEN_IDS, k=length) for _ in range(num_streams)]


def _rate(metric: Metric, clock: Clock) -> float:
    """Tokens per second; of `memory`, which the caller watches from outside, too."""
    if metric.kind == "prefill":
        return metric.streams * metric.prompt_tokens / clock.first_s
    if not clock.rest_tokens:
        sys.exit(f"error: {metric.name}: no token came after the first of every stream")
    return clock.rest_tokens / clock.rest_s


def _print(**entry: object) -> None:
    print(json.dumps(entry), flush=True)
