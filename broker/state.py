"""All that a broker knows, and the effects that it has asked for; shared by its parts."""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from llmrt.broker.clients import ClientTable
from llmrt.broker.effects import (
    Effect,
    Log,
    SendClient,
    SendWorker,
    UnwatchProcess,
    WatchProcess,
)
from llmrt.broker.events import ClientMessage
from llmrt.broker.registry import Registry
from llmrt.broker.requests import RequestTable
from llmrt.broker.settings import BrokerSettings
from llmrt.broker.timers import Timers
from llmrt.wire.envelope import encode_body, encode_header
from llmrt.wire.errors import LlmrtError
from llmrt.wire.ids import Attempt, ClientId
from llmrt.wire.messages import BEAT, FAILED, Failure, ProcessName

COUNTERS = (
    # Each `generate` and `tokenize` is admitted, refused or attached; each admitted one is live
    # or ends as finished, failed, cancelled or expired.
    "requests_admitted",
    "requests_refused",
    "requests_attached",
    "requests_finished",
    "requests_failed",
    "requests_cancelled",
    "requests_expired",
    "requests_resumed",
    "resumes_on_other_numerics",
    "tokens_passed",
    "rows_stale",
    "rows_duplicate",
    "rows_gap",
    "ends_stale",
    "dispatches",
    "dispatches_lost",
    "workers_registered",
    "workers_refused",
    "workers_lost",
    "clients_orphaned",
    "messages_unsent",
    "protocol_errors",
    "stalls",
)

# Peers whose first bad message was logged; more of them than this are forgotten together.
_MAX_COMPLAINTS = 1024


class Timer(IntEnum):
    """What a key in `State.timers` rings for; its second half names a peer or a request."""

    DEADLINE = auto()
    HOMELESS = auto()
    READER = auto()
    ENDED = auto()
    WORKER = auto()
    CLIENT = auto()
    SETTLED = auto()


TimerKey = tuple[Timer, bytes]


@dataclass(slots=True)
class State:
    settings: BrokerSettings
    epoch: int
    started_at: float | None = None
    workers: Registry = field(init=False)
    clients: ClientTable = field(default_factory=ClientTable)
    requests: RequestTable = field(default_factory=RequestTable)
    timers: Timers[TimerKey] = field(default_factory=Timers)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    effects: list[Effect] = field(default_factory=list)
    beat_frame: bytes = field(init=False)
    num_decode_choices: int = 0
    # Requests that came before any worker, soon after the start, and when.
    early: dict[tuple[ClientId, bytes], tuple[float, ClientMessage]] = field(default_factory=dict)
    _watchers: dict[ProcessName, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _complained: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.workers = Registry(beat_s=self.settings.beat_s)
        self.take_epoch(self.epoch)

    @property
    def dead_after_s(self) -> float:
        return self.settings.dead_after_beats * self.settings.beat_s

    def take_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.beat_frame = encode_header(BEAT, attempt=Attempt(epoch, 0))

    def count(self, counter: str, by: int = 1) -> None:
        self.counters[counter] += by

    def to_client(self, client_id: ClientId, frames: list[bytes]) -> None:
        self.effects.append(SendClient(client_id, frames))

    def to_worker(self, routing_id: bytes, frames: list[bytes]) -> None:
        self.effects.append(SendWorker(routing_id, frames))

    @property
    def logs_debug(self) -> bool:
        return self.settings.log_level == "debug"

    def log(self, event: str, level: str = "info", **fields: Any) -> None:
        self.effects.append(Log(event, level, fields))

    def complain(self, peer: bytes, code: str, error: str) -> None:
        """Count a bad message, and log the first of each peer."""
        self.count("protocol_errors")
        if peer in self._complained:
            return
        if len(self._complained) >= _MAX_COMPLAINTS:
            self._complained.clear()
        self._complained.add(peer)
        self.log("message.rejected", "warning", peer=peer.hex(), code=code, error=error)

    def watch(self, process: ProcessName, peer: bytes) -> None:
        if not self._watchers[process]:
            self.effects.append(WatchProcess(process))
        self._watchers[process].add(peer)

    def unwatch(self, process: ProcessName, peer: bytes) -> None:
        peers = self._watchers.get(process)
        if peers is None:
            return
        peers.discard(peer)
        if not peers:
            del self._watchers[process]
            self.effects.append(UnwatchProcess(process))


def failure_frames(error: LlmrtError, request_id: bytes = b"") -> list[bytes]:
    """The terminal message of a request that failed, or of a connection's mistake."""
    body = Failure(code=error.error_code, message=error.message)
    return [encode_header(FAILED, request_id), encode_body(body)]
