"""Bytes that are no message are answered with a code, and nobody else notices."""

import secrets

import msgspec
import pytest
from local_cluster import RunningCluster
from tests.integration.probes import check_stream
from tests.integration.raw_peer import RawPeer, raw_peer

from llmrt.client import Client
from llmrt.wire import messages as m
from llmrt.wire.envelope import MAX_RAW_BYTES, encode_header
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.steps import encode_step, make_row

pytestmark = pytest.mark.integration

ID = b"i" * 16
GENERATE = encode_header(m.GENERATE, ID, budget_ms=1000)
BODY = msgspec.msgpack.encode({"prompt_kind": "text", "sampling": {"max_tokens": 1}})
DEEP = b"\x91" * 100_000 + b"\x90"
DEEP_MAP = b"\x81\xa8sampling" * 100_000 + b"\x90"
# A known body with one unknown field, whose value must be skipped.
DEEP_FIELD = b"\x83" + BODY[1:] + b"\xa5later" + DEEP

FRAMES = {
    "nothing": [b""],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "random": [secrets.token_bytes(300)],
    "deep header": [DEEP],
    "short deep header": [b"\x91" * 1000],
    "long header": [bytes(1025)],
    "other protocol": [msgspec.msgpack.encode(("http", 1, 0, m.GENERATE, ID)), BODY, b"hi"],
    "no id": [encode_header(m.GENERATE), BODY, b"hi"],
    "short id": [msgspec.msgpack.encode(("llmrt", 1, 0, m.GENERATE, b"id")), BODY, b"hi"],
    "negative seq": [msgspec.msgpack.encode(("llmrt", 1, 0, m.ACK, ID, 0, 0, -1))],
    "wide epoch": [msgspec.msgpack.encode(("llmrt", 1, 0, m.ACK, ID, "7", 0, 0))],
    "no body": [GENERATE],
    "deep body": [GENERATE, DEEP, b"hi"],
    "deep map": [GENERATE, DEEP_MAP, b"hi"],
    "deep unknown field": [GENERATE, DEEP_FIELD, b"hi"],
    "announced elements": [GENERATE, b"\xdd\xff\xff\xff\xff", b"hi"],
    "random body": [GENERATE, b"\xc1" + secrets.token_bytes(300), b"hi"],
    "large body": [GENERATE, bytes(2 << 20), b"hi"],
    "large prompt": [GENERATE, BODY, bytes(MAX_RAW_BYTES + 1)],
    "17 frames": [GENERATE, BODY, *[b"x"] * 15],
    "15 frames": [GENERATE, BODY, *[b"x"] * 13],
    "bad hello": [encode_header(m.HELLO), b"\x91"],
    "unknown kind": [encode_header("dance", ID)],
}


@pytest.mark.parametrize("name", FRAMES)
def test_bad_frames_of_a_client_are_answered_with_a_code(
    colocated: RunningCluster, name: str
) -> None:
    with raw_peer(colocated.bind) as peer:
        peer.send(*FRAMES[name])
        assert peer.failure().code == "protocol_error"
        assert peer.ask(max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("name", ["text", "short deep header", "other protocol", "unknown kind"])
def test_bad_frames_at_the_endpoint_for_workers_are_answered_with_a_code(
    colocated: RunningCluster, name: str
) -> None:
    with raw_peer(colocated.worker_bind) as peer:
        peer.send(*FRAMES[name])
        assert peer.failure().code == "protocol_error"


def test_another_major_version_is_refused_with_both_versions(colocated: RunningCluster) -> None:
    with raw_peer(colocated.bind) as peer:
        peer.send(msgspec.msgpack.encode(("llmrt", 2, 0, "generate2", {"id": 7})), BODY)
        failure = peer.failure()
    assert failure.code == "version_mismatch"
    assert "2.0" in failure.message
    assert "1.0" in failure.message


def test_a_later_minor_version_is_served(colocated: RunningCluster) -> None:
    header: tuple[object, ...] = (
        "llmrt",
        1,
        9,
        m.GENERATE,
        ID,
        0,
        0,
        0,
        20_000,
        [],
        "later",
        {"x": 1},
    )
    with raw_peer(colocated.bind) as peer:
        peer.send(msgspec.msgpack.encode(header), BODY, b"hi")
        kinds = [peer.receive()[0].kind for _ in range(2)]
    assert kinds == [m.EVENTS, m.FINISHED]


def test_a_stream_is_not_touched_by_garbage_beside_it(layout: RunningCluster) -> None:
    """On both sides of the broker: not even a frame that drops the connection of its sender."""
    with Client(layout.bind) as client:
        undisturbed = client.generate("A stream", max_tokens=60)
        with (
            raw_peer(layout.bind) as stranger,
            raw_peer(layout.worker_bind) as impostor,
            client.stream("A stream", max_tokens=60) as stream,
        ):
            events = []
            for event in stream:
                events.append(event)
                if len(events) == 1:
                    _send_garbage(stranger)
                    _send_garbage(impostor)
                    _pretend_to_be_a_worker(impostor, bytes.fromhex(stream.request_id))
        num_workers = len(client.workers().workers)
    check_stream(events)
    assert stream.result.token_ids == undisturbed.token_ids
    assert stream.result.text == undisturbed.text
    assert num_workers == len(layout.pids)


def _send_garbage(peer: RawPeer) -> None:
    for frames in FRAMES.values():
        peer.send(*frames)
    peer.send(GENERATE, BODY, bytes(MAX_RAW_BYTES + (2 << 20)))


def _pretend_to_be_a_worker(peer: RawPeer, request_id: bytes) -> None:
    """Tokens and ends for another's request, by somebody who never registered."""
    peer.send(*encode_step([make_row(RequestId(request_id), Attempt(1, 1), 1, [5], "x")]))
    peer.send(encode_header(m.FAILED, request_id), msgspec.msgpack.encode({"code": "x"}))
    peer.send(encode_header(m.HEARTBEAT), b"\x80")
    peer.send(encode_header(m.BYE))
