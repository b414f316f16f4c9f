"""What can happen to a broker.

Structs of msgspec: one is built per message, in a tenth of the time of a frozen dataclass.
"""

from typing import TypeAlias

import msgspec

from llmrt.wire.envelope import Header
from llmrt.wire.ids import ClientId
from llmrt.wire.messages import ProcessName


class ClientMessage(msgspec.Struct, frozen=True, gc=False):
    """`frames` begins with the encoded header, without routing ids.

    `waited_s` is how long it may have waited unread because this process did not run. `unix_s` is
    the wall time of its arrival, which is only passed on.
    """

    client_id: ClientId
    header: Header
    frames: list[bytes]
    waited_s: float = 0.0
    unix_s: float = 0.0


class WorkerMessage(msgspec.Struct, frozen=True, gc=False):
    """`frames` begins with the encoded header, without routing ids."""

    routing_id: bytes
    header: Header
    frames: list[bytes]


class ClientGarbage(msgspec.Struct, frozen=True, gc=False):
    """A client sent bytes without a header of this protocol."""

    client_id: ClientId
    code: str
    error: str


class WorkerGarbage(msgspec.Struct, frozen=True, gc=False):
    """Something on the workers' socket sent bytes without a header of this protocol."""

    routing_id: bytes
    code: str
    error: str


class ClientUnroutable(msgspec.Struct, frozen=True, gc=False):
    """A message to a client was not sent: no connection, or its outbox is full."""

    client_id: ClientId
    frames: list[bytes]


class WorkerUnroutable(msgspec.Struct, frozen=True, gc=False):
    """A message to a worker was not sent: no connection, or its outbox is full."""

    routing_id: bytes
    frames: list[bytes]


class ProcessDied(msgspec.Struct, frozen=True, gc=False):
    """The kernel says that a watched process has ended."""

    process: ProcessName


class Tick(msgspec.Struct, frozen=True, gc=False):
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
