"""What the records of requests say: pure functions, with the field names of `vllm bench serve`.

A *trial* is one run of a load. Latencies are pooled over all trials of a point; the headline
figures are given per trial as well, since their spread is that of the machine.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from llmrt.wire.errors import LlmrtError


class Arrival(NamedTuple):
    """Tokens that came together, seconds after the start of the trial."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its reader saw it, in seconds after the start of the trial.

    `start_s` is when it was sent; in an open loop, when it was due, so that a late load
    generator makes figures worse and not better. `error` is how it failed.
    """

    start_s: float
    arrivals: tuple[Arrival, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: LlmrtError | None = None
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def end_s(self) -> float:
        return self.arrivals[-1].at_s if self.arrivals else self.start_s

    @property
    def output_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0].at_s - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def itls_s(self) -> list[float]:
        """Gaps between arrivals."""
        return [later.at_s - earlier.at_s for earlier, later in pairwise(self.arrivals)]

    @property
    def decode_tokens(self) -> int:
        """Tokens behind the first arrival, which came in `decode_s`."""
        return self.output_tokens - self.arrivals[0].num_tokens

    @property
    def decode_s(self) -> float:
        return self.end_s - self.arrivals[0].at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token behind the first arrival; None if there is no such token."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else None


@dataclass(frozen=True, slots=True)
class Trial:
    """`python_share`: of the critical path of the workers' steps, None if they do not tell."""

    records: tuple[Record, ...]
    duration_s: float
    python_share: float | None = None

    @property
    def completed(self) -> list[Record]:
        return [record for record in self.records if record.error is None]


def summarize(
    trials: Sequence[Trial], limits_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """All figures of one point; those that no completed request gives are None."""
    records = [record for trial in trials for record in trial.records]
    done = [record for record in records if record.error is None]
    duration_s = sum(trial.duration_s for trial in trials)
    num_input = sum(record.prompt_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    num_drafted = sum(record.num_drafted for record in done)
    num_accepted = sum(record.num_accepted for record in done)
    shares = [trial.python_share for trial in trials if trial.python_share is not None]
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": dict(Counter(r.error.error_code for r in records if r.error is not None)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "request_throughput": len(done) / duration_s,
        "request_goodput": (
            sum(is_good(record, limits_ms) for record in done) / duration_s if limits_ms else None
        ),
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": max(max_concurrent(trial.records) for trial in trials),
        **_latencies("ttft", [record.ttft_s for record in done]),
        **_latencies("tpot", [record.tpot_s for record in done if record.tpot_s is not None]),
        **_latencies("itl", [gap for record in done for gap in record.itls_s]),
        **_latencies("e2el", [record.e2el_s for record in done]),
        "python_share": statistics.fmean(shares) if shares else None,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
    }


def decode_rate(trial: Trial) -> float | None:
    """Tokens per second behind the first token of each request: without the time of prompts."""
    done = trial.completed
    seconds = sum(record.decode_s for record in done)
    return sum(record.decode_tokens for record in done) / seconds if seconds > 0 else None


def output_rate(trial: Trial) -> float | None:
    """Tokens per second of all requests together, from the first request to the last token."""
    return sum(record.output_tokens for record in trial.completed) / trial.duration_s


def median_ttft_ms(trial: Trial) -> float | None:
    ttfts = [record.ttft_s for record in trial.completed]
    return statistics.median(ttfts) * 1e3 if ttfts else None


def is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request kept every limit; that of `itl` holds for its longest gap."""
    values_s = {
        "ttft": record.ttft_s,
        "itl": max(record.itls_s, default=0.0),
        "tpot": record.tpot_s or 0.0,
        "e2el": record.e2el_s,
    }
    return all(values_s[name] * 1e3 <= limit for name, limit in limits_ms.items())


def max_concurrent(records: Sequence[Record]) -> int:
    """Most requests that ran at a time; one that starts when another ends does not meet it."""
    changes = [(record.start_s, 1) for record in records]
    changes += [(record.end_s, -1) for record in records]
    most = running = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value, between the two nearest ranks by their distance (numpy's linear)."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _latencies(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    if not values_s:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p90", "p99")}
    return {
        f"mean_{name}_ms": statistics.fmean(values_s) * 1e3,
        f"median_{name}_ms": statistics.median(values_s) * 1e3,
        f"std_{name}_ms": statistics.pstdev(values_s) * 1e3,
        f"p90_{name}_ms": percentile(values_s, 90) * 1e3,
        f"p99_{name}_ms": percentile(values_s, 99) * 1e3,
    }
