"""What happens to a worker. Times are the shell's monotonic seconds."""

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from llmrt.engine.batch import StepResult
from llmrt.wire.envelope import Header
from llmrt.wire.ids import Attempt, RequestId, WorkerName
from llmrt.wire.messages import Failure


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class FromBroker:
    """A message of the broker: `frames` are those behind its decoded header.

    `waited_s` is how long this process did not run just before: the message may be that old.
    """

    header: Header
    frames: tuple[bytes, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BrokerMismatch:
    """The broker speaks another major version, as `message` says."""

    message: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message over a link; the sender is known by its routing id. `waited_s` as above."""

    sender: WorkerName
    header: Header
    frames: tuple[bytes, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The answer to `Tokenize`: token ids, or why there are none."""

    request_id: RequestId
    attempt: Attempt
    token_ids: "array[int] | None"
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The device is at work on the step: there is time for what need not come before it."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The running step returned at `returned_at`; `result` is None if it failed."""

    result: StepResult | None
    returned_at: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The answer to `ConnectPeer`: messages can go out; that peer may read ours at `bulk`.

    One that comes again has other addresses.
    """

    peer: WorkerName
    bulk: tuple[str, ...]


class ArenaShape(NamedTuple):
    """What an arena is, as far as its owner's socket tells."""

    num_blocks: int
    block_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class ArenaAttached:
    """The arena that is served as `owner`'s is mapped, and the device knows it."""

    owner: WorkerName
    arena: ArenaShape


@dataclass(frozen=True, slots=True)
class ArenaRefused:
    """`owner`'s arena cannot be mapped here."""

    owner: WorkerName
    reason: str


@dataclass(frozen=True, slots=True)
class ArenaLost:
    """`owner` closed its side or died: its arena must be unmapped."""

    owner: WorkerName


@dataclass(frozen=True, slots=True)
class ArenaMapped:
    """`reader` has mapped our arena."""

    reader: WorkerName


@dataclass(frozen=True, slots=True)
class MapperDied:
    """The very process that had mapped our arena as `reader` is dead; the kernel says so."""

    reader: WorkerName


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """A message to `peer` could not be delivered."""

    peer: WorkerName


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """The answer to `ReadBlocks`."""

    read_id: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class LinkProbed:
    """The answer to `ProbeLink`: what was measured, or why the link does not work.

    A latency of 0 was not measured. `numa` says how the arena and our threads lie.
    """

    probe_id: int
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    numa: str = ""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksHashed:
    """The answer to `HashBlocks`: a checksum per block, or none if the arena is mapped no more."""

    hash_id: int
    checksums: "array[int]"


@dataclass(frozen=True, slots=True)
class StopWanted:
    """The process is to end: say goodbye to the broker."""


Event = (
    Tick
    | FromBroker
    | BrokerMismatch
    | FromPeer
    | Tokenized
    | StepTaken
    | StepDone
    | PeerConnected
    | ArenaAttached
    | ArenaRefused
    | ArenaLost
    | ArenaMapped
    | MapperDied
    | PeerUnreachable
    | BlocksRead
    | LinkProbed
    | BlocksHashed
    | StopWanted
)
