"""Every message between processes, by its kind.

Each kind is a constant here; its body is the struct named beside it. Bodies are frozen; unknown
fields of a later minor version are ignored. `docs/wire.md` says who sends what to whom.
"""

import msgspec

from llmrt.wire.kv import KvContract
from llmrt.wire.sampling import SamplingParams

# client -> broker
HELLO = "hello"  # Hello
GENERATE = "generate"  # Generate, raw prompt
CANCEL = "cancel"  # -
ACK = "ack"  # -; header.seq = the next sequence number that the reader wants
BEAT = "beat"  # -; also broker -> client and broker -> worker
PS = "ps"  # -
TOKENIZE = "tokenize"  # Tokenize, raw text

# broker -> client
WELCOME = "welcome"  # Welcome
EVENTS = "events"  # step frames (llmrt.wire.steps)
FINISHED = "finished"  # Finished; header.seq = number of tokens of the stream
FAILED = "failed"  # Failure; terminal for the request that the header names
PS_REPLY = "ps_reply"  # PsReply
TOKENIZED = "tokenized"  # -, raw token ids

# worker -> broker
REGISTER = "register"  # Register
HEARTBEAT = "heartbeat"  # Heartbeat
STEP = "step"  # step frames
BYE = "bye"  # -

# broker -> worker
REGISTERED = "registered"  # Registered
REFUSED = "refused"  # Failure
UNKNOWN_WORKER = "unknown_worker"  # -; register again
DISPATCH = "dispatch"  # Route, then the frames behind the client's header, untouched
PEERS = "peers"  # Peers

# worker -> worker
PEER_HELLO = "peer_hello"  # PeerHello
OFFER = "offer"  # Offer, raw token ids, raw block numbers
OFFER_HELD = "offer_held"  # OfferHeld; at once, and every beat while it is held
WITHDRAW = "withdraw"  # GrantRef
STOPPED = "stopped"  # Stopped
COMMIT = "commit"  # Commit, raw checksums
COMMITTED = "committed"  # GrantRef
CHUNK = "chunk"  # Chunk, raw block numbers in the sender's arena, raw checksums
LEASE_RENEW = "lease_renew"  # LeaseRef
LEASE_CONFIRM = "lease_confirm"  # LeaseRef
LEASE_CONFIRMED = "lease_confirmed"  # LeaseState
LEASE_RELEASE = "lease_release"  # LeaseRef
MAP_FAILED = "map_failed"  # Failure: the sender cannot map the receiver's arena
LINKED = "linked"  # Linked


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A client introduces its session. `process` lets a broker on the same host see it die."""

    process: "ProcessName | None" = None


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """A process as the kernel knows it: only meaningful under the same boot and pid namespace.

    `start_ticks` (field 22 of /proc/PID/stat) tells a reused pid apart.
    """

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    def is_on_host_of(self, other: "ProcessName") -> bool:
        """Whether the two can share memory and see each other die: one kernel, one namespace."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    broker_epoch: int
    max_body_bytes: int
    max_raw_bytes: int
    max_frames: int
    beat_s: float


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat; `content` is plain text."""

    role: str
    content: str


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for text. `prompt_kind` says what the raw frame behind the body holds:

    `text` (UTF-8), `tokens` (u32 ids) or `chat` (nothing: `messages` has the turns).
    A higher `priority` runs first.
    """

    prompt_kind: str
    sampling: SamplingParams
    messages: tuple[ChatMessage, ...] = ()
    model: str | None = None
    priority: int = 0


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text, or a chat, to token ids. `add_special` adds what the model wants in front."""

    messages: tuple[ChatMessage, ...] = ()
    add_special: bool = True
    model: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens` of the prompt were found in a cache and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stream. `finish_reason`: stop, length or cancelled.

    `timings_ms` has every stage in milliseconds of the process that measured it. Text that a stop
    string held back comes before it, in the last step row. Its last worker drafted `num_drafted`
    tokens, of which `num_accepted` were what was drawn, some perhaps behind the end. `placement`
    says why the prompt was computed where it was; `placement_ms` has the delays that were weighed,
    `here` by the owner and `there` by the prefill worker.
    """

    finish_reason: str
    usage: Usage
    timings_ms: dict[str, float]
    decode_worker: str
    prefill_worker: str
    num_preemptions: int = 0
    stop: str | int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    placement: str = ""
    placement_ms: dict[str, float] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is one of `llmrt.wire.errors`; `message` is for people."""

    code: str
    message: str


class LinkRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One link of a worker: what its probe found, 0 where nothing was measured.

    `recent_bytes_per_s` is the rate of large reads since. `numa` says how arena and threads lie;
    `why_not` has the reason for each better transport that is not used.
    """

    transport: str
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    recent_bytes_per_s: float = 0.0
    numa: str = ""
    why_not: dict[str, str] = {}


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as `ps` shows it.

    `numerics_id` is that of its contract. `refusals`, the mismatches, `num_prefill_tokens`,
    `oldest_waiting_s`, and `steps_s`, `python_s`, `num_drafted` and `num_accepted`, which are None
    if the broker does not tell, are those of its `Load`.
    """

    worker_id: str
    epoch: int
    role: str
    state: str
    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    tokens_per_s: float
    heartbeat_age_s: float
    kv_bytes_read: int
    links: dict[str, str]
    numerics_id: str = ""
    steps_s: float | None = None
    python_s: float | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    num_prefill_tokens: int = 0
    oldest_waiting_s: float = 0.0
    num_checksum_mismatches: int = 0
    num_seal_mismatches: int = 0
    num_fenced: int = 0
    num_handed_over: int = 0
    handover_s: float = 0.0
    num_quarantined_blocks: int = 0
    refusals: dict[str, str] = {}
    link_rows: dict[str, LinkRow] = {}


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request as `ps` shows it."""

    request_id: str
    stage: str
    decode_worker: str
    prefill_worker: str
    num_tokens: int
    age_s: float


