"""From the values of all repetitions to medians, ratios and a table. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from engines import BY_NAME as ENGINES
from engines import SHIPPED
from workload import BY_NAME as METRICS

Values = Mapping[str, Sequence[float | None]]
"""Per engine, one value for each repetition; None where it failed."""


def summary(values: Values, metric: str) -> dict[str, dict[str, Any]]:
    """Per engine the median and range of a metric, and how much better it is than others.

    `over_best` compares with the best of the other projects' engines, `over_shipped` with
    llama.cpp on the same file: medians of the ratios within each repetition, above 1 if better.
    """
    present = {name: [v for v in row if v is not None] for name, row in values.items()}
    medians = {name: statistics.median(row) for name, row in present.items() if row}
    is_rate = METRICS[metric].is_rate
    pick = max if is_rate else min
    peers = [name for name in medians if not ENGINES[name].is_ours]
    best = pick(peers, key=medians.__getitem__, default=None)
    return {
        name: {
            "median": median,
            "low": min(present[name]),
            "high": max(present[name]),
            "best": best,
            "over_best": _ratio(values, name, best, is_rate=is_rate),
            "over_shipped": _ratio(values, name, SHIPPED, is_rate=is_rate),
        }
        for name, median in medians.items()
    }


def bandwidth_shares(
    runs: Sequence[Mapping[str, Any]], metric: str, sizes: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Per engine in `sizes` the share of memory bandwidth that decoding one stream took.

    The median over repetitions of bytes read per token times tokens/s, over the mean of the
    bandwidth probed before and after. `sizes` has the bytes that a token reads: `weights`, and `kv`
    for each token of context. Other metrics have no shares.
    """
    asked = METRICS[metric]
    if asked.kind != "decode" or asked.streams != 1:
        return {}
    context = asked.prompt_tokens + asked.new_tokens / 2
    shares: dict[str, list[float]] = {}
    for run in runs:
        size, rate = sizes.get(run["engine"]), run["values"].get(metric)
        if size is not None and rate is not None:
            probed = 1e9 * (run["gb_per_s_before"] + run["gb_per_s_after"]) / 2
            share = (size["weights"] + size["kv"] * context) * rate / probed
            shares.setdefault(run["engine"], []).append(share)
    return {name: round(statistics.median(row), 3) for name, row in shares.items()}


def table(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"{machine['cpu']}, {report['threads']} of {machine['cores']} cores, "
        f"{' '.join(machine['isa'])}",
        *(f"{name}: {version}" for name, version in report["versions"].items()),
    ]
    for model, result in report["models"].items():
        lines += ["", f"{model}, {result['repetitions']} repetitions", _conditions(result)]
        for metric, engines in result["metrics"].items():
            lines += ["", f"{metric} [{METRICS[metric].unit}]"]
            lines += [_line(name, entry) for name, entry in engines.items()]
        lines += [f"failed: {failure}" for failure in result["failures"]]
    return "\n".join(lines)


def _ratio(values: Values, name: str, other: str | None, *, is_rate: bool) -> float | None:
    pairs = zip(values[name], values.get(other or "", []), strict=False)
    ratios = [a / b if is_rate else b / a for a, b in pairs if a is not None and b is not None]
    return round(statistics.median(ratios), 3) if ratios else None


def _conditions(result: Mapping[str, Any]) -> str:
    runs = result["runs"]
    bandwidths = [run[end] for run in runs for end in ("gb_per_s_before", "gb_per_s_after")]
    others = [run["others_cores"] for run in runs]
    return (
        f"read bandwidth {min(bandwidths):.1f} to {max(bandwidths):.1f} GB/s, others' load "
        f"{min(others):.2f} to {max(others):.2f} cores (median {statistics.median(others):.2f})"
    )


def _line(name: str, entry: Mapping[str, Any]) -> str:
    cells = [
        f"  {name:16}{_number(entry['median']):>9}",
        f"({_number(entry['low'])} to {_number(entry['high'])})".ljust(22),
    ]
    if entry["over_best"] is not None:
        cells.append(f"{entry['over_best']:6.2f} x {entry['best']}")
    if entry["over_shipped"] is not None and entry["best"] != SHIPPED:
        cells.append(f"{entry['over_shipped']:6.2f} x {SHIPPED}")
    if (share := entry.get("bandwidth_share")) is not None:
        cells.append(f"{100 * share:5.1f} % of the bandwidth")
    return "  ".join(cells)


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"
