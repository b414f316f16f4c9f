"""Tables for people."""

from collections.abc import Iterable, Sequence


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line per row under the heads, as wide as the widest cell of each column."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