class PsReply(msgspec.Struct, frozen=True, kw_only=True):
    broker_epoch: int
    uptime_s: float
    workers: tuple[WorkerRow, ...]
    requests: tuple[RequestRow, ...]
    counters: dict[str, int]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A request that a worker answers for. `stage`: tokenizing, waiting, prefill, decode."""

    request_id: bytes
    epoch: int
    n: int
    stage: str


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """A worker offers its service. `link` is the endpoint where other workers reach it."""

    worker_id: str
    epoch: int
    role: str
    model: str
    contract: KvContract
    max_context: int
    num_blocks: int
    max_running: int
    link: str
    broker_epoch_seen: int
    process: ProcessName
    holding: tuple[Held, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What routing looks at, and `ps` shows; counters grow since the start of the worker.

    `num_waiting` requests have no blocks yet, the oldest of them since `oldest_waiting_s`.
    `kv_bytes_read` were copied out of other workers' arenas; a hand-over in place copies none.
    `num_checksum_mismatches` counts reads and grants that did not hold what their writer had, and
    `num_seal_mismatches` cached blocks that had changed when they were to be used again.
    `num_fenced` writers were ended by force. `num_handed_over` prompts were computed in place for
    other workers; `handover_s` sums the time from the return of the last step of each until its
    owner had answered that it goes on.
    `steps_s` sums the time from the return of a step to that of the next one, where the next one
    could start at once; `python_s` is what of it was not spent in the model's computation.
    `num_drafted` tokens were guessed by speculative decoding, `num_accepted` of them rightly; the
    latter are among `num_decode_tokens`. `links` are transports by peer, `refusals` the reasons for
    the first few of those that are refused, `link_rows` what is known of the first few.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    oldest_waiting_s: float = 0.0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    kv_bytes_read: int = 0
    num_checksum_mismatches: int = 0
    num_seal_mismatches: int = 0
    num_fenced: int = 0
    num_handed_over: int = 0
    handover_s: float = 0.0
    steps_s: float = 0.0
    python_s: float = 0.0
    links: dict[str, str] = {}
    refusals: dict[str, str] = {}
    link_rows: dict[str, LinkRow] = {}


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by the work loop, never by an I/O thread. `holding` names every request held."""

    load: Load
    holding: tuple[Held, ...] = ()


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    broker_epoch: int
    beat_s: float


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    epoch: int
    role: str
    link: str
    contract: KvContract
    process: ProcessName


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that live now; a worker that is not listed any more is dead to its peers."""

    peers: tuple[Peer, ...]


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The broker's choice for one attempt: who may prefill for this owner.

    `kind` is generate or tokenize: what the client asked for. With `num_forced` the last raw
    frame holds so many u32 token ids, which earlier attempts have passed on: the owner takes
    them as drawn and goes on at the next sequence number. `admitted_unix_s` is the wall time that a
    chat template may show: the same for every owner, or the prompt would change under the tokens.
    """

    kind: str = GENERATE
    prefill_worker: str | None = None
    prefill_epoch: int = 0
    num_forced: int = 0
    admitted_unix_s: float = 0.0


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """First message on a link, both ways.

    `bulk` are the addresses where the receiver, and nobody else, may read the sender's arena; the
    scheme of each names its transport. A hello that is no answer and comes again is answered: the
    first answer was lost.
    """

    worker_id: str
    epoch: int
    arena_generation: int
    num_blocks: int
    arena_socket: str
    bulk: tuple[str, ...]
    contract: KvContract
    process: ProcessName
    is_answer: bool = False


class Linked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the sender's probe of this link has found; one without `latency_s` is answered."""

    transport: str
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    is_answer: bool = False


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """D asks P to prefill. Raw frames: all token ids; D's blocks for all of them.

    `mode` is grant (P writes into D's arena in place) or lease (P computes in its own arena).
    The first `num_given` tokens are in D's blocks already; under a lease P computes them all the
    same. `num_prompt` tells prompt from tokens generated before, for penalties. `checksums` is
    off, sampled or full: what P hashes. `salt` is that of the request's block hashes.
    """

    grant_id: int
    arena_generation: int
    mode: str
    num_given: int
    num_prompt: int
    sampling: SamplingParams
    seed: int
    priority: int = 0
    checksums: str = "off"
    salt: bytes = b""


class GrantRef(msgspec.Struct, frozen=True, kw_only=True):
    grant_id: int


class OfferHeld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """P has the offer. `num_foreign_tokens` of other owners' prompts wait for P beside it."""

    grant_id: int
    num_foreign_tokens: int = 0


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """P will not touch the grant's blocks again: its last step that names them has returned."""

    grant_id: int
    reason: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """P's prefill is complete; the KV of all tokens of the offer is in place.

    `token_id` is the first sampled token, `extras` its log probabilities as in a step row.
    Times in milliseconds by P's clock. The raw frame holds the u64 checksums of the checked blocks
    of a grant.
    """

    grant_id: int
    token_id: int
    num_cached: int
    queue_ms: float
    prefill_ms: float
    extras: bytes = b""
    lease_id: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks `first_block` on of the offer are complete in P's arena and may be read.

    The second raw frame holds the u64 checksums of those of them that are checked.
    """

    grant_id: int
    lease_id: int
    arena_generation: int
    first_block: int


class LeaseRef(msgspec.Struct, frozen=True, kw_only=True):
    grant_id: int
    lease_id: int
    arena_generation: int


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    grant_id: int
    lease_id: int
    is_held: bool
