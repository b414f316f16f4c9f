"""What was measured, as JSON and as a table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llmrt.cli.bench.quality.corpus import Text
from llmrt.cli.bench.quality.measure import Quality
from llmrt.cli.bench.quality.variants import Variant
from llmrt.cli.bench.result import rounded

SCHEMA = "llmrt-bench-quality/1"
_HEADER = ("weights", "KV", "MiB", "B/token", "perplexity", "change", "KL", "top-1", "greedy", "id")


def make_result(variant: Variant, quality: Quality) -> dict[str, Any]:
    result: dict[str, Any] = rounded(
        {
            "dtype": variant.dtype,
            "kv_cache_dtype": variant.kv_dtype,
            "numerics_id": variant.numerics_id,
            "weight_bytes": variant.weight_bytes,
            "kv_token_bytes": variant.kv_token_bytes,
            **dataclasses.asdict(quality.figures),
            "greedy_agreement": quality.greedy_agreement,
        }
    )
    return result


def make_report(
    conditions: Mapping[str, Any],
    text: Text,
    results: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """`results` begin with the reference."""
    return {
        "schema": SCHEMA,
        **conditions,
        "text": {"name": text.name, "sha256": text.sha256},
        "notes": list(notes),
        "reference": results[0],
        "results": list(results[1:]),
    }


def text_of(report: Mapping[str, Any]) -> str:
    """Conditions, a line per format, and how to read it."""
    machine, text, reference = report["machine"], report["text"], report["reference"]
    cells = [_HEADER, _cells(reference, is_reference=True), *map(_cells, report["results"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{report['model']} ({report['quantization']}), {reference['num_tokens']} tokens of "
        f"{text['name']} (sha256 {text['sha256'][:16]}) in windows of {report['context']}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['features']}",
        "",
        *(_line(row, widths) for row in cells),
        "",
        "change of the perplexity, with its standard error; KL in nats per token; top-1: the same "
        "token is the likeliest;",
        f"greedy: of {report['output_tokens']} tokens behind each of {report['num_prompts']} "
        "prompts, the share before the first other one",
        *report["notes"],
    ]
    return "\n".join(lines)


def _cells(result: Mapping[str, Any], *, is_reference: bool = False) -> tuple[str, ...]:
    change, stderr = result["perplexity_change"], result["perplexity_change_stderr"]
    compared = (
        f"{100 * change:+.2f} +- {100 * stderr:.2f} %",
        f"{result['mean_kl']:.2e}",
        f"{100 * result['top1_agreement']:.2f} %",
        f"{100 * result['greedy_agreement']:.1f} %",
    )
    return (
        result["dtype"],
        result["kv_cache_dtype"],
        f"{result['weight_bytes'] / (1 << 20):.0f}",
        str(result["kv_token_bytes"]),
        f"{result['perplexity']:.4f}",
        *(("reference", "", "", "") if is_reference else compared),
        result["numerics_id"],
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers to the right, names to the left."""
    last = len(cells) - 1
    return "  ".join(
        cell.ljust(width) if idx in (0, 1, last) else cell.rjust(width)
        for idx, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
