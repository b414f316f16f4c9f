"""Results: one per point, each stamped with all that decides its figures, and their report."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrt.cli.bench.metrics import (
    Trial,
    decode_rate,
    median_ttft_ms,
    output_rate,
    summarize,
)
from llmrt.cli.bench.plan import DECODE, THROUGHPUT, TTFT, BenchSettings, Point, label
from llmrt.cli.bench.roofline import ModelBytes, bytes_per_token, roofline
from llmrt.wire.errors import InvalidRequest

SCHEMA = "llmrt-bench/1"
# The one figure of each metric, and how it is made of one trial. They are never combined.
HEADLINES: dict[str, tuple[str, Callable[[Trial], float | None]]] = {
    TTFT: ("median_ttft_ms", median_ttft_ms),
    DECODE: ("decode_tokens_per_s", decode_rate),
    THROUGHPUT: ("output_throughput", output_rate),
}
CONDITIONS = (
    *("model", "quantization", "weight_bytes", "device", "dtype", "kv_cache_dtype"),
    *("layout", "workers", "transfer", "numerics_id", "threads", "machine"),
    *("speculative", "speculative_tokens", "cpu_family", "placement", "max_running"),
    *("step_tokens", "kv_tokens", "stream_interval_ms", "has_prefix_cache"),
    *("context", "input_len", "output_len", "max_concurrency", "request_rate", "burstiness"),
    *("num_prompts", "seed", "goodput_limits_ms", "is_prefix_cached"),
)
"""What must be equal before two results may be compared, and so is in each of them."""


def load_conditions(point: Point, settings: BenchSettings) -> dict[str, Any]:
    """`request_rate` is "inf" in a closed loop, `max_concurrency` None in an open one."""
    is_open = point.request_rate is not None
    return {
        "context": point.context,
        "input_len": point.input_len,
        "output_len": point.output_len,
        "max_concurrency": point.concurrency,
        "request_rate": point.request_rate if is_open else "inf",
        "burstiness": settings.burstiness if is_open else None,
        "num_prompts": point.num_prompts,
        "seed": settings.seed,
        "goodput_limits_ms": dict(settings.goodput),
    }


def make_result(
    point: Point,
    trials: Sequence[Trial],
    *,
    settings: BenchSettings,
    subject: Mapping[str, Any],
) -> dict[str, Any]:
    """`subject` has the conditions that are not those of the load. The roofline comes later."""
    figures = summarize(trials, settings.goodput)
    name, of_trial = HEADLINES[point.metric]
    values = [value for trial in trials if (value := of_trial(trial)) is not None]
    if point.metric == DECODE:
        figures[name] = statistics.median(values) if values else None
    result: dict[str, Any] = rounded(
        {
            "metric": point.metric,
            "headline": name,
            "repeats": values,
            **subject,
            **load_conditions(point, settings),
            "is_prefix_cached": figures["cached_tokens"] > 0,
            **figures,
        }
    )
    return result


def add_roofline(
    result: dict[str, Any], point: Point, model: ModelBytes, bandwidth: float, cache_bytes: int
) -> None:
    """The bound beside what was reached, or in `roofline_note` why there is none.

    An open loop is bound as if its fullest moment had lasted.
    """
    if model.weight_bytes <= cache_bytes:
        result |= {"roofline": None, "roofline_note": "the weights fit the last-level cache"}
        return
    if result["speculative"] != "off":
        note = "with drafts a step may give several tokens per stream"
        result |= {"roofline": None, "roofline_note": note}
        return
    reached = result[HEADLINES[point.metric][0]]
    if point.metric == TTFT and reached:
        reached = point.input_len / reached * 1e3
    streams = point.concurrency or max(1, result["max_concurrent_requests"])
    size = bytes_per_token(model, point, streams)
    result["roofline"] = rounded(roofline(size, bandwidth, reached))


def warnings_of(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before using the figures of one result."""
    name, found = label_of(result), []
    bound = result.get("roofline")
    if bound and not bound["is_credible"]:
        found.append(
            f"{name}: NOT CREDIBLE: {bound['fraction']:.2f} of what the memory allows "
            f"({bound['tokens_per_s']:.1f} of {bound['bound_tokens_per_s']:.1f} tokens/s)"
        )
    if result["failed"]:
        errors = ", ".join(f"{n} x {code}" for code, n in result["errors"].items())
        found.append(f"{name}: {result['failed']} requests failed ({errors})")
    if result["is_prefix_cached"]:
        found.append(
            f"{name}: {result['cached_tokens']} of {result['total_input_tokens']} prompt tokens "
            "came from the prefix cache: take another --seed"
        )
    return found


def make_report(
    results: Sequence[dict[str, Any]], about: Mapping[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    """One JSON object. The fields of an only result stand at the top as well, for scripts."""
    only = results[0] if len(results) == 1 else {}
    warnings = [*notes, *(line for result in results for line in warnings_of(result))]
    return {"schema": SCHEMA, **about, **only, "warnings": warnings, "results": list(results)}


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of a report; raises `InvalidRequest` for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise InvalidRequest(f"{path} is no report of llmrt bench ({SCHEMA})")
    results = report.get("results")
    if not isinstance(results, list) or not all(map(_is_result, results)):
        raise InvalidRequest(f"{path} has results that lack a condition or their headline")
    return results


def label_of(result: Mapping[str, Any]) -> str:
    keys = ("metric", "input_len", "max_concurrency", "request_rate")
    return label(*(result[key] for key in keys))


def rounded(value: Any) -> Any:
    """Floats to six digits, all the way down: the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _is_result(result: object) -> bool:
    if not isinstance(result, dict) or result.get("metric") not in HEADLINES:
        return False
    headline, repeats = result.get("headline"), result.get("repeats")
    return (
        headline == HEADLINES[result["metric"]][0]
        and _is_figure(result.get(headline, ""))
        and isinstance(repeats, list)
        and all(map(_is_figure, repeats))
        and all(name in result for name in CONDITIONS)
        and type(result["input_len"]) is int
    )


def _is_figure(value: object) -> bool:
    return value is None or type(value) in (int, float)
