"""A broker's machine in virtual time, with scripted clients and workers around it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from tests.conftest import make_contract

from llmrt.broker.core import BrokerCore
from llmrt.broker.effects import Effect, SendClient, SendWorker
from llmrt.broker.events import ClientMessage, Event, Tick, WorkerMessage
from llmrt.broker.settings import BrokerSettings
from llmrt.wire import messages as m
from llmrt.wire.envelope import (
    NO_BUDGET,
    Header,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from llmrt.wire.ids import NO_ATTEMPT, Attempt, ClientId, RequestId
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import StepRow, decode_step, encode_step, make_row

EPOCH = 1000
ALICE, BOB = ClientId(b"alice" * 3 + b"-"), ClientId(b"bob--" * 3 + b"-")


class Sent(NamedTuple):
    """A message that the broker sent."""

    to: bytes
    header: Header
    frames: list[bytes]

    @property
    def kind(self) -> str:
        return self.header.kind

    @property
    def failure(self) -> m.Failure:
        return decode_body(self.frames[1], m.Failure)

    @property
    def route(self) -> m.Route:
        return decode_body(self.frames[1], m.Route)

    @property
    def rows(self) -> list[StepRow]:
        return decode_step(self.frames)

    @property
    def seqs(self) -> list[int]:
        return [row.seq for row in self.rows]


def request_id(number: int) -> RequestId:
    return RequestId(number.to_bytes(16, "big"))


def make_process(pid: int) -> m.ProcessName:
    return m.ProcessName(boot_id="boot", pid_namespace="ns", pid=pid, start_ticks=7)


class Rig:
    """Sends to the machine what clients and workers would, and checks it after every event."""

    def __init__(self, **settings: Any) -> None:
        self.core = BrokerCore(BrokerSettings(**settings), EPOCH)
        self.now = 100.0
        self.seen: list[Effect] = []
        self._holding: dict[bytes, dict[bytes, m.Held]] = defaultdict(dict)

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        self.seen += effects
        for sent in to_workers(effects):
            header, holding = sent.header, self._holding[sent.to]
            if sent.kind == m.DISPATCH:
                holding[header.request_id] = m.Held(
                    header.request_id, header.epoch, header.n, "decode"
                )
            elif sent.kind == m.CANCEL:
                holding.pop(header.request_id, None)
        return effects

    def advance(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at each deadline on the way."""
        end, effects = self.now + seconds, []
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self.handle(Tick())
            after = self.core.next_deadline()
            assert after is None or after > self.now, "the tick did not consume its deadline"
        self.now = end
        return effects

    def client(
        self,
        kind: str,
        number: int | None = None,
        *frames: bytes,
        client: ClientId = ALICE,
        seq: int = 0,
        budget_ms: int = NO_BUDGET,
    ) -> list[Effect]:
        name = b"" if number is None else request_id(number)
        header = encode_header(kind, name, seq=seq, budget_ms=budget_ms)
        event = ClientMessage(client, decode_header(header), [header, *frames])
        return self.handle(event)

    def worker(
        self,
        routing_id: bytes,
        kind: str,
        *frames: bytes,
        number: int | None = None,
        attempt: Attempt = NO_ATTEMPT,
        seq: int = 0,
    ) -> list[Effect]:
        name = b"" if number is None else request_id(number)
        header = encode_header(kind, name, attempt=attempt, seq=seq)
        return self.handle(WorkerMessage(routing_id, decode_header(header), [header, *frames]))

    def hello(self, client: ClientId = ALICE, pid: int | None = None) -> list[Effect]:
        process = None if pid is None else make_process(pid)
        return self.client(m.HELLO, None, encode_body(m.Hello(process=process)), client=client)

    def generate(
        self,
        number: int = 1,
        *,
        model: str | None = None,
        prompt: bytes = b"prompt",
        **options: Any,
    ) -> list[Effect]:
        body = m.Generate(prompt_kind="text", sampling=SamplingParams(), model=model)
        return self.client(m.GENERATE, number, encode_body(body), prompt, **options)

    def register(self, name: str, role: str = "both", **options: Any) -> list[Effect]:
        """Register a worker whose routing id is its name, unless told otherwise."""
        fields: dict[str, Any] = {
            "worker_id": name,
            "epoch": 1,
            "role": role,
            "model": "tiny",
            "contract": make_contract(),
            "max_context": 1024,
            "num_blocks": 64,
            "max_running": 32,
            "link": f"ipc://{name}",
            "broker_epoch_seen": 0,
            "process": make_process(sum(name.encode())),
        }
        routing_id = options.pop("routing_id", name.encode())
        card = m.Register(**{**fields, **options})
        return self.worker(routing_id, m.REGISTER, encode_body(card))

    def heartbeat(
        self, name: str, holding: Sequence[m.Held] | None = None, **load: Any
    ) -> list[Effect]:
        """Names all that the worker was given and has not ended, unless told otherwise."""
        if holding is None:
            holding = [*self._holding[name.encode()].values()]
        beat = m.Heartbeat(load=m.Load(**load), holding=tuple(holding))
        return self.worker(name.encode(), m.HEARTBEAT, encode_body(beat))

    def step(self, name: str, *rows: StepRow) -> list[Effect]:
        return self.worker(name.encode(), m.STEP, *encode_step(rows)[1:])

    def finish(
        self, name: str, number: int = 1, n: int = 1, seq: int = 0, reason: str = "stop"
    ) -> list[Effect]:
        body = m.Finished(
            finish_reason=reason,
            usage=m.Usage(prompt_tokens=3, completion_tokens=seq),
            timings_ms={"decode": 1.0},
            decode_worker=name,
            prefill_worker=name,
            num_drafted=8,
            num_accepted=3,
        )
        attempt = Attempt(EPOCH, n)
        self._holding[name.encode()].pop(request_id(number), None)
        return self.worker(
            name.encode(), m.FINISHED, encode_body(body), number=number, attempt=attempt, seq=seq
        )

    @property
    def counters(self) -> dict[str, int]:
        return self.core.counters


def row(number: int, seq: int, *token_ids: int, n: int = 1, text: str = "x") -> StepRow:
    return make_row(request_id(number), Attempt(EPOCH, n), seq, token_ids or [seq], text)


def held(number: int, n: int = 1, stage: str = "decode") -> m.Held:
    return m.Held(request_id(number), EPOCH, n, stage)


def to_clients(effects: Iterable[Effect], kind: str | None = None) -> list[Sent]:
    sent = [
        Sent(e.client_id, decode_header(e.frames[0]), e.frames)
        for e in effects
        if isinstance(e, SendClient)
    ]
    return [message for message in sent if kind in (None, message.kind)]


def to_workers(effects: Iterable[Effect], kind: str | None = None) -> list[Sent]:
    sent = [
        Sent(e.routing_id, decode_header(e.frames[0]), e.frames)
        for e in effects
        if isinstance(e, SendWorker)
    ]
    return [message for message in sent if kind in (None, message.kind)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    return Rig
