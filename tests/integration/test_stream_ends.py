"""Every stream ends exactly once, with a reason or a code, however it ends."""

from typing import Any

import msgspec
import pytest
from local_cluster import RunningCluster
from tests.integration.probes import check_stream
from tests.integration.raw_peer import TERMINAL, RawPeer, raw_peer

from llmrt.client import Client, StreamEvent
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_body, encode_header
from llmrt.wire.errors import DeadlineExceeded, RequestCancelled

pytestmark = pytest.mark.integration

EOS = 2


def end_of(peer: RawPeer, request_id: bytes) -> str:
    """The reason or the code of the only terminal message, behind which nothing comes."""
    kinds: list[str] = []
    while not kinds or kinds[-1] not in TERMINAL:
        header, frames = peer.receive()
        kinds.append(header.kind)
    assert header.request_id == request_id
    assert set(kinds[:-1]) <= {m.EVENTS}
    assert peer.is_silent()
    if header.kind == m.FAILED:
        assert not frames[1:]
        return decode_body(frames[0], m.Failure).code
    return decode_body(frames[0], m.Finished).finish_reason


@pytest.mark.parametrize(
    ("sampling", "raw", "budget_ms", "end"),
    [
        ({"max_tokens": 20, "logit_bias": {EOS: 100.0}}, b"hi", 20_000, "stop"),
        ({"max_tokens": 20, "stop": ["a"]}, b"hi", 20_000, "stop"),
        ({"max_tokens": 3}, b"hi", 20_000, "length"),
        ({"max_tokens": 3000, "ignore_eos": True}, b"hi", 300, "deadline_exceeded"),
        ({"max_tokens": 5000}, b"hi", 20_000, "context_length_exceeded"),
        ({"max_tokens": 5}, b"word " * 5000, 20_000, "context_length_exceeded"),
    ],
    ids=["eos", "stop", "length", "deadline", "too much wanted", "too long"],
)
def test_a_stream_has_one_end(
    layout: RunningCluster, sampling: dict[str, Any], raw: bytes, budget_ms: int, end: str
) -> None:
    body = msgspec.msgpack.encode({"prompt_kind": "text", "sampling": sampling})
    with raw_peer(layout.bind) as peer:
        request_id = peer.generate(body, raw, budget_ms=budget_ms)
        assert end_of(peer, request_id) == end


def test_a_cancelled_stream_has_one_end(layout: RunningCluster) -> None:
    body = msgspec.msgpack.encode({"prompt_kind": "text", "sampling": {"max_tokens": 3000}})
    with raw_peer(layout.bind) as peer:
        request_id = peer.generate(body, b"hi")
        header, _ = peer.receive()
        assert header.kind == m.EVENTS
        for _ in range(3):
            peer.send(encode_header(m.CANCEL, request_id))
        assert end_of(peer, request_id) == "cancelled"


def test_asking_again_attaches_and_repeats_the_end(layout: RunningCluster) -> None:
    body = msgspec.msgpack.encode({"prompt_kind": "text", "sampling": {"max_tokens": 5}})
    with raw_peer(layout.bind) as peer:
        request_id = peer.generate(body, b"hi")
        assert end_of(peer, request_id) == "length"
        peer.send(encode_header(m.GENERATE, request_id, seq=0, budget_ms=20_000), body, b"hi")
        assert end_of(peer, request_id) == "length"


def test_the_deadline_comes_to_the_reader_of_a_stream(client: Client) -> None:
    events: list[StreamEvent] = []
    stream = client.stream("hi", max_tokens=3000, ignore_eos=True, deadline_s=0.5)
    with pytest.raises(DeadlineExceeded):
        events.extend(stream)
    check_stream(events)
    assert events


def test_a_cancel_comes_to_the_reader_of_a_stream(client: Client) -> None:
    stream = client.stream("hi", max_tokens=3000, ignore_eos=True)
    events = iter(stream)
    next(events)
    client.cancel(stream.request_id)
    with pytest.raises(RequestCancelled):
        list(events)
