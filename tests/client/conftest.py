"""A broker by the protocol, on a real socket, that does what a test's script says."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import zmq

from llmrt.actor import sockets
from llmrt.wire import messages
from llmrt.wire.arrays import pack_u32
from llmrt.wire.envelope import (
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_RAW_BYTES,
    Header,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.messages import Failure, Finished, Generate, PsReply, Usage, Welcome
from llmrt.wire.steps import encode_step, make_row

WAIT_S = 20.0


@dataclass(frozen=True)
class Message:
    client_id: bytes
    header: Header
    frames: list[bytes]

    @property
    def generate(self) -> Generate:
        return decode_body(self.frames[1], Generate)


Script: TypeAlias = "Callable[[ScriptedBroker, Message], None]"


class ScriptedBroker:
    """Answers hello, beat, ps and tokenize; `script` answers `generate`."""

    def __init__(
        self, script: Script, endpoint: str = "tcp://127.0.0.1:*", *, epoch: int = 1
    ) -> None:
        self.epoch = epoch
        self._script = script
        self._context = sockets.context()
        self._router = sockets.router(self._context)
        self.endpoint = sockets.bind(self._router, endpoint)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._orders = self._context.socket(zmq.PAIR)
        self._orders.bind("inproc://orders")
        self._ordered = self._context.socket(zmq.PAIR)
        self._ordered.connect("inproc://orders")
        self.is_running = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def expect(self, kind: str) -> Message:
        """The next message of `kind`, whatever came before it."""
        while True:
            message = self._inbox.get(timeout=WAIT_S)
            if message.header.kind == kind:
                return message

    def acked_seq(self) -> int:
        """The highest number acknowledged in what has come and was not looked at."""
        seqs = [0]
        while not self._inbox.empty():
            header = self._inbox.get().header
            if header.kind == messages.ACK:
                seqs.append(header.seq)
        return max(seqs)

    def order(self, client_id: bytes, frames: list[bytes]) -> None:
        """Send from the thread of the test."""
        self._orders.send_multipart([client_id, *frames])

    def send(self, to: Message, frames: list[bytes]) -> None:
        """Send from a script."""
        self._router.send_multipart([to.client_id, *frames])

    def stop(self) -> None:
        self.is_running = False
        self._orders.send_multipart([b"stop"])
        self._thread.join()
        for socket in (self._router, self._orders, self._ordered):
            socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._ordered, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._router in ready:
                client_id, *frames = self._router.recv_multipart()
                message = Message(client_id, decode_header(frames[0]), frames)
                self._answer(message)
                self._inbox.put(message)
            if self._ordered in ready:
                order = self._ordered.recv_multipart()
                if order == [b"stop"]:
                    return
                self._router.send_multipart(order)

    def _answer(self, message: Message) -> None:
        request_id = message.header.request_id
        match message.header.kind:
            case messages.HELLO:
                self.send(message, welcome_frames(self.epoch))
            case messages.BEAT:
                beat = encode_header(messages.BEAT, attempt=Attempt(self.epoch, 0))
                self.send(message, [beat])
            case messages.PS:
                reply = PsReply(
                    broker_epoch=self.epoch, uptime_s=1.0, workers=(), requests=(), counters={}
                )
                self.send(
                    message, [encode_header(messages.PS_REPLY, request_id), encode_body(reply)]
                )
            case messages.TOKENIZE:
                ids = pack_u32(message.frames[2])
                self.send(message, [encode_header(messages.TOKENIZED, request_id), ids])
            case messages.GENERATE:
                self._script(self, message)


def welcome_frames(epoch: int = 1, *, beat_s: float = 1.0) -> list[bytes]:
    welcome = Welcome(
        broker_epoch=epoch,
        max_body_bytes=MAX_BODY_BYTES,
        max_raw_bytes=MAX_RAW_BYTES,
        max_frames=MAX_FRAMES,
        beat_s=beat_s,
    )
    return [encode_header(messages.WELCOME), encode_body(welcome)]


def events_frames(request_id: bytes, seq: int, token_ids: list[int], text: str) -> list[bytes]:
    row = make_row(RequestId(request_id), Attempt(1, 1), seq, token_ids, text)
    return encode_step([row], kind=messages.EVENTS)


def finished_frames(request_id: bytes, num_tokens: int) -> list[bytes]:
    finished = Finished(
        finish_reason="length",
        usage=Usage(prompt_tokens=3, completion_tokens=num_tokens),
        timings_ms={"prefill": 1.0},
        decode_worker="decode-0",
        prefill_worker="prefill-0",
        num_drafted=4,
        num_accepted=2,
        placement="faster there",
        placement_ms={"here": 2.0, "there": 1.0},
    )
    return [encode_header(messages.FINISHED, request_id, seq=num_tokens), encode_body(finished)]


def failed_frames(request_id: bytes, code: str, message: str) -> list[bytes]:
    return [
        encode_header(messages.FAILED, request_id),
        encode_body(Failure(code=code, message=message)),
    ]


def count(broker: ScriptedBroker, message: Message) -> None:
    """Tokens 100, 101, ... with the texts `0 `, `1 `, ... from the wanted one to max_tokens."""
    request_id = message.header.request_id
    num_tokens = message.generate.sampling.max_tokens or 3
    for seq in range(message.header.seq, num_tokens):
        broker.send(message, events_frames(request_id, seq, [100 + seq], f"{seq} "))
    broker.send(message, finished_frames(request_id, num_tokens))


def one_token(broker: ScriptedBroker, message: Message) -> None:
    """The first token, and no end."""
    broker.send(message, events_frames(message.header.request_id, 0, [100], "0 "))


def silence(broker: ScriptedBroker, message: Message) -> None:
    """Nothing at all."""


MakeBroker: TypeAlias = Callable[..., ScriptedBroker]


@pytest.fixture
def make_broker() -> Iterator[MakeBroker]:
    brokers: list[ScriptedBroker] = []

    def make(
        script: Script = count, endpoint: str = "tcp://127.0.0.1:*", *, epoch: int = 1
    ) -> ScriptedBroker:
        brokers.append(ScriptedBroker(script, endpoint, epoch=epoch))
        return brokers[-1]

    yield make
    for broker in brokers:
        if broker.is_running:
            broker.stop()
