"""What a worker's machine wants done. The shell carries effects out in order."""

from array import array
from dataclasses import dataclass, field

from llmrt.engine.batch import Batch, SequenceId
from llmrt.engine.rights import WriteRight
from llmrt.wire.ids import Attempt, RequestId, WorkerName
from llmrt.wire.messages import Generate, Peer


@dataclass(frozen=True, slots=True)
class RunStep:
    """Comes back as `StepTaken` when the device has begun, and then as `StepDone`.

    While a step runs, one that `follows` it may be given; any other only when none runs. A row in
    another worker's arena runs only if it keeps to its right in `rights`.
    """

    batch: Batch
    rights: dict[SequenceId, WriteRight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendBroker:
    """With `is_skippable` it is dropped if earlier messages still wait for the broker."""

    frames: list[bytes]
    is_skippable: bool = False


@dataclass(frozen=True, slots=True)
class SendPeer:
    peer: WorkerName
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Render and tokenize a prompt; comes back as `Tokenized`.

    `admitted_unix_s` is the time that a template may show, in seconds since 1970.
    """

    request_id: RequestId
    attempt: Attempt
    generate: Generate
    prompt: bytes
    add_special: bool = True
    admitted_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Comes back as `PeerConnected`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    peer: WorkerName


@dataclass(frozen=True, slots=True)
class AttachArena:
    """Map `owner`'s arena for steps; comes back as `ArenaAttached` or `ArenaRefused`."""

    owner: WorkerName
    socket: str


@dataclass(frozen=True, slots=True)
class FenceWriter:
    """Kill the process that maps our arena as `peer`; `MapperDied` confirms it."""

    peer: WorkerName


@dataclass(frozen=True, slots=True)
class DetachArena:
    """Unmap an arena once the running step has returned; no later step names it."""

    owner: WorkerName


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Copy `source` blocks of `owner`'s arena into our `target` blocks; comes back as `BlocksRead`.

    `address` is the owner's bulk endpoint.
    """

    read_id: int
    owner: WorkerName
    address: str
    lease_id: int
    generation: int
    source: "array[int]"
    target: "array[int]"


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Measure the link to `owner`; comes back as `LinkProbed`, always.

    `address` is the owner's bulk endpoint, of whose arena as many blocks as `target` are read, or
    `shm`: the owner's arena, which is mapped here.
    """

    probe_id: int
    owner: WorkerName
    address: str
    generation: int
    target: "array[int]"


@dataclass(frozen=True, slots=True)
class HashBlocks:
    """Hash `blocks` of `owner`'s arena, of ours if None; comes back as `BlocksHashed`."""

    hash_id: int
    owner: WorkerName | None
    blocks: "array[int]"


@dataclass(frozen=True, slots=True)
class Log:
    event: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """The broker has accepted this worker for the first time."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The worker cannot go on: the broker refused it, say."""

    code: str
    message: str


Effect = (
    RunStep
    | SendBroker
    | SendPeer
    | Tokenize
    | ConnectPeer
    | ForgetPeer
    | AttachArena
    | DetachArena
    | FenceWriter
    | ReadBlocks
    | ProbeLink
    | HashBlocks
    | Log
    | Ready
    | Exit
)
