"""Results as a run makes them, of requests whose times are given."""

from typing import Any

from llmrt.cli.bench.metrics import Arrival, Record, Trial
from llmrt.cli.bench.plan import BenchSettings, Point, make_points
from llmrt.cli.bench.result import make_result

SUBJECT: dict[str, Any] = {
    "model": "tiny",
    "quantization": "Q4_0",
    "weight_bytes": 64_000_000,
    "device": "torch",
    "dtype": "auto",
    "kv_cache_dtype": "bf16",
    "layout": "colocated",
    "workers": "1 both",
    "transfer": "none",
    "numerics_id": "cpu-avx2",
    "threads": 2,
    "speculative": "off",
    "speculative_tokens": 0,
    "cpu_family": "auto",
    "placement": "auto",
    "max_running": 32,
    "step_tokens": 512,
    "kv_tokens": 4096,
    "stream_interval_ms": 0,
    "has_prefix_cache": True,
    "machine": {"cpu": "EPYC", "cores": 2, "features": "avx2", "memory_gib": 24},
}


def make_trial(point: Point, *, ttft_s: float, itl_s: float, cached_tokens: int = 0) -> Trial:
    """One request after another, each with the same times."""
    records = []
    now = 0.0
    for _ in range(point.num_prompts):
        arrivals = [Arrival(now + ttft_s + i * itl_s, 1) for i in range(point.output_len)]
        records.append(Record(now, tuple(arrivals), point.input_len, cached_tokens))
        now = arrivals[-1].at_s
    return Trial(tuple(records), now)


def make_results(
    settings: BenchSettings,
    *,
    ttft_s: float = 0.1,
    itls_s: tuple[float, ...] = (0.05,),
    cached_tokens: int = 0,
    **subject: Any,
) -> list[dict[str, Any]]:
    """The results of some settings; `itls_s` has one time between tokens per repeat."""
    return [
        make_result(
            point,
            [
                make_trial(point, ttft_s=ttft_s, itl_s=itl_s, cached_tokens=cached_tokens)
                for itl_s in itls_s
            ],
            settings=settings,
            subject=SUBJECT | subject,
        )
        for point in make_points(settings)
    ]
