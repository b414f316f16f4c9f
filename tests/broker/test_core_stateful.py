"""Random histories: workers and clients that check their own side of every rule.

Token `i` of request `r` is a function of both, so that a token that is lost, repeated or taken
from another request is seen by whoever gets it. Messages wait in queues and may be lost; workers
are killed, cut off and restarted.
"""

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.broker.conftest import make_process, request_id
from tests.conftest import make_contract

from llmrt.broker.core import BrokerCore
from llmrt.broker.effects import Effect, SendClient, SendWorker
from llmrt.broker.events import (
    ClientMessage,
    ClientUnroutable,
    Event,
    ProcessDied,
    Tick,
    WorkerMessage,
    WorkerUnroutable,
)
from llmrt.broker.settings import BrokerSettings
from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.envelope import decode_body, decode_header, encode_body, encode_header
from llmrt.wire.ids import NO_ATTEMPT, Attempt, ClientId
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import decode_step, encode_step, make_row, token_ids_of

CLIENTS = [ClientId(bytes([65 + i]) * 16) for i in range(2)]
ROLES = {"b0": "both", "d0": "decode", "d1": "decode", "p0": "prefill"}
LOST_KINDS = [m.DISPATCH, m.CANCEL, m.PEERS, m.STEP, m.FINISHED, m.HEARTBEAT]
BODY = encode_body(m.Generate(prompt_kind="text", sampling=SamplingParams()))


def token(number: int, position: int) -> int:
    return (number * 7919 + position * 104729) % 50_000


def length(number: int) -> int:
    return 2 + number % 5


@dataclass
class Work:
    attempt: Attempt
    seq: int


@dataclass
class Worker:
    """One life. `inbox` holds what the broker sent and the worker has not read."""

    name: str
    epoch: int
    routing_id: bytes
    is_cut: bool = False
    is_registered: bool = False
    inbox: deque[list[bytes]] = field(default_factory=deque)
    outbox: deque[list[bytes]] = field(default_factory=deque)
    work: dict[bytes, Work] = field(default_factory=dict)
    newest: dict[bytes, Attempt] = field(default_factory=dict)

    def read(self) -> None:
        frames = self.inbox.popleft()
        header = decode_header(frames[0])
        known = self.newest.get(header.request_id, NO_ATTEMPT)
        if header.kind == m.DISPATCH:
            self.dispatched(frames)
        elif header.kind == m.CANCEL:
            self.newest[header.request_id] = max(known, header.attempt)
            held = self.work.get(header.request_id)
            if held is not None and held.attempt <= header.attempt:
                del self.work[header.request_id]
        elif header.kind == m.UNKNOWN_WORKER:
            self.is_registered = False
            self.register()
        elif header.kind == m.REGISTERED:
            self.is_registered = True
        elif header.kind == m.REFUSED:
            raise AssertionError("no name is used twice here")

    def dispatched(self, frames: list[bytes]) -> None:
        header, route = decode_header(frames[0]), decode_body(frames[1], m.Route)
        assert ROLES[self.name] != "prefill", "a prefill worker owns nothing"
        assert header.budget_ms > 0
        assert header.attempt > self.newest.get(header.request_id, NO_ATTEMPT)
        assert route.num_forced == header.seq
        assert frames[2:4] == [BODY, b"prompt"]
        number = int.from_bytes(header.request_id, "big")
        if route.num_forced:
            forced = unpack_u32(frames[-1]).tolist()
            assert forced == [token(number, i) for i in range(route.num_forced)]
        self.newest[header.request_id] = header.attempt
        self.work[header.request_id] = Work(header.attempt, header.seq)

    def held(self) -> tuple[m.Held, ...]:
        return tuple(
            m.Held(i, work.attempt.epoch, work.attempt.n, "decode") for i, work in self.work.items()
        )

    def register(self) -> None:
        card = m.Register(
            worker_id=self.name,
            epoch=self.epoch,
            role=ROLES[self.name],
            model="tiny",
            contract=make_contract(),
            max_context=64,
            num_blocks=8,
            max_running=4,
            link="",
            broker_epoch_seen=0,
            process=make_process(self.epoch),
            holding=self.held(),
        )
        self.outbox.append([encode_header(m.REGISTER), encode_body(card)])

    def beat(self) -> None:
        body = m.Heartbeat(load=m.Load(num_running=len(self.work)), holding=self.held())
        self.outbox.append([encode_header(m.HEARTBEAT), encode_body(body)])

    def run_step(self) -> None:
        """One token for each request; those that are complete end."""
        rows = []
        for name, work in self.work.items():
            number = int.from_bytes(name, "big")
            if work.seq < length(number):
                ids = [token(number, work.seq)]
                rows.append(make_row(request_id(number), work.attempt, work.seq, ids, "x"))
                work.seq += 1
        if rows:
            self.outbox.append(encode_step(rows))
        for name, work in list(self.work.items()):
            if work.seq == length(int.from_bytes(name, "big")):
                self.outbox.append(self.end(name, work))
                del self.work[name]

    def end(self, name: bytes, work: Work) -> list[bytes]:
        usage = m.Usage(prompt_tokens=1, completion_tokens=work.seq)
        body = m.Finished(
            finish_reason="stop",
            usage=usage,
            timings_ms={},
            decode_worker=self.name,
            prefill_worker=self.name,
        )
        header = encode_header(m.FINISHED, name, attempt=work.attempt, seq=work.seq)
        return [header, encode_body(body)]


