"""The entry of a broker or worker that a command of ours starts: `llmrt broker`, `llmrt worker`
without their parser and its imports, which cost a fifth of a start.

It takes the flags that `cluster` writes, which were checked where they were given.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import Section, flag_name, load
from llmrt.cli.serving import serve_broker, serve_worker
from llmrt.wire.errors import LlmrtError
from llmrt.workers.settings import WorkerSettings

# Nothing that loading makes is garbage until `actor.runtime.settle` looks at it once.
_LOADING_THRESHOLDS = (100_000, 50, 50)


def main() -> None:
    """Run `broker` or `worker`; exit codes are those of `llmrt.actor.exits`."""
    from llmrt.actor.process import die_with_parent
    from llmrt.actor.streams import set_up

    set_up()
    die_with_parent()
    _import_structlog()
    gc.set_threshold(*_LOADING_THRESHOLDS)
    command, *arguments = sys.argv[1:]
    try:
        sys.exit(_serve(command, arguments))
    except LlmrtError as error:
        from llmrt.actor.exits import report

        sys.exit(report(error))


def _import_structlog() -> None:
    """Without rich, which it loads if it can for tracebacks on a console that we render ourselves:
    60 ms of CPU time, a twentieth of a worker's start."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # "not found", to an import
        import structlog  # noqa: F401

        del sys.modules["rich"]


def read_flags(kind: Section, arguments: Sequence[str]) -> tuple[dict[str, object], Path | None]:
    """Values of the fields that are given, and the file with the others."""
    field_of = {flag_name(field.name): field.name for field in fields(kind)}
    types = get_type_hints(kind)
    flags: dict[str, object] = {}
    config = None
    left = iter(arguments)
    for flag in left:
        if flag == "--config":
            config = Path(next(left))
        elif flag.startswith("--no-") and "--" + flag[5:] in field_of:
            flags[field_of["--" + flag[5:]]] = False
        else:
            name = field_of[flag]
            value_type = _type_of(types[name])
            flags[name] = True if value_type is bool else value_type(next(left))
    return flags, config


def _type_of(annotation: Any) -> Any:
    """`int | None` is int."""
    kinds = get_args(annotation) or (annotation,)
    return next(kind for kind in kinds if kind is not NoneType)


def _serve(command: str, arguments: Sequence[str]) -> int:
    if command == "broker":
        return serve_broker(load(BrokerSettings, *read_flags(BrokerSettings, arguments)))
    return serve_worker(load(WorkerSettings, *read_flags(WorkerSettings, arguments)))


if __name__ == "__main__":
    main()
