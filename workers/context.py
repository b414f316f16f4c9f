"""What the parts of a worker's machine share: its facts, its scheduler, and an outgoing tray."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from llmrt.engine.batch import Vocabulary
from llmrt.engine.scheduler import Scheduler
from llmrt.wire.envelope import NO_BUDGET, NO_REQUEST, Header, encode_body, encode_header
from llmrt.wire.ids import NO_ATTEMPT, Attempt, RequestId, WorkerName
from llmrt.wire.kv import KvContract
from llmrt.wire.messages import ProcessName
from llmrt.workers.costs import Costs
from llmrt.workers.effects import Effect, Log, SendBroker, SendPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Facts about this worker that do not change while it lives.

    `max_context` bounds prompt and generated tokens of a request. `transfer` is auto, shm or one of
    `transports`, those of bulk links, best first; `why_no_transport` has those that cannot be used
    here. `placement` is auto, local or remote; `checksums` auto (full for leases, off in place),
    off, sampled or full. Tokens of a request that come within `stream_interval_s` leave together.
    `has_fencing` allows to end silent writers by force. `broker` is for texts only. Times in
    seconds.
    """

    name: WorkerName
    role: str
    model: str
    contract: KvContract
    process: ProcessName
    vocab_size: int
    max_context: int
    num_blocks: int
    arena_generation: int
    link: str
    arena_socket: str
    broker: str
    max_waiting: int = 1024
    transfer: str = "auto"
    placement: str = "auto"
    checksums: str = "auto"
    beat_s: float = 1.0
    lease_s: float = 30.0
    lease_renew_s: float = 5.0
    stream_interval_s: float = 0.0
    has_fencing: bool = True
    transports: tuple[str, ...] = ("tcp",)
    why_no_transport: dict[str, str] = field(default_factory=dict)

    @property
    def does_decode(self) -> bool:
        return self.role in ("both", "decode")

    @property
    def does_prefill_for_others(self) -> bool:
        return self.role == "prefill"


class WorkerContext:
    """Collects the effects of one event: `now` is its time."""

    def __init__(
        self, settings: CoreSettings, scheduler: Scheduler, vocabulary: Vocabulary
    ) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.ledger = scheduler.ledger
        self.vocabulary = vocabulary
        self.counters: Counter[str] = Counter()
        self.costs = Costs()
        self.effects: list[Effect] = []
        self.now = 0.0
        self._last_sequence_id = 0
        self._last_hash_id = 0

    def deadline_of(self, header: Header, waited_s: float) -> float | None:
        """When the budget of a message that has just come runs out; it waited so long unread."""
        if header.budget_ms == NO_BUDGET:
            return None
        return self.now + header.budget_ms / 1000 - waited_s

    def new_sequence_id(self) -> int:
        self._last_sequence_id += 1
        return self._last_sequence_id

    def new_hash_id(self) -> int:
        self._last_hash_id += 1
        return self._last_hash_id

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def log(self, event: str, level: str = "info", **fields: object) -> None:
        self.effects.append(Log(event, level, fields))

    def send_broker(
        self,
        kind: str,
        body: msgspec.Struct | None = None,
        *,
        request_id: bytes = b"",
        attempt: Attempt = NO_ATTEMPT,
        seq: int = 0,
        raw: Sequence[bytes] = (),
        is_skippable: bool = False,
    ) -> None:
        header = encode_header(kind, request_id, attempt=attempt, seq=seq)
        bodies = [] if body is None else [encode_body(body)]
        self.effects.append(SendBroker([header, *bodies, *raw], is_skippable))

    def send_peer(
        self,
        peer: WorkerName,
        kind: str,
        body: msgspec.Struct | None = None,
        *,
        request_id: RequestId = NO_REQUEST,
        attempt: Attempt = NO_ATTEMPT,
        budget_s: float | None = None,
        raw: Sequence[bytes] = (),
    ) -> None:
        budget_ms = NO_BUDGET if budget_s is None else max(0, int(budget_s * 1000))
        header = encode_header(kind, request_id, attempt=attempt, budget_ms=budget_ms)
        bodies = [] if body is None else [encode_body(body)]
        self.effects.append(SendPeer(peer, [header, *bodies, *raw]))
