"""What a broker's machine wants done: structs of msgspec, as its events are."""

from typing import Any, TypeAlias

import msgspec

from llmrt.wire.ids import ClientId
from llmrt.wire.messages import ProcessName


class SendClient(msgspec.Struct, frozen=True, gc=False):
    client_id: ClientId
    frames: list[bytes]


class SendWorker(msgspec.Struct, frozen=True, gc=False):
    routing_id: bytes
    frames: list[bytes]


class WatchProcess(msgspec.Struct, frozen=True, gc=False):
    """Report `ProcessDied` when this process ends, if it runs on this host."""

    process: ProcessName


class UnwatchProcess(msgspec.Struct, frozen=True, gc=False):
    process: ProcessName


class Log(msgspec.Struct, frozen=True, gc=False):
    """`level` is debug, info, warning or error."""

    event: str
    level: str
    fields: dict[str, Any]


Effect: TypeAlias = SendClient | SendWorker | WatchProcess | UnwatchProcess | Log
