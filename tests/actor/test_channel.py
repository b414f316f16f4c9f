"""A channel loses nothing in silence, keeps the order, and never blocks or starves the loop."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from llmrt.actor import sockets
from llmrt.actor.channel import CLOSED, FULL, UNROUTABLE, Channel

pytestmark = pytest.mark.integration

DEADLINE_S = 20.0


@dataclass
class End:
    """One side: what came, and what was handed back."""

    received: list[list[bytes]] = field(default_factory=list)
    unsent: list[tuple[list[bytes], str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_message(self, frames: list[bytes]) -> None:
        self.received.append(frames)
        self.changed.set()

    def on_unsent(self, frames: list[bytes], reason: str) -> None:
        self.unsent.append((frames, reason))
        self.changed.set()

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_done():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Pair:
    """A router and a dealer named `peer` that can reach each other."""

    server: Channel
    client: Channel
    at_server: End
    at_client: End
    endpoint: str
    context: sockets.Context


@asynccontextmanager
async def make_pair(**channel_options: int) -> AsyncIterator[Pair]:
    context = sockets.context()
    at_server, at_client = End(), End()
    router, dealer = sockets.router(context), sockets.dealer(context, b"peer")
    endpoint = sockets.bind(router, "tcp://127.0.0.1:*")
    sockets.connect(dealer, endpoint)
    server = Channel(router, at_server.on_message, at_server.on_unsent, **channel_options)
    client = Channel(dealer, at_client.on_message, at_client.on_unsent, **channel_options)
    try:
        yield Pair(server, client, at_server, at_client, endpoint, context)
    finally:
        server.close()
        client.close()
        context.destroy(linger=0)


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def test_messages_pass_both_ways_in_order() -> None:
    async def main() -> None:
        async with make_pair() as pair:
            for n in range(500):
                pair.client.send([b"header", b"%d" % n])
            await pair.at_server.until(lambda: len(pair.at_server.received) == 500)
            assert pair.at_server.received == [[b"peer", b"header", b"%d" % n] for n in range(500)]
            for n in range(500):
                pair.server.send([b"peer", b"%d" % n])
            await pair.at_client.until(lambda: len(pair.at_client.received) == 500)
            assert pair.at_client.received == [[b"%d" % n] for n in range(500)]

    run(main())


def test_what_is_sent_before_the_peer_is_there_waits_for_it() -> None:
    """IMMEDIATE makes such a send fail; the outbox keeps it, and the order."""

    async def main() -> None:
        context = sockets.context()
        at_server, at_client = End(), End()
        endpoint = sockets.check_free("tcp://127.0.0.1:*")
        dealer = sockets.dealer(context, b"peer")
        sockets.connect(dealer, endpoint)
        client = Channel(dealer, at_client.on_message, at_client.on_unsent)
        for n in range(10):
            client.send([b"%d" % n])
        assert client.waiting_bytes() == 10
        router = sockets.router(context)
        sockets.bind(router, endpoint)
        server = Channel(router, at_server.on_message, at_server.on_unsent)
        await at_server.until(lambda: len(at_server.received) == 10)
        assert [frames[1] for frames in at_server.received] == [b"%d" % n for n in range(10)]
        assert client.waiting_bytes() == 0
        assert at_client.unsent == []
        server.close()
        client.close()
        context.term()

    run(main())


def test_message_for_an_unknown_peer_is_handed_back() -> None:
    async def main() -> None:
        async with make_pair() as pair:
            pair.server.send([b"nobody", b"hello"])
            assert pair.at_server.unsent == []  # never from within send
            await pair.at_server.until(lambda: bool(pair.at_server.unsent))
            assert pair.at_server.unsent == [([b"nobody", b"hello"], UNROUTABLE)]

    run(main())


def test_a_full_outbox_hands_back_what_does_not_fit() -> None:
    """A peer that reads nothing costs `max_outbox_bytes` and no more."""

    async def main() -> None:
        context = sockets.context()
        end = End()
        router = sockets.router(context)
        endpoint = sockets.bind(router, "tcp://127.0.0.1:*")
        silent = sockets.dealer(context, b"peer")  # connected, and never read
        sockets.connect(silent, endpoint)
        channel = Channel(router, end.on_message, end.on_unsent, max_outbox_bytes=1 << 20)
        silent.send(b"hello")
        await end.until(lambda: bool(end.received))
        body = bytes(100_000)
        num_sent = 0
        while not end.unsent:
            channel.send([b"peer", b"%d" % num_sent, body])
            num_sent += 1
            await asyncio.sleep(0)
        assert end.unsent == [([b"peer", b"%d" % (num_sent - 1), body], FULL)]
        assert (1 << 20) - 100_010 <= channel.waiting_bytes(b"peer") <= 1 << 20
        channel.send([b"peer", b"small"])  # what fits still goes behind what waits
        assert len(end.unsent) == 1
        # The peer reads on: everything taken arrives, in order.
        numbers: list[bytes] = []
        while len(numbers) < num_sent:
            if silent.poll(0):
                numbers.append(silent.recv_multipart()[0])
            await asyncio.sleep(0)
        assert numbers == [*(b"%d" % n for n in range(num_sent - 1)), b"small"]
        channel.close()
        silent.close(linger=0)
        context.term()

    run(main())


def test_what_waits_for_a_peer_that_leaves_is_handed_back() -> None:
    async def main() -> None:
        context = sockets.context()
        end = End()
        router = sockets.router(context)
        endpoint = sockets.bind(router, "tcp://127.0.0.1:*")
        silent = sockets.dealer(context, b"peer")
        sockets.connect(silent, endpoint)
        channel = Channel(router, end.on_message, end.on_unsent)
        silent.send(b"hello")
        await end.until(lambda: bool(end.received))
        sent: list[list[bytes]] = []
        while channel.waiting_bytes(b"peer") < 1 << 20:
            sent.append([b"peer", b"%d" % len(sent), bytes(100_000)])
            channel.send(sent[-1])
            await asyncio.sleep(0)
        silent.close(linger=0)
        await end.until(lambda: channel.waiting_bytes(b"peer") == 0 and bool(end.unsent))
        assert end.unsent == [(frames, UNROUTABLE) for frames in sent[-len(end.unsent) :]]
        channel.close()
        context.term()

    run(main())


def test_close_hands_back_what_waits_and_sends_what_was_taken() -> None:
    async def main() -> None:
        context = sockets.context()
        end = End()
        dealer = sockets.dealer(context, b"peer")
        sockets.connect(dealer, "tcp://127.0.0.1:9")
        channel = Channel(dealer, end.on_message, end.on_unsent)
        channel.send([b"waits"])
        channel.close()
        channel.close()
        channel.send([b"late"])
        await end.until(lambda: len(end.unsent) == 2)
        assert end.unsent == [([b"waits"], CLOSED), ([b"late"], CLOSED)]
        context.term()
        async with make_pair() as pair:
            pair.client.send([b"hello"])
            await pair.at_server.until(lambda: bool(pair.at_server.received))
            pair.client.send([b"last words"])
            pair.client.close()
            await pair.at_server.until(lambda: len(pair.at_server.received) == 2)
            assert pair.at_server.received[1] == [b"peer", b"last words"]

    run(main())


def test_a_flood_leaves_the_loop_to_others() -> None:
    """A bounded number of messages per turn: a timer fires in the middle of a flood."""

    async def main() -> None:
        async with make_pair() as pair:
            for n in range(3000):
                pair.client.send([b"%d" % n])
            seen: list[int] = []

            def look() -> None:
                seen.append(len(pair.at_server.received))
                if seen[-1] < 3000:
                    asyncio.get_running_loop().call_soon(look)

            look()
            await pair.at_server.until(lambda: len(pair.at_server.received) == 3000)
            gaps = [after - before for before, after in pairwise(seen)]
            assert max(gaps) <= 64

    run(main())


def test_a_fault_of_the_receiver_does_not_stop_the_channel() -> None:
    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with make_pair() as pair:
            take = pair.at_server.on_message

            def fail_once(frames: list[bytes]) -> None:
                pair.server._on_message = take
                raise ValueError("fault")

            pair.server._on_message = fail_once
            pair.client.send([b"1"])
            pair.client.send([b"2"])
            await pair.at_server.until(lambda: bool(pair.at_server.received))
            assert pair.at_server.received == [[b"peer", b"2"]]
            assert len(faults) == 1

    run(main())


def test_a_channel_carries_sixty_thousand_messages_a_second() -> None:
    """In CPU time of this thread and for one side of a hop, so that a busy machine says the
    same: half of the sends and half of the receives of a broker's hop are on other processes."""

    async def main() -> None:
        num_messages = 20_000
        async with make_pair() as pair:
            pair.client.send([b"hello"])
            await pair.at_server.until(lambda: bool(pair.at_server.received))
            pair.at_server.received.clear()
            gc.collect()
            start = time.thread_time()
            for n in range(num_messages):
                pair.client.send([b"header", b"body"])
                if n % 500 == 0:
                    await asyncio.sleep(0)
            await pair.at_server.until(lambda: len(pair.at_server.received) == num_messages)
            rate = num_messages / (time.thread_time() - start)
        assert rate > 30_000, f"{rate:.0f} messages/s sent and received by one thread"

    run(main())
