"""A report for people: each metric by itself, with a bar per point."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmrt.cli.bench.plan import DECODE, THROUGHPUT, TTFT

_BAR_CELLS = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TITLES = {
    TTFT: "Time to first token, by input length (one request at a time)",
    DECODE: "Decode, one stream (from the first token on)",
    THROUGHPUT: "Throughput, all streams together",
}


def text_of(report: Mapping[str, Any]) -> str:
    """Conditions that all results share, the three metrics, then what to beware of."""
    results = report["results"]
    parts = [_conditions(results[0], report.get("memory_bandwidth_gb_per_s"))]
    for metric, title in _TITLES.items():
        lines = _lines([result for result in results if result["metric"] == metric])
        if lines:
            parts.append("\n".join([title, *lines]))
    if report["warnings"]:
        parts.append("\n".join(f"! {warning}" for warning in report["warnings"]))
    return "\n\n".join(parts)


def bar(value: float, most: float, cells: int = _BAR_CELLS) -> str:
    """A bar of `cells` cells for `most`, to an eighth of a cell."""
    eighths = round(8 * cells * value / most) if most > 0 else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _conditions(result: Mapping[str, Any], bandwidth: Mapping[str, float] | None) -> str:
    machine = result["machine"]
    lines = [
        f"{result['model']}, {result['quantization']} (KV {result['kv_cache_dtype']}), "
        f"{result['layout']} ({result['workers']}), threads {result['threads']}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['features']}",
    ]
    if bandwidth is None:
        lines.append("no roofline: name the file of the model by --model")
    else:
        before, after = bandwidth["before"], bandwidth["after"]
        lines.append(f"memory reads {before:.1f} GB/s before, {after:.1f} GB/s after")
    if "roofline_note" in result:
        lines.append(f"no roofline: {result['roofline_note']}")
    return "\n".join(lines)


def _lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    values = [result[result["headline"]] for result in results]
    most = max([value for value in values if value is not None], default=0.0)
    lines = []
    for result, value in zip(results, values, strict=True):
        lines.append(f"  {_cells(result, value)}  {bar(value or 0.0, most)}".rstrip())
        lines += [f"  {'':14}{line}" for line in _details(result)]
    return lines


def _cells(result: Mapping[str, Any], value: float | None) -> str:
    unit = "ms" if result["metric"] == TTFT else "tokens/s"
    figure = "-" if value is None else f"{value:.1f}"
    return f"{_point(result):<14}{figure:>10} {unit:<8} {_spread(result):<20} {_bound(result):<14}"


def _point(result: Mapping[str, Any]) -> str:
    if result["metric"] == TTFT:
        return f"{result['input_len']} tokens"
    if result["metric"] == DECODE:
        return f"{result['input_len']} + {result['output_len']}"
    if result["max_concurrency"] is None:
        return f"{result['request_rate']:g} req/s"
    streams = result["max_concurrency"]
    return f"{streams} stream{'s' if streams > 1 else ''}"


def _spread(result: Mapping[str, Any]) -> str:
    values = result["repeats"]
    return f"({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""


def _bound(result: Mapping[str, Any]) -> str:
    bound = result.get("roofline")
    return f"roofline {100 * bound['fraction']:.1f} %" if bound else ""


def _details(result: Mapping[str, Any]) -> list[str]:
    latencies = []
    for name in ("ttft", "itl"):
        median, p99 = result[f"median_{name}_ms"], result[f"p99_{name}_ms"]
        if median is not None:
            latencies.append(f"{name.upper()} p50 {median:.1f} p99 {p99:.1f} ms")
    facts = [", ".join(latencies)] if latencies else []
    if result["request_goodput"] is not None:
        limits = " ".join(f"{k}:{v:g}" for k, v in result["goodput_limits_ms"].items())
        facts.append(
            f"{result['request_goodput']:.2f} of {result['request_throughput']:.2f} requests/s "
            f"keep {limits}"
        )
    if result["python_share"] is not None:
        facts.append(f"Python {100 * result['python_share']:.1f} % of a step")
    if result["draft_acceptance_rate"] is not None:
        facts.append(f"{100 * result['draft_acceptance_rate']:.1f} % of drafted tokens accepted")
    return facts
