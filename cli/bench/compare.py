"""`llmrt bench compare`: two reports beside each other, if they measured the same thing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmrt.cli.bench.result import CONDITIONS, HEADLINES, label_of
from llmrt.cli.bench.subject import UNKNOWN
from llmrt.wire.errors import InvalidRequest

_KEY = ("input_len", "output_len", "max_concurrency", "request_rate")
_ALSO = {
    "ttft": ("p99_ttft_ms",),
    "decode": ("median_itl_ms", "p99_itl_ms"),
    "throughput": ("request_goodput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms"),
}
_HIGHER_IS_BETTER = ("decode_tokens_per_s", "output_throughput", "request_goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of both reports. `speedup` is above 1 where B is better.

    `is_within_spread`: the repeats of A and B overlap, so that this is no difference yet. It is
    None for figures that are not given per repeat.
    """

    what: str
    figure: str
    a: float
    b: float
    speedup: float | None
    is_within_spread: bool | None


def compare(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], across: Collection[str] = ()
) -> list[Row]:
    """All figures that both have; conditions in `across` may differ.

    Raises `InvalidRequest` listing each unequal condition with both values.
    """
    for name in across:
        if name not in CONDITIONS:
            raise InvalidRequest(f"--across has {name!r}: known are {', '.join(CONDITIONS)}")
    pairs, faults = _pairs(a, b)
    faults += _unequal(pairs, across)
    if faults:
        raise InvalidRequest("not comparable: " + "; ".join(faults))
    return [row for first, second in pairs for row in _rows(first, second)]


def unequal_conditions(
    a: Mapping[str, Any], b: Mapping[str, Any], across: Collection[str] = ()
) -> list[str]:
    """One line per condition, but for those in `across`, that differs or is not known."""
    lines = []
    for name, (left, right) in _flat(a, b, across).items():
        if left != right:
            lines.append(f"{name} is {left} in A and {right} in B")
        elif left == UNKNOWN:
            lines.append(
                f"{name} is {UNKNOWN} in both (say it by its flag when measuring, or use "
                f"--across {name})"
            )
    return lines


def table(rows: Sequence[Row]) -> str:
    """For people: a line per figure, under a line per point."""
    lines: list[str] = []
    what = None
    for row in rows:
        if row.what != what:
            what = row.what
            lines.append(what)
        speedup = "-" if row.speedup is None else f"{row.speedup:.3f}x"
        note = "  within the spread of the repeats" if row.is_within_spread else ""
        lines.append(f"  {row.figure:<22} {row.a:>10.2f} {row.b:>10.2f} {speedup:>8}{note}")
    return "\n".join([f"  {'':<22} {'A':>10} {'B':>10} {'better':>8}", *lines])


def _flat(
    a: Mapping[str, Any], b: Mapping[str, Any], across: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """Both values of each condition; the facts of a machine one by one."""
    both: dict[str, tuple[Any, Any]] = {}
    for name in CONDITIONS:
        if name in across:
            continue
        left, right = a[name], b[name]
        if isinstance(left, dict) and isinstance(right, dict):
            for key in sorted({*left, *right}):
                both[f"{name}.{key}"] = (left.get(key), right.get(key))
        else:
            both[name] = (left, right)
    return both


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _pairs(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> tuple[list[Pair], list[str]]:
    """Points of one load side by side; what is left over, in order, so that a refusal can name
    the difference; and what only one report has."""
    pairs: list[Pair] = []
    faults = []
    for metric in HEADLINES:
        left = {_key(result): result for result in a if result["metric"] == metric}
        right = {_key(result): result for result in b if result["metric"] == metric}
        both = [key for key in left if key in right]
        pairs += [(left.pop(key), right.pop(key)) for key in both]
        alone_a, alone_b = list(left.values()), list(right.values())
        num_odd = min(len(alone_a), len(alone_b))
        pairs += zip(alone_a[:num_odd], alone_b[:num_odd], strict=True)
        faults += [f"{label_of(result)} is only in A" for result in alone_a[num_odd:]]
        faults += [f"{label_of(result)} is only in B" for result in alone_b[num_odd:]]
    return pairs, faults


def _unequal(pairs: Sequence[Pair], across: Collection[str]) -> list[str]:
    """One line per difference, with the points that have it unless all do."""
    labels: dict[str, list[str]] = {}
    for first, second in pairs:
        for line in unequal_conditions(first, second, across):
            labels.setdefault(line, []).append(label_of(first))
    return [
        line if len(having) == len(pairs) else f"{line} ({', '.join(having)})"
        for line, having in labels.items()
    ]


def _key(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in _KEY)


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    rows = []
    for figure in (a["headline"], *_ALSO[a["metric"]]):
        left, right = a.get(figure), b.get(figure)
        if left is None or right is None:
            continue
        better, worse = (right, left) if figure in _HIGHER_IS_BETTER else (left, right)
        rows.append(
            Row(
                what=label_of(a),
                figure=figure,
                a=left,
                b=right,
                speedup=better / worse if worse else None,
                is_within_spread=_overlap(a, b) if figure == a["headline"] else None,
            )
        )
    return rows


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool | None:
    left, right = a.get("repeats"), b.get("repeats")
    if not left or not right or len(left) == len(right) == 1:
        return None
    return bool(min(left) <= max(right) and min(right) <= max(left))
