"""A worker's machine on the bench: events go in, and what it sends is decoded for the tests."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from tests.conftest import make_contract

from llmrt.engine.batch import Batch, Drawn, StepResult, fill
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.kvtransfer.ledger import Ledger
from llmrt.simulation.content import VOCAB_SIZE, SimVocabulary
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, unpack_u32
from llmrt.wire.envelope import Header, decode_body, decode_header, encode_body, encode_header
from llmrt.wire.ids import Attempt, RequestId, WorkerId, WorkerName
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import StepRow, decode_step
from llmrt.workers import effects as do
from llmrt.workers import events as ev
from llmrt.workers.context import CoreSettings
from llmrt.workers.core import WorkerCore

BODIES: dict[str, type[msgspec.Struct]] = {
    m.FINISHED: m.Finished,
    m.FAILED: m.Failure,
    m.REGISTER: m.Register,
    m.HEARTBEAT: m.Heartbeat,
    m.PEER_HELLO: m.PeerHello,
    m.OFFER: m.Offer,
    m.OFFER_HELD: m.OfferHeld,
    m.WITHDRAW: m.GrantRef,
    m.STOPPED: m.Stopped,
    m.COMMIT: m.Commit,
    m.COMMITTED: m.GrantRef,
    m.CHUNK: m.Chunk,
    m.LEASE_CONFIRM: m.LeaseRef,
    m.LEASE_CONFIRMED: m.LeaseState,
    m.LEASE_RELEASE: m.LeaseRef,
    m.LEASE_RENEW: m.LeaseRef,
    m.MAP_FAILED: m.Failure,
    m.LINKED: m.Linked,
}


@dataclass(frozen=True, slots=True)
class Sent:
    """A decoded message; `target` is None for the broker."""

    target: WorkerName | None
    header: Header
    body: Any
    raw: tuple[bytes, ...]


@dataclass(slots=True)
class Bench:
    """One machine, its clock, and everything that it has wanted since `clear`.

    `checksums` are by block number, whosever arena it is in.
    """

    core: WorkerCore
    scheduler: Scheduler
    settings: CoreSettings
    now: float = 100.0
    effects: list[do.Effect] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    hashes_at_once: bool = True

    @property
    def name(self) -> WorkerName:
        return self.settings.name

    @property
    def ledger(self) -> Ledger:
        return self.scheduler.ledger

    def handle(self, event: ev.Event) -> None:
        effects = self.core.handle(event, self.now)
        self.core.check()
        self.effects += effects
        if any(isinstance(effect, do.RunStep) and not effect.batch.follows for effect in effects):
            self.handle(ev.StepTaken())
        if self.hashes_at_once:
            for effect in effects:
                if isinstance(effect, do.HashBlocks):
                    self.hashed(effect)

    def hashed(self, effect: do.HashBlocks) -> None:
        """The blocks of `effect` were hashed: to what `checksums` has for them, else to 0."""
        checksums = [self.checksums.get(block, 0) for block in effect.blocks]
        self.handle(ev.BlocksHashed(effect.hash_id, array("Q", checksums)))

    def tick(self, after_s: float = 1.0) -> None:
        self.now += after_s
        self.handle(ev.Tick())

    def clear(self) -> None:
        self.effects.clear()

    def from_broker(
        self, kind: str, body: msgspec.Struct | None = None, *raw: bytes, **header: Any
    ) -> None:
        frames = ([] if body is None else [encode_body(body)]) + list(raw)
        decoded = decode_header(encode_header(kind, **header))
        self.handle(ev.FromBroker(decoded, tuple(frames)))

    def from_peer(
        self, sender: WorkerName, kind: str, body: msgspec.Struct, *raw: bytes, **header: Any
    ) -> None:
        decoded = decode_header(encode_header(kind, **header))
        self.handle(ev.FromPeer(sender, decoded, (encode_body(body), *raw)))

    def relay(self, sent: Sent, sender: WorkerName) -> None:
        """Hand over what another machine sent to this one."""
        bodies = () if sent.body is None else (encode_body(sent.body),)
        self.handle(ev.FromPeer(sender, sent.header, (*bodies, *sent.raw)))

    def dispatch(
        self,
        prompt: list[int],
        *,
        number: int = 1,
        n: int = 1,
        prefill: WorkerName | None = None,
        forced: tuple[int, ...] = (),
        budget_ms: int = 60_000,
        priority: int = 0,
        **sampling: Any,
    ) -> RequestId:
        """A request of token ids, as the broker sends it."""
        request_id = RequestId(number.to_bytes(16, "big"))
        route = m.Route(
            prefill_worker=prefill.worker_id if prefill else None,
            prefill_epoch=prefill.epoch if prefill else 0,
            num_forced=len(forced),
        )
        body = m.Generate(
            prompt_kind="tokens", sampling=SamplingParams(**sampling), priority=priority
        )
        raw = [encode_body(body), pack_u32(prompt)] + ([pack_u32(forced)] if forced else [])
        self.from_broker(
            m.DISPATCH,
            route,
            *raw,
            request_id=request_id,
            attempt=Attempt(1, n),
            budget_ms=budget_ms,
        )
        return request_id

    def batch(self) -> Batch:
        """The running step."""
        assert self.scheduler.step is not None
        return self.scheduler.step

    def step(self, *tokens: int) -> None:
        """The running step returns with these tokens for the rows that sample."""
        assert self.scheduler.step is not None
        batch = self.scheduler.step
        rows = [row for row in batch.rows if row.sample is not None]
        assert len(rows) == len(tokens)
        drawn = tuple(
            Drawn(row.sequence_id, (token,)) for row, token in zip(rows, tokens, strict=True)
        )
        self.now += 0.01
        self.step_done(StepResult(batch.step_id, drawn, 0.01, 0.01))

    def step_done(self, result: StepResult) -> None:
        """A step returns, and the one behind it begins if it was made ahead."""
        self.handle(ev.StepDone(result, self.now))
        if self.scheduler.step is not None and self.scheduler.step.follows:
            fill(self.scheduler.step, result)
            self.handle(ev.StepTaken())

    def sent(self, kind: str) -> list[Sent]:
        found = []
        for effect in self.effects:
            if isinstance(effect, do.SendBroker | do.SendPeer):
                header = decode_header(effect.frames[0])
                if header.kind == kind:
                    target = effect.peer if isinstance(effect, do.SendPeer) else None
                    body_type = BODIES.get(kind)
                    body = decode_body(effect.frames[1], body_type) if body_type else None
                    raw = tuple(effect.frames[2 if body_type else 1 :])
                    found.append(Sent(target, header, body, raw))
        return found

    def rows(self) -> list[StepRow]:
        return [
            row
            for effect in self.effects
            if isinstance(effect, do.SendBroker) and decode_header(effect.frames[0]).kind == m.STEP
            for row in decode_step(effect.frames)
        ]

    def tokens(self) -> list[int]:
        return [token for row in self.rows() for token in unpack_u32(row.token_ids)]

    def failure(self) -> m.Failure:
        (sent,) = self.sent(m.FAILED)
        assert isinstance(sent.body, m.Failure)
        return sent.body

    def assert_all_free(self) -> None:
        counts = self.ledger.counts()
        assert counts.num_held == counts.num_granted == counts.num_quarantined == 0, counts
        assert counts.num_evictable == counts.num_cached, counts


def arena_of(bench: Bench) -> ev.ArenaShape:
    """What a worker that maps the arena of `bench` finds."""
    settings = bench.settings
    block_bytes = settings.contract.block_bytes
    return ev.ArenaShape(settings.num_blocks, block_bytes, settings.arena_generation)


MakeWorker = Callable[..., Bench]


@pytest.fixture
def make_worker() -> MakeWorker:
    """A registered worker; keywords change its settings."""

    def make(
        role: str = "both", *, num_blocks: int = 64, num_drafts: int = 0, **changes: Any
    ) -> Bench:
        name = WorkerName(WorkerId(f"{role}-0"), 7)
        facts: dict[str, Any] = {
            "name": name,
            "role": role,
            "model": "sim",
            "contract": make_contract(),
            "process": m.ProcessName(boot_id="b", pid_namespace="n", pid=1, start_ticks=1),
            "vocab_size": VOCAB_SIZE,
            "max_context": 256,
            "num_blocks": num_blocks,
            "arena_generation": 3,
            "link": "ipc://link",
            "arena_socket": "/arena",
            "broker": "tcp://there",
            "placement": "remote",
        }
        settings = CoreSettings(**facts | changes)
        scheduler = Scheduler(
            Ledger(num_blocks),
            SchedulerSettings(step_tokens=256, chunk_tokens=128, num_drafts=num_drafts),
        )
        bench = Bench(WorkerCore(settings, scheduler, SimVocabulary()), scheduler, settings)
        bench.handle(ev.Tick())
        bench.from_broker(m.REGISTERED, m.Registered(broker_epoch=1, beat_s=1.0))
        bench.clear()
        return bench

    return make


@pytest.fixture
def link() -> Callable[..., None]:
    """Introduce an owner and a prefill worker to each other, arenas mapped unless by TCP."""

    def introduce(owner: Bench, prefill: Bench, *, is_mapped: bool = True) -> None:
        benches = (owner, prefill)
        rows = tuple(
            m.Peer(
                worker_id=bench.name.worker_id,
                epoch=bench.name.epoch,
                role=bench.settings.role,
                link="ipc://link",
                contract=bench.settings.contract,
                process=bench.settings.process,
            )
            for bench in benches
        )
        for bench, other in (benches, benches[::-1]):
            bench.from_broker(m.PEERS, m.Peers(peers=rows))
            bench.handle(ev.PeerConnected(other.name, ("tcp://bulk",)))
        for bench, other in (benches, benches[::-1]):
            other.relay(bench.sent(m.PEER_HELLO)[0], bench.name)
        if is_mapped and owner.settings.transfer != "tcp":
            prefill.handle(ev.ArenaAttached(owner.name, arena_of(owner)))
            owner.handle(ev.ArenaMapped(prefill.name))
        for bench in benches:
            for effect in [e for e in bench.effects if isinstance(e, do.ProbeLink)]:
                bench.handle(ev.LinkProbed(effect.probe_id, 1e9, 1e-5, "one node"))
        owner.clear()
        prefill.clear()

    return introduce


@pytest.fixture
def tokens_of() -> Callable[[int], list[int]]:
    """A prompt of that many tokens."""

    def make(count: int) -> list[int]:
        return array("I", (3 + i % 400 for i in range(count))).tolist()

    return make
