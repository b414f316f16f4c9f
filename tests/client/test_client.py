"""The asyncio client against a scripted broker on a real socket."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from tests.client.conftest import (
    WAIT_S,
    MakeBroker,
    Message,
    ScriptedBroker,
    count,
    events_frames,
    failed_frames,
    finished_frames,
    one_token,
    silence,
)

from llmrt.client import AsyncClient, StreamEvent
from llmrt.client.core import ClientCore
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.errors import (
    BrokerUnreachable,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    RequestCancelled,
    RequestConflict,
)
from llmrt.wire.messages import ACK, CANCEL, GENERATE, HELLO

pytestmark = pytest.mark.integration


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work

    asyncio.run(bounded())


def test_generate_returns_text_ids_and_workers(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            result = await client.generate("hello", max_tokens=4, request_id="ab" * 16)
        assert result.text == "0 1 2 3 "
        assert result.token_ids == (100, 101, 102, 103)
        assert (result.finish_reason, result.request_id) == ("length", "ab" * 16)
        assert (result.decode_worker, result.prefill_worker) == ("decode-0", "prefill-0")
        assert (result.num_drafted, result.num_accepted) == (4, 2)
        assert result.placement == "faster there"
        assert result.placement_ms == {"here": 2.0, "there": 1.0}
        assert result.usage.completion_tokens == 4
        assert result.logprobs is None

    run(work())
    message = broker.expect(GENERATE)
    assert message.frames[2] == b"hello"
    assert 0 < message.header.budget_ms <= 600_000


def test_hello_names_the_process(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint):
            pass

    run(work())
    message = broker.expect(HELLO)
    assert len(message.client_id) == 16
    assert b"boot_id" in message.frames[1]


def test_token_ids_travel_raw(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            await client.generate([1, 2, 2**32 - 1])

    run(work())
    message = broker.expect(GENERATE)
    assert message.generate.prompt_kind == "tokens"
    assert unpack_u32(message.frames[2]).tolist() == [1, 2, 2**32 - 1]


def test_chat_sends_its_turns(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            result = await client.chat([{"role": "user", "content": "hi"}], max_tokens=1)
        assert result.text == "0 "

    run(work())
    generate = broker.expect(GENERATE).generate
    assert generate.prompt_kind == "chat"
    assert [(turn.role, turn.content) for turn in generate.messages] == [("user", "hi")]


def test_stream_gives_events_and_a_result(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            stream = client.stream("hello", max_tokens=2)
            with pytest.raises(InvalidRequest, match="has no result"):
                _ = stream.result
            events = [event async for event in stream]
            assert events == [StreamEvent(0, "0 ", (100,)), StreamEvent(1, "1 ", (101,))]
            assert stream.result.text == "0 1 "

    run(work())
    assert broker.expect(ACK).header.seq == 2


def test_a_stream_is_read_once(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            stream = client.stream("hello")
            await stream.wait()
            with pytest.raises(InvalidRequest, match="start another"):
                await stream.wait()

    run(work())


def test_break_cancels(make_broker: MakeBroker) -> None:
    broker = make_broker(one_token)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            stream = client.stream("hello")
            async for _ in stream:
                break
            cancelled = await asyncio.to_thread(broker.expect, CANCEL)
            assert cancelled.header.request_id.hex() == stream.request_id

    run(work())


def test_an_exception_in_the_loop_cancels(make_broker: MakeBroker) -> None:
    broker = make_broker(one_token)

    async def read(client: AsyncClient) -> None:
        async for _ in client.stream("hello"):
            raise ZeroDivisionError

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.raises(ZeroDivisionError):
                await read(client)
            await asyncio.to_thread(broker.expect, CANCEL)

    run(work())


def test_aclose_cancels_while_the_stream_is_held(make_broker: MakeBroker) -> None:
    broker = make_broker(one_token)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            async with client.stream("hello") as stream:
                events = aiter(stream)
                await anext(events)
            await asyncio.to_thread(broker.expect, CANCEL)
            with pytest.raises(RequestCancelled):
                await anext(events)

    run(work())


def test_cancelling_the_task_cancels_the_request(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            task = asyncio.create_task(client.generate("hello"))
            sent = await asyncio.to_thread(broker.expect, GENERATE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled = await asyncio.to_thread(broker.expect, CANCEL)
            assert cancelled.header.request_id == sent.header.request_id

    run(work())


def test_cancel_by_id_ends_the_reader(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            task = asyncio.create_task(client.generate("hello", request_id=b"i" * 16))
            await asyncio.to_thread(broker.expect, GENERATE)
            await client.cancel((b"i" * 16).hex())
            with pytest.raises(RequestCancelled):
                await task

    run(work())


def test_closing_ends_every_reader(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)

    async def work() -> None:
        client = AsyncClient(broker.endpoint)
        tasks = [asyncio.create_task(client.generate("hello")) for _ in range(3)]
        for _ in tasks:
            await asyncio.to_thread(broker.expect, GENERATE)
        await client.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RequestCancelled] * 3
        with pytest.raises(RequestCancelled, match="closed"):
            await client.generate("hello")

    run(work())


def test_failures_are_typed(make_broker: MakeBroker) -> None:
    def refuse(broker: ScriptedBroker, message: Message) -> None:
        broker.send(
            message, failed_frames(message.header.request_id, "overloaded", "queue is full")
        )

    broker = make_broker(refuse)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.raises(Overloaded, match="queue is full"):
                await client.generate("hello")

    run(work())


def test_many_streams_share_one_connection(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            lengths = range(1, 101)
            results = await asyncio.gather(*[client.generate("x", max_tokens=n) for n in lengths])
        assert [len(result.token_ids) for result in results] == list(lengths)

    run(work())
    assert len({broker.expect(GENERATE).client_id for _ in range(100)}) == 1


def test_one_id_runs_once_at_a_time(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            task = asyncio.create_task(client.generate("hello", request_id=b"i" * 16))
            await asyncio.to_thread(broker.expect, GENERATE)
            with pytest.raises(RequestConflict):
                await client.generate("hello", request_id=b"i" * 16)
            assert not task.done()
            task.cancel()

    run(work())


def test_tokenize_and_workers(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            assert await client.tokenize("AB") == [65, 66]
            assert (await client.workers()).broker_epoch == 1

    run(work())


def test_absent_broker_is_named() -> None:
    async def work() -> None:
        with pytest.raises(BrokerUnreachable, match=r"tcp://127\.0\.0\.1:9 "):
            async with AsyncClient("tcp://127.0.0.1:9", connect_timeout_s=0.05):
                pass

    run(work())


def test_malformed_endpoint_is_refused() -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match="localhost:7700"):
            async with AsyncClient("localhost:7700"):
                pass

    run(work())


def test_a_silent_broker_cannot_outlast_the_deadline(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.raises(DeadlineExceeded):
                await client.generate("hello", deadline_s=0.01)

    run(work())


def test_a_stream_goes_on_after_a_restart_of_the_broker(make_broker: MakeBroker) -> None:
    first = make_broker(one_token, epoch=1)

    async def work() -> None:
        async with AsyncClient(first.endpoint) as client:
            stream = client.stream("hello", max_tokens=3)
            events = aiter(stream)
            await anext(events)
            await asyncio.to_thread(first.stop)
            second = make_broker(count, first.endpoint, epoch=2)
            assert [event.seq async for event in events] == [1, 2]
            assert stream.result.text == "0 1 2 "
            attached = second.expect(GENERATE)
            assert (attached.header.seq, attached.header.request_id.hex()) == (1, stream.request_id)

    run(work())


def test_garbage_from_the_broker_is_ignored(make_broker: MakeBroker) -> None:
    def garble(broker: ScriptedBroker, message: Message) -> None:
        request_id = message.header.request_id
        for frames in ([b"?"], [b""], [b"\xc1", b"x"], events_frames(request_id, 0, [1], "a")[:2]):
            broker.send(message, frames)
        broker.send(message, finished_frames(request_id, 0))

    broker = make_broker(garble)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            assert (await client.generate("hello")).text == ""

    run(work())


def test_nothing_is_sent_for_a_wrong_request(make_broker: MakeBroker) -> None:
    broker = make_broker()

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.raises(InvalidRequest, match="temperature"):
                await client.generate("hello", temperature=float("nan"))
            with pytest.raises(MessageTooLarge):
                await client.generate("x" * (17 << 20))
            await client.generate("last", max_tokens=1)

    run(work())
    assert broker.expect(GENERATE).frames[2] == b"last"


def test_import_is_light() -> None:
    """The SDK works where neither the runtime's nor the models' packages are installed."""
    script = (
        "import sys, llmrt.client; "
        "print([m for m in ('structlog', 'uvloop', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_what_is_due_at_once_disturbs_no_call_on_uvloop(
    make_broker: MakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait of less than half a millisecond is no timer there, and cannot tell its time."""
    broker = make_broker()
    monkeypatch.setattr(ClientCore, "next_deadline", lambda _core: time.monotonic() + 1e-4)

    async def work() -> None:
        async with AsyncClient(broker.endpoint) as client:
            replies = await asyncio.gather(*(client.workers() for _ in range(3)))
        assert [reply.broker_epoch for reply in replies] == [1, 1, 1]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
