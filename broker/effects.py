"""What a broker's machine wants done."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from llmrt.wire.ids import ClientId
from llmrt.wire.messages import ProcessName


@dataclass(frozen=True, slots=True)
class SendClient:
    client_id: ClientId
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class SendWorker:
    routing_id: bytes
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Report `ProcessDied` when this process ends, if it runs on this host."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class UnwatchProcess:
    process: ProcessName


@dataclass(frozen=True, slots=True)
class Log:
    """`level` is debug, info, warning or error."""

    event: str
    level: str
    fields: dict[str, Any]


Effect: TypeAlias = SendClient | SendWorker | WatchProcess | UnwatchProcess | Log