@dataclass
class Reader:
    """A client's side of one request."""

    number: int
    client_id: ClientId
    next_seq: int = 0
    attempt: Attempt = NO_ATTEMPT
    end: str | None = None
    may_repeat: bool = False


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = BrokerCore(BrokerSettings(default_deadline_s=60.0, max_live=6), epoch=1)
        self.now = 50.0
        self.epoch = 0
        self.number = 0
        self.workers: dict[str, Worker] = {}
        self.lives: dict[bytes, Worker] = {}
        self.readers: dict[bytes, Reader] = {}
        self.unreachable: set[ClientId] = set()
        self.lost: set[str] = set()
        for name in ROLES:
            self.start(name)

    # The network

    def give(self, event: Event) -> None:
        self.perform(self.core.handle(event, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendWorker):
                worker = self.lives.get(effect.routing_id)
                if worker is None:
                    self.give(WorkerUnroutable(effect.routing_id, effect.frames))
                elif not self.is_lost(effect.frames):
                    worker.inbox.append(effect.frames)
            elif isinstance(effect, SendClient):
                if effect.client_id in self.unreachable:
                    self.give(ClientUnroutable(effect.client_id, effect.frames))
                else:
                    self.read(effect.client_id, effect.frames)

    def read(self, client_id: ClientId, frames: list[bytes]) -> None:
        header = decode_header(frames[0])
        if header.kind == m.EVENTS:
            for row in decode_step(frames):
                reader = self.readers[row.request_id]
                assert reader.client_id == client_id
                if row.seq < reader.next_seq:
                    assert reader.may_repeat, "a token came twice"
                    continue
                assert reader.end is None, "a token came after the end"
                assert row.seq == reader.next_seq, "a token is missing"
                assert row.attempt >= reader.attempt, "an old attempt speaks"
                reader.attempt = row.attempt
                expected = [token(reader.number, row.seq + i) for i in range(row.num_tokens)]
                assert token_ids_of(row) == expected
                reader.next_seq += row.num_tokens
        elif header.kind in (m.FINISHED, m.FAILED):
            reader = self.readers[header.request_id]
            assert reader.end is None or reader.may_repeat, "it ended twice"
            assert reader.end in (None, header.kind), "two ends, two stories"
            reader.end = header.kind
            if header.kind == m.FINISHED:
                assert header.seq == reader.next_seq == length(reader.number)
                assert header.attempt >= reader.attempt

    def post(self, worker: Worker) -> None:
        frames = worker.outbox.popleft()
        if not self.is_lost(frames):
            self.give(WorkerMessage(worker.routing_id, decode_header(frames[0]), frames))

    def is_lost(self, frames: list[bytes]) -> bool:
        kind = decode_header(frames[0]).kind
        is_lost = kind in self.lost
        self.lost.discard(kind)
        return is_lost

    def from_client(self, kind: str, reader: Reader, *frames: bytes) -> None:
        self.unreachable.discard(reader.client_id)
        for other in self.readers.values():
            # What an unreachable client missed is sent again when it is heard.
            other.may_repeat = other.may_repeat or other.client_id == reader.client_id
        seq = reader.next_seq if kind in (m.GENERATE, m.ACK) else 0
        header = encode_header(kind, request_id(reader.number), seq=seq)
        event = ClientMessage(reader.client_id, decode_header(header), [header, *frames])
        self.give(event)

    def some(self, choice: int) -> Worker:
        return list(self.workers.values())[choice % len(self.workers)]

    # Rules

    def start(self, name: str) -> None:
        self.epoch += 1
        worker = Worker(name, self.epoch, f"{name}/{self.epoch}".encode())
        self.workers[name] = self.lives[worker.routing_id] = worker
        worker.register()
        self.post(worker)

    @rule(name=st.sampled_from(sorted(ROLES)))
    def restart(self, name: str) -> None:
        if name not in self.workers:
            self.start(name)

    @rule(choice=st.integers(0, 9), reads=st.booleans(), sends=st.booleans())
    def work(self, choice: int, reads: bool, sends: bool) -> None:
        """One turn of one worker's loop; what it does not read or send waits."""
        self.turn(self.some(choice), reads=reads, sends=sends)

    @rule(count=st.integers(1, 3), seconds=st.sampled_from([0.0, 0.3]))
    def work_all(self, count: int, seconds: float) -> None:
        for _ in range(count):
            for worker in list(self.workers.values()):
                self.turn(worker, reads=True, sends=True)
            self.advance(seconds)

    def turn(self, worker: Worker, *, reads: bool, sends: bool) -> None:
        while reads and worker.inbox:
            worker.read()
        worker.run_step()
        worker.beat()
        while sends and worker.outbox and not worker.is_cut:
            self.post(worker)

    @rule(kind=st.sampled_from(LOST_KINDS))
    def lose_next(self, kind: str) -> None:
        """The next message of this kind is lost between two living processes.

        Registering is not among them: real workers repeat it until it is answered.
        """
        self.lost.add(kind)

    @precondition(lambda self: len(self.workers) > 1)
    @rule(choice=st.integers(0, 9))
    def kill(self, choice: int) -> None:
        worker = self.some(choice)
        del self.workers[worker.name], self.lives[worker.routing_id]
        self.give(ProcessDied(make_process(worker.epoch)))

    @rule(choice=st.integers(0, 9))
    def cut_or_mend(self, choice: int) -> None:
        worker = self.some(choice)
        worker.is_cut = not worker.is_cut

    @rule(client=st.sampled_from(CLIENTS))
    def ask(self, client: ClientId) -> None:
        self.number += 1
        reader = Reader(self.number, client)
        self.readers[request_id(self.number)] = reader
        self.from_client(m.GENERATE, reader, BODY, b"prompt")

    @precondition(lambda self: self.readers)
    @rule(choice=st.integers(0, 99), kind=st.sampled_from([m.CANCEL, m.ACK, m.BEAT, m.GENERATE]))
    def say(self, choice: int, kind: str) -> None:
        reader = list(self.readers.values())[choice % len(self.readers)]
        if kind == m.GENERATE:
            if reader.end is None:
                self.from_client(kind, reader, BODY, b"prompt")
        else:
            self.from_client(kind, reader)

    @rule(client=st.sampled_from(CLIENTS))
    def disconnect(self, client: ClientId) -> None:
        self.unreachable.add(client)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.give(Tick())
            after = self.core.next_deadline()
            assert after is None or after > self.now, "the tick did not consume its deadline"
        self.now = end

    @invariant()
    def is_sound(self) -> None:
        self.core.check()

    def teardown(self) -> None:
        """Nothing hangs: whatever went on, every request ends by its deadline."""
        for client in CLIENTS:
            mine = [reader for reader in self.readers.values() if reader.client_id == client]
            if mine:
                self.from_client(m.BEAT, mine[0])
        self.advance(61.0)
        self.core.check()
        for client in CLIENTS:
            for reader in self.readers.values():
                if reader.client_id == client and reader.end is None:
                    # Its end was told while it could not be reached, more than 30 s ago.
                    self.from_client(m.GENERATE, reader, BODY, b"prompt")
                    self.advance(61.0)
                    assert reader.end is not None, f"request {reader.number} hangs"
        self.advance(1000.0)
        counters = self.core.counters
        assert self.core.next_deadline() is None
        assert counters["requests_admitted"] == sum(
            counters[f"requests_{o}"] for o in ("finished", "failed", "cancelled", "expired")
        )


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
