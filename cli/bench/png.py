"""A report as a picture: one panel per metric. Needs matplotlib, the extra `bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrt.cli.bench.plan import DECODE, THROUGHPUT, TTFT
from llmrt.wire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXES = {
    TTFT: ("input tokens", "time to first token, ms"),
    DECODE: ("one stream", "decode, tokens/s"),
    THROUGHPUT: ("streams", "all streams, tokens/s"),
}


def check_png(path: Path) -> None:
    """Raise `ConfigError` before an hour was spent measuring for a picture that cannot be made."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png is {path}: a name that ends in .png is needed")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--png needs matplotlib: pip install 'llmrt[bench]'") from None


def write_png(report: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    by_metric = {
        metric: [result for result in report["results"] if result["metric"] == metric]
        for metric in _AXES
    }
    shown = [metric for metric, results in by_metric.items() if results]
    figure = Figure(figsize=(4.5 * len(shown), 4), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for metric, axes in zip(shown, panels, strict=True):
        _draw(axes, metric, by_metric[metric])
    first = report["results"][0]
    figure.suptitle(
        f"{first['model']}, {first['quantization']}, {first['layout']}, "
        f"{first['threads']} threads, {first['machine']['cpu']}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", metric: str, results: Sequence[Mapping[str, Any]]) -> None:
    """A bar per point with the range of its repeats, and the roofline as a mark."""
    names = [_name(result) for result in results]
    values = [result[result["headline"]] or 0.0 for result in results]
    below = [max(0.0, v - min(r["repeats"] or [v])) for v, r in zip(values, results, strict=True)]
    above = [max(0.0, max(r["repeats"] or [v]) - v) for v, r in zip(values, results, strict=True)]
    axes.bar(names, values, yerr=[below, above], capsize=4, width=0.6)
    bounds = [(name, b) for name, r in zip(names, results, strict=True) if (b := _bound(r))]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), "_", color="black", markersize=24, label="roofline")
        axes.legend()
    x_label, y_label = _AXES[metric]
    if results[0]["request_rate"] != "inf":
        x_label = "requests/s"
    # A single bar would fill its panel.
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(-0.8, len(names) - 0.2))
    axes.set_ylim(bottom=0)


def _name(result: Mapping[str, Any]) -> str:
    if result["metric"] == TTFT:
        return str(result["input_len"])
    if result["metric"] == DECODE:
        return f"{result['input_len']} + {result['output_len']} tokens"
    return str(result["max_concurrency"] or result["request_rate"])


def _bound(result: Mapping[str, Any]) -> float | None:
    """In the unit of the panel."""
    bound = result.get("roofline")
    if not bound:
        return None
    rate = float(bound["bound_tokens_per_s"])
    return result["input_len"] / rate * 1e3 if result["metric"] == TTFT else rate
