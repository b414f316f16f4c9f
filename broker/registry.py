"""The workers that live now: who they are, how loaded, and who may be paired with whom.

A worker is registered from its `register` until `bye`, the confirmed end of its process, or
silence. Its routing id names a connection, its `WorkerName` a life; a name belongs to one life
at a time. Workers of one *family* agree in everything of the contract that decides what a block
or a token id means; only they are paired, and only they continue each other's requests. Workers
that serve one model name may be of several families, but agree in all that decides the text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmrt.broker.placement import Candidate, decode_load, fills_own_cache, prefill_load
from llmrt.broker.prefixes import PrefixIndex, Prompt
from llmrt.wire.envelope import encode_body, encode_header
from llmrt.wire.errors import RegistrationRefused
from llmrt.wire.ids import RequestId, WorkerId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS, KvContract, contract_fault, contract_mismatch, text_mismatch
from llmrt.wire.messages import PEERS, Heartbeat, Load, Peer, Peers, Register

ROLES = ("both", "prefill", "decode")
# A worker that missed one beat, half a beat of jitter granted, gets no new requests.
STALE_BEATS = 1.5
# All cards together must fit the body of one `peers` message.
MAX_WORKERS = 250
MAX_CARD_BYTES = 4096


@dataclass(slots=True, eq=False)
class Worker:
    """One registered life. `requests` holds those that it owns, in the order of dispatch.
    `num_prefill_choices` counts prefill workers chosen for it. `num_pending_tokens` are those that
    it is thought to compute for requests without a first token.

    `suspect_at` is when a message to it could not be sent and nothing was heard since; such a
    worker is given nothing.
    """

    routing_id: bytes
    name: WorkerName
    card: Register
    family: int
    heard_at: float
    load_at: float
    prefixes: PrefixIndex
    load: Load = field(default_factory=Load)
    tokens_per_s: float = 0.0
    requests: dict[RequestId, None] = field(default_factory=dict)
    num_routed_prefills: int = 0
    num_prefill_choices: int = 0
    num_pending_tokens: int = 0
    suspect_at: float | None = None

    @property
    def can_decode(self) -> bool:
        return self.card.role != "prefill"

    @property
    def can_prefill_for_others(self) -> bool:
        return self.card.role == "prefill"

    def is_copied_from(self, prefiller: "Worker") -> bool:
        """Whether the prefill worker computes our prompts in its own arena."""
        transport = self.load.links.get(prefiller.name.worker_id, "pending")
        return fills_own_cache(transport)

    def take_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """The load as of now; it includes the prefills that were routed before."""
        before, elapsed = self.load, now - self.load_at
        if elapsed > 0:
            self.tokens_per_s = (
                max(0, beat.load.num_decode_tokens - before.num_decode_tokens) / elapsed
            )
        self.load, self.load_at = beat.load, now
        self.num_routed_prefills = 0


class Registry:
    def __init__(self, *, beat_s: float) -> None:
        self._stale_after_s = STALE_BEATS * beat_s
        self._by_routing_id: dict[bytes, Worker] = {}
        self._by_id: dict[WorkerId, Worker] = {}
        self._families: list[KvContract] = []
        # Of the present workers; every request asks for them.
        self._decode_workers: list[Worker] = []
        self._prefill_workers: list[Worker] = []
        self._peers_frames: list[bytes] | None = None
        self._models: list[str] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def at(self, routing_id: bytes) -> Worker | None:
        return self._by_routing_id.get(routing_id)

    def named(self, worker_id: str) -> Worker | None:
        return self._by_id.get(WorkerId(worker_id))

    def is_alive(self, worker: Worker) -> bool:
        return self._by_routing_id.get(worker.routing_id) is worker

    def holder(self, card: Register) -> Worker | None:
        """The worker that has the name which `card` asks for.

        Raises `RegistrationRefused` if that is another living process; a new life of the same
        process, or the same life on a new connection, may take the name over. Raises it, too, if
        the contract says too little, or others serve that model with another text.
        """
        if card.role not in ROLES:
            raise RegistrationRefused(
                f"role is {card.role!r}: this broker knows {', '.join(ROLES)}"
            )
        if not card.worker_id or not card.model:
            raise RegistrationRefused("worker_id and model must not be empty")
        size_bytes = len(encode_body(_peer(card)))
        if size_bytes > MAX_CARD_BYTES:
            raise RegistrationRefused(
                f"name, link and contract take {size_bytes} bytes; at most {MAX_CARD_BYTES} are "
                "allowed: shorten them"
            )
        self._check_contract(card)
        holder = self.named(card.worker_id)
        if holder is None and len(self) >= MAX_WORKERS:
            raise RegistrationRefused(f"{MAX_WORKERS} workers are registered, the broker's limit")
        if holder is None or holder.name.epoch == card.epoch:
            return holder
        if holder.card.process == card.process:
            return holder
        raise RegistrationRefused(
            f"worker id {card.worker_id!r} is already registered by pid "
            f"{holder.card.process.pid} (epoch {holder.name.epoch}), not by pid "
            f"{card.process.pid} (epoch {card.epoch}): choose another --worker-id, "
            "or stop the other worker first"
        )

    def add(self, routing_id: bytes, card: Register, now: float) -> Worker:
        """Enter a worker whose name and routing id are free."""
        worker = Worker(
            routing_id=routing_id,
            name=WorkerName(WorkerId(card.worker_id), card.epoch),
            card=card,
            family=self._family_of(card.contract),
            heard_at=now,
            load_at=now,
            prefixes=PrefixIndex(card.num_blocks * BLOCK_TOKENS),
            load=Load(num_blocks=card.num_blocks, num_free_blocks=card.num_blocks),
        )
        self._by_routing_id[routing_id] = worker
        self._by_id[worker.name.worker_id] = worker
        self._note_change()
        return worker

    def move(self, worker: Worker, routing_id: bytes, card: Register) -> None:
        """The same life has registered again, perhaps on a new connection."""
        del self._by_routing_id[worker.routing_id]
        worker.routing_id, worker.card = routing_id, card
        worker.family = self._family_of(card.contract)
        self._by_routing_id[routing_id] = worker
        self._note_change()

    def remove(self, worker: Worker) -> None:
        del self._by_routing_id[worker.routing_id]
        del self._by_id[worker.name.worker_id]
        self._note_change()

    def models(self) -> list[str]:
        """Names of the models that somebody decodes, in order."""
        if self._models is None:
            self._models = sorted({worker.card.model for worker in self if worker.can_decode})
        return self._models

    def decoders(self, model: str, *, family: int | None, avoid: Worker | None) -> list[Worker]:
        """Workers that may own a request; `avoid` only if there is no other."""
        workers = [
            worker
            for worker in self._decode_workers
            if worker.suspect_at is None
            and worker.card.model == model
            and (family is None or worker.family == family)
        ]
        if avoid in workers and len(workers) > 1:
            workers.remove(avoid)
        return workers

    def prefillers(self, owner: Worker) -> list[Worker]:
        """Prefill workers whose blocks mean the same as the owner's."""
        return [
            worker
            for worker in self._prefill_workers
            if worker.suspect_at is None and worker.family == owner.family
        ]

    def decode_candidate(self, worker: Worker, prompt: Prompt | None, now: float) -> Candidate:
        """`prompt` is None if the policy does not look at it."""
        load = worker.load
        num_used = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
        return Candidate(
            worker.name.worker_id,
            decode_load(len(worker.requests), load.num_waiting, worker.card.max_running),
            pressure=num_used / max(1, load.num_blocks),
            is_stale=self.is_stale(worker, now),
            num_queued=worker.num_pending_tokens,
            num_cached=0 if prompt is None else worker.prefixes.num_known_tokens(prompt),
        )

    def prefill_candidate(self, worker: Worker, prompt: Prompt | None, now: float) -> Candidate:
        """`prompt` is None if the worker's own cache does not matter."""
        load = worker.load
        return Candidate(
            worker.name.worker_id,
            prefill_load(
                load.num_running + load.num_waiting,
                worker.num_routed_prefills,
                worker.card.max_running,
            ),
            pressure=load.num_waiting_tokens,
            is_stale=self.is_stale(worker, now),
            num_queued=worker.num_pending_tokens,
            num_cached=0 if prompt is None else worker.prefixes.num_known_tokens(prompt),
        )

    def is_stale(self, worker: Worker, now: float) -> bool:
        return now - worker.heard_at > self._stale_after_s

    def peers_frames(self) -> list[bytes]:
        """The message that tells every worker who lives."""
        if self._peers_frames is None:
            peers = Peers(peers=tuple(_peer(worker.card) for worker in self))
            self._peers_frames = [encode_header(PEERS), encode_body(peers)]
        return self._peers_frames

    def check(self) -> None:
        assert len(self._by_id) == len(self._by_routing_id)
        for routing_id, worker in self._by_routing_id.items():
            assert worker.routing_id == routing_id
            assert self._by_id[worker.name.worker_id] is worker

    def _note_change(self) -> None:
        self._peers_frames = self._models = None
        self._decode_workers = [worker for worker in self if worker.can_decode]
        self._prefill_workers = [worker for worker in self if worker.can_prefill_for_others]

    def _check_contract(self, card: Register) -> None:
        fault = contract_fault(card.contract)
        if fault is not None:
            raise RegistrationRefused(f"KV contract of {card.worker_id!r}: {fault}")
        for other in self:
            if other.card.model != card.model or other.name.worker_id == card.worker_id:
                continue
            mismatch = text_mismatch(card.contract, other.card.contract)
            if mismatch is not None:
                raise RegistrationRefused(
                    f"{other.name.worker_id!r} serves another model as {card.model!r}: {mismatch}; "
                    "stop that worker first, or rename the model's file or folder"
                )

    def _family_of(self, contract: KvContract) -> int:
        for family, known in enumerate(self._families):
            if contract_mismatch(known, contract) is None:
                return family
        self._families.append(contract)
        return len(self._families) - 1


def _peer(card: Register) -> Peer:
    return Peer(
        worker_id=card.worker_id,
        epoch=card.epoch,
        role=card.role,
        link=card.link,
        contract=card.contract,
        process=card.process,
    )
