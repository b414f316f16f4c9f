"""A peer of the broker that sends whatever a test wants, past the checks of the SDK."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from llmrt.actor import sockets
from llmrt.wire import messages as m
from llmrt.wire.envelope import Header, decode_body, decode_header, encode_header
from llmrt.wire.errors import error_from_code

ANSWER_TIMEOUT_MS = 20_000
# Longer than a round trip takes, and than a worker needs for one more token.
SILENCE_MS = 200
TERMINAL = (m.FINISHED, m.FAILED, m.TOKENIZED)


class RawPeer:
    """Owns one DEALER. Every receiving method raises `TimeoutError` after 20 s."""

    def __init__(self, socket: sockets.Socket) -> None:
        self._socket = socket

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> tuple[Header, list[bytes]]:
        """The next message: its header, and the frames behind it."""
        if not self._socket.poll(ANSWER_TIMEOUT_MS):
            raise TimeoutError("the broker does not answer")
        frames = self._socket.recv_multipart()
        return decode_header(frames[0]), frames[1:]

    def is_silent(self) -> bool:
        return not self._socket.poll(SILENCE_MS)

    def failure(self) -> m.Failure:
        """The next message, which must be `failed`."""
        header, frames = self.receive()
        assert header.kind == m.FAILED, header
        return decode_body(frames[0], m.Failure)

    def generate(self, body: bytes, *raw: bytes, budget_ms: int = 20_000) -> bytes:
        """Ask with any body and raw frames; returns the new request's id."""
        request_id = secrets.token_bytes(16)
        self.send(encode_header(m.GENERATE, request_id, budget_ms=budget_ms), body, *raw)
        return request_id

    def ask(self, prompt: bytes = b"hi", kind: str = "text", **sampling: Any) -> m.Finished:
        """Generate to the end with any sampling fields; raises the error that it ends with."""
        return self.ask_body({"prompt_kind": kind, "sampling": sampling}, prompt)

    def ask_body(self, body: Mapping[str, Any], *raw: bytes) -> m.Finished:
        request_id = self.generate(msgspec.msgpack.encode(body), *raw)
        while True:
            header, frames = self.receive()
            if header.kind == m.FAILED and header.request_id in (request_id, b""):
                failure = decode_body(frames[0], m.Failure)
                raise error_from_code(failure.code, failure.message)
            if header.kind == m.FINISHED and header.request_id == request_id:
                return decode_body(frames[0], m.Finished)


@contextmanager
def raw_peer(endpoint: str) -> Iterator[RawPeer]:
    """Connected to either side of the broker, under a random routing id."""
    with sockets.context() as ctx, sockets.dealer(ctx, secrets.token_bytes(16)) as socket:
        sockets.connect(socket, endpoint)
        yield RawPeer(socket)
