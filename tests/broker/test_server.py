"""A broker on real sockets, with scripted peers on the same loop."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.broker.conftest import Sent, request_id
from tests.conftest import make_contract

from llmrt.actor import sockets
from llmrt.actor.channel import Channel
from llmrt.actor.process import this_process
from llmrt.broker.server import serve
from llmrt.broker.settings import BrokerSettings
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_body, decode_header, encode_body, encode_header
from llmrt.wire.errors import AddressInUse
from llmrt.wire.ids import Attempt
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import encode_step, make_row

pytestmark = pytest.mark.integration


class Peer:
    """A DEALER connected to the broker, with what came in a queue."""

    def __init__(self, context: sockets.Context, endpoint: str, identity: bytes) -> None:
        socket = sockets.dealer(context, identity)
        sockets.connect(socket, endpoint)
        self._inbox: asyncio.Queue[Sent] = asyncio.Queue()
        self.unsent: list[list[bytes]] = []
        self.channel = Channel(socket, self._take, lambda frames, _: self.unsent.append(frames))

    def send(self, kind: str, *frames: bytes, **header: Any) -> None:
        self.channel.send([encode_header(kind, **header), *frames])

    async def receive(self, kind: str) -> Sent:
        """The next message of a kind; others before it are dropped."""
        while (sent := await asyncio.wait_for(self._inbox.get(), 20)).kind != kind:
            pass
        return sent

    def register(self, name: str, process: m.ProcessName | None = None) -> None:
        card = m.Register(
            worker_id=name,
            epoch=1,
            role="both",
            model="tiny",
            contract=make_contract(),
            max_context=64,
            num_blocks=8,
            max_running=4,
            link="ipc://none",
            broker_epoch_seen=0,
            process=process or this_process(),
        )
        self.send(m.REGISTER, encode_body(card))

    def _take(self, frames: list[bytes]) -> None:
        self._inbox.put_nowait(Sent(b"", decode_header(frames[0]), frames))


class Site:
    """One running broker and the peers that a test connects to it."""

    def __init__(self, client_endpoint: str, worker_endpoint: str) -> None:
        self.endpoints = client_endpoint, worker_endpoint
        self._context = sockets.context()
        self._peers: list[Peer] = []

    def client(self, name: bytes = b"c" * 16) -> Peer:
        return self._connect(self.endpoints[0], name)

    def worker(self, name: bytes) -> Peer:
        return self._connect(self.endpoints[1], name)

    def _connect(self, endpoint: str, name: bytes) -> Peer:
        peer = Peer(self._context, endpoint, name)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.channel.close()
        self._context.term()


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    settings = BrokerSettings(
        bind=f"ipc://{folder}/clients", worker_bind=f"ipc://{folder}/workers", validate=True
    )
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    broker = asyncio.ensure_future(
        serve(settings, on_ready=lambda *endpoints: ready.set_result(endpoints))
    )
    either: set[asyncio.Future[Any]] = {ready, broker}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if broker.done():
        broker.result()
    site = Site(*ready.result())
    try:
        yield site
        assert not broker.done(), "the broker has ended by itself"
    finally:
        site.close()
        broker.cancel()
        await asyncio.wait({broker})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def generate(client: Peer, number: int) -> None:
    body = m.Generate(prompt_kind="text", sampling=SamplingParams())
    client.send(m.GENERATE, encode_body(body), b"prompt", request_id=request_id(number))


def step(worker: Peer, number: int, attempt: Attempt, seq: int) -> None:
    frames = encode_step([make_row(request_id(number), attempt, seq, [seq], "x")])
    worker.channel.send(frames)


def test_a_request_goes_through_real_sockets(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site(tmp_path) as here:
            worker, client = here.worker(b"w"), here.client()
            worker.register("w0")
            await worker.receive(m.PEERS)
            client.send(m.HELLO, encode_body(m.Hello(process=this_process())))
            await client.receive(m.WELCOME)
            generate(client, 1)
            dispatch = await worker.receive(m.DISPATCH)
            step(worker, 1, dispatch.header.attempt, 0)
            assert (await client.receive(m.EVENTS)).seqs == [0]
            body = m.Failure(code="out_of_blocks", message="no room")
            worker.send(
                m.FAILED,
                encode_body(body),
                request_id=request_id(1),
                attempt=dispatch.header.attempt,
            )
            assert (await client.receive(m.FAILED)).failure == body

    run(scenario())


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[bytes], m.ProcessName]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            ticks = int(stat.rpartition(")")[2].split()[19])
            name = msgspec.structs.replace(this_process(), pid=process.pid, start_ticks=ticks)
            yield process, name
        finally:
            process.kill()


def test_a_killed_worker_process_is_noticed_at_once(tmp_path: Path) -> None:
    """Long before its beats are missed, and its late rows are not passed on."""

    async def scenario(process: "subprocess.Popen[bytes]", name: m.ProcessName) -> None:
        async with site(tmp_path) as here:
            first, second = here.worker(b"1"), here.worker(b"2")
            first.register("w1", name)
            await first.receive(m.PEERS)
            client = here.client()
            generate(client, 1)
            dispatch = await first.receive(m.DISPATCH)
            step(first, 1, dispatch.header.attempt, 0)
            await client.receive(m.EVENTS)
            second.register("w2")
            await second.receive(m.PEERS)
            process.kill()
            again = await second.receive(m.DISPATCH)
            assert (again.header.n, again.route.num_forced) == (2, 1)
            step(first, 1, dispatch.header.attempt, 1)
            step(second, 1, again.header.attempt, 1)
            events = await client.receive(m.EVENTS)
            assert [row.attempt.n for row in events.rows] == [2]

    with other_process() as (process, name):
        run(scenario(process, name))


def test_no_socket_is_left_in_the_file_system(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site(tmp_path):
            assert set(os.listdir(tmp_path)) == {"clients", "workers"}

    run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_garbage_is_answered_and_the_broker_lives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site(tmp_path) as here:
            client, worker = here.client(), here.worker(b"w")
            for frames in ([b""], [b"\xff" * 2000], [b"x"] * 40, [encode_header("dance")]):
                client.channel.send(frames)
                worker.channel.send(frames)
                for peer in (client, worker):
                    assert (await peer.receive(m.FAILED)).failure.code == "protocol_error"
            client.send(m.PS, request_id=request_id(3))
            reply = decode_body((await client.receive(m.PS_REPLY)).frames[1], m.PsReply)
            assert reply.counters["protocol_errors"] == 8

    run(scenario())


def test_a_taken_address_is_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site(tmp_path) as here:
            bind, worker_bind = here.endpoints
            for wrong in (
                BrokerSettings(bind=bind, worker_bind=f"ipc://{tmp_path}/free"),
                BrokerSettings(bind=f"ipc://{tmp_path}/free", worker_bind=worker_bind),
            ):
                with pytest.raises(AddressInUse, match="in use"):
                    await serve(wrong)

    run(scenario())
