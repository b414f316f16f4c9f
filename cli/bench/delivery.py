"""Where a report goes, and what is shown until it is there."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrt.cli.answers import write
from llmrt.cli.bench.png import check_png, write_png
from llmrt.cli.bench.text import text_of
from llmrt.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Delivery:
    """To stdout as text or JSON, and to files where asked."""

    output: Path | None
    png: Path | None
    as_json: bool

    def check(self) -> None:
        """Raise `ConfigError` now: a wrong path must not cost an hour of measuring."""
        for path in (self.output, self.png):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"cannot write {path}: {path.parent} is no folder")
        if self.png is not None:
            check_png(self.png)

    def __call__(self, report: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a file that cannot be written; stdout has the report then."""
        try:
            if self.output is not None:
                with _naming(self.output):
                    text = json.dumps(report, indent=2) + "\n"
                    self.output.write_text(text, encoding="utf-8")
            if self.png is not None:
                with _naming(self.png):
                    write_png(report, self.png)
        finally:
            write(f"{json.dumps(report) if self.as_json else text_of(report)}\n")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def progress_bar(num_requests: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm-up", total=num_requests)
        yield lambda label: bar.update(task, advance=1, description=label)
