"""What can happen to a broker."""

from dataclasses import dataclass
from typing import TypeAlias

from llmrt.wire.envelope import Header
from llmrt.wire.ids import ClientId
from llmrt.wire.messages import ProcessName


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """`frames` begins with the encoded header, without routing ids.

    `waited_s` is how long it may have waited unread because this process did not run. `unix_s` is
    the wall time of its arrival, which is only passed on.
    """

    client_id: ClientId
    header: Header
    frames: list[bytes]
    waited_s: float = 0.0
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """`frames` begins with the encoded header, without routing ids."""

    routing_id: bytes
    header: Header
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class ClientGarbage:
    """A client sent bytes without a header of this protocol."""

    client_id: ClientId
    code: str
    error: str


@dataclass(frozen=True, slots=True)
class WorkerGarbage:
    """Something on the workers' socket sent bytes without a header of this protocol."""

    routing_id: bytes
    code: str
    error: str


@dataclass(frozen=True, slots=True)
class ClientUnroutable:
    """A message to a client was not sent: no connection, or its outbox is full."""

    client_id: ClientId
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class WorkerUnroutable:
    """A message to a worker was not sent: no connection, or its outbox is full."""

    routing_id: bytes
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The kernel says that a watched process has ended."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline` has passed."""


Event: TypeAlias = (
    ClientMessage
    | WorkerMessage
    | ClientGarbage
    | WorkerGarbage
    | ClientUnroutable
    | WorkerUnroutable
    | ProcessDied
    | Tick
)
