"""Prompts and arrival times: functions of the seed, so that a load can be repeated exactly."""

import random
from collections.abc import Sequence

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUM_WORDS = 2000


def arrival_times(
    num_requests: int, rate: float, burstiness: float, *, seed: str
) -> tuple[float, ...]:
    """Seconds from the start until each request arrives, `rate` per second on average.

    Gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate; at shape 1
    that is the exponential distribution, and the arrivals are a Poisson process.
    """
    rng = random.Random(seed)  # noqa: S311  # not for secrets
    now = 0.0
    times = []
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return tuple(times)


def probe_text(seed: int) -> str:
    """Random words; the token ids that a tokenizer makes of them are valid in any prompt."""
    rng = random.Random(f"probe {seed}")  # noqa: S311
    return " ".join("".join(rng.choices(_LETTERS, k=rng.randint(1, 8))) for _ in range(_NUM_WORDS))


def make_prompt(token_ids: Sequence[int], length: int, *, seed: str) -> list[int]:
    """Random ids out of `token_ids`: two prompts differ from the first block on, so that no
    prefix of one is cached for the other."""
    return random.Random(seed).choices(token_ids, k=length)  # noqa: S311
