"""Events that `ClientCore` takes, and effects that it gives."""

from dataclasses import dataclass
from typing import TypeAlias

from llmrt.client.results import Outcome, StreamEvent
from llmrt.wire.envelope import Header
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import RequestId
from llmrt.wire.messages import Failure, Finished, PsReply, Welcome
from llmrt.wire.steps import StepRow


@dataclass(frozen=True, slots=True)
class Submit:
    """The caller wants an answer of the broker.

    `kind` is generate, ps or tokenize; or hello, which is answered by the welcome of a connection
    that stands. `frames` are those behind the header.
    """

    request_id: RequestId
    kind: str
    deadline_s: float
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """What an `events` message holds."""

    rows: tuple[StepRow, ...]


Body: TypeAlias = Welcome | Rows | Finished | Failure | PsReply | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the broker. `body` is None for a beat, and for a kind of a later version."""

    header: Header
    body: Body


@dataclass(frozen=True, slots=True)
class BadMessageReceived:
    error: ProtocolError


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message of `kind` was handed back by the socket: `reason` is full, unroutable or closed."""

    kind: str
    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class ReadTo:
    """The reader of a stream has taken every token below `seq`."""

    request_id: RequestId
    seq: int


@dataclass(frozen=True, slots=True)
class CancelWanted:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CloseWanted:
    """The session ends: nothing may stay live."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline` has come."""


Event: TypeAlias = (
    Submit | Received | BadMessageReceived | SendFailed | ReadTo | CancelWanted | CloseWanted | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the reader of a stream: each token once, in order."""

    request_id: RequestId
    event: StreamEvent


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal effect of a submitted request."""

    request_id: RequestId
    outcome: Outcome


Effect: TypeAlias = Send | Deliver | End
