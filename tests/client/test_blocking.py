"""The blocking client against a scripted broker on a real socket."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.client.conftest import (
    WAIT_S,
    MakeBroker,
    Message,
    ScriptedBroker,
    events_frames,
    finished_frames,
    one_token,
    silence,
)

from llmrt.client import Client
from llmrt.wire.errors import BrokerUnreachable, InvalidRequest, RequestCancelled
from llmrt.wire.messages import CANCEL, GENERATE

pytestmark = pytest.mark.integration


def test_every_call_works(make_broker: MakeBroker) -> None:
    broker = make_broker()
    turns = [{"role": "user", "content": "hi"}]
    with Client(broker.endpoint) as client:
        assert client.generate("hello", max_tokens=2).text == "0 1 "
        assert client.chat(turns, max_tokens=2).text == "0 1 "
        assert [event.text for event in client.chat_stream(turns, max_tokens=2)] == ["0 ", "1 "]
        assert client.tokenize("AB") == [65, 66]
        assert client.workers().broker_epoch == 1


def test_a_stream_has_its_result_after_the_end(make_broker: MakeBroker) -> None:
    broker = make_broker()
    with Client(broker.endpoint) as client, client.stream("hello", max_tokens=3) as stream:
        assert [event.token_ids for event in stream] == [(100,), (101,), (102,)]
        assert stream.result.text == "0 1 2 "
        assert stream.result.request_id == stream.request_id


def test_a_reader_that_stalls_holds_its_stream_back(make_broker: MakeBroker) -> None:
    def endless(broker: ScriptedBroker, message: Message) -> None:
        for seq in range(300):
            broker.send(message, events_frames(message.header.request_id, seq, [seq], "x"))

    broker = make_broker(endless)
    with Client(broker.endpoint) as client:
        events = iter(client.stream("hello"))
        next(events)
        asked = broker.expect(GENERATE)
        time.sleep(1.0)  # some times what an acknowledgement waits for
        assert 1 <= broker.acked_seq() <= 100
        end = finished_frames(asked.header.request_id, 300)
        broker.order(asked.client_id, end)
        assert len(list(events)) == 299


def test_break_cancels(make_broker: MakeBroker) -> None:
    broker = make_broker(one_token)
    with Client(broker.endpoint) as client:
        stream = client.stream("hello")
        for _ in stream:
            break
        assert broker.expect(CANCEL).header.request_id.hex() == stream.request_id


def test_the_end_of_the_block_cancels(make_broker: MakeBroker) -> None:
    broker = make_broker(one_token)
    with Client(broker.endpoint) as client:
        with client.stream("hello") as stream:
            events = iter(stream)
            next(events)
        broker.expect(CANCEL)
        with pytest.raises(RequestCancelled):
            next(events)


def test_cancel_from_another_thread_ends_the_reader(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)
    with Client(broker.endpoint) as client, ThreadPoolExecutor(1) as pool:
        reader = pool.submit(client.generate, "hello", request_id=b"i" * 16)
        broker.expect(GENERATE)
        client.cancel(b"i" * 16)
        with pytest.raises(RequestCancelled):
            reader.result(WAIT_S)


def test_closing_ends_readers_in_other_threads(make_broker: MakeBroker) -> None:
    broker = make_broker(silence)
    with ThreadPoolExecutor(2) as pool:
        with Client(broker.endpoint) as client:
            readers = [
                pool.submit(client.generate, "hello"),
                pool.submit(client.stream("hello").wait),
            ]
            for _ in readers:
                broker.expect(GENERATE)
        for reader in readers:
            with pytest.raises(RequestCancelled):
                reader.result(WAIT_S)
    with pytest.raises(RequestCancelled, match="closed"):
        client.generate("hello")


def test_threads_share_a_client(make_broker: MakeBroker) -> None:
    broker = make_broker()
    with Client(broker.endpoint) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: client.generate("x", max_tokens=n), range(1, 41)))
    assert [len(result.token_ids) for result in results] == list(range(1, 41))
    assert len({broker.expect(GENERATE).client_id for _ in range(40)}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_ctrl_c_cancels(make_broker: MakeBroker, is_stream: bool) -> None:
    main_thread = threading.get_ident()

    def interrupt(broker: ScriptedBroker, message: Message) -> None:
        signal.pthread_kill(main_thread, signal.SIGINT)

    broker = make_broker(interrupt)
    with Client(broker.endpoint) as client:
        with pytest.raises(KeyboardInterrupt):
            client.stream("hello").wait() if is_stream else client.generate("hello")
        broker.expect(CANCEL)


def test_absent_broker_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(BrokerUnreachable), Client("tcp://127.0.0.1:9", connect_timeout_s=0.05):
        pass
    assert threading.active_count() == before


def test_a_wrong_request_starts_nothing() -> None:
    before = threading.active_count()
    client = Client("tcp://127.0.0.1:9")
    with pytest.raises(InvalidRequest):
        client.stream("hello", temperature=-1.0)
    client.close()
    assert threading.active_count() == before
