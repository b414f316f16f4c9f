"""One connection of a reader to a peer's exporter. Blocking, for one thread at a time."""

import contextlib
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmrt.kvtransfer.tcp_frames import (
    ANSWER,
    HELLO,
    MAGIC,
    MAX_REASON_BYTES,
    OK,
    TOKEN_BYTES,
    receive_bytes,
    receive_views,
    send_views,
    set_limit,
)
from llmrt.kvtransfer.transport import LinkOptions
from llmrt.wire.errors import ProtocolError, TransferFailed


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where a peer's exporter listens, and the token that it gave us."""

    host: str
    port: int
    token: bytes

    @classmethod
    def parse(cls, url: str) -> "TcpAddress":
        """Raises `ProtocolError` unless `url` is tcp://HOST:PORT/TOKEN."""
        try:
            parts = urlsplit(url)
            token = bytes.fromhex(parts.path.removeprefix("/"))
            is_tcp = parts.scheme == "tcp" and len(token) == TOKEN_BYTES
            if is_tcp and parts.hostname and parts.port:
                return cls(parts.hostname, parts.port, token)
        except ValueError:
            pass
        raise ProtocolError(
            f"the peer's bulk address is no tcp://HOST:PORT/TOKEN (it has {len(url)} characters)"
        )

    def failed(self, reason: str) -> TransferFailed:
        return TransferFailed(f"KV could not be read from {self.host}:{self.port}: {reason}")


@dataclass(slots=True, eq=False)
class Part:
    """What one connection reads of a call. `deadline` is on the monotonic clock.

    `is_given_up` may be set from another thread.
    """

    request: bytes
    views: list[memoryview]
    deadline: float
    is_given_up: bool = False

    def wait(self, sock: socket.socket) -> None:
        remaining_s = self.deadline - time.monotonic()
        if self.is_given_up:
            raise ConnectionAbortedError("the read was given up")
        if remaining_s <= 0:
            raise TimeoutError
        set_limit(sock, remaining_s)


class TcpConnection:
    """Made at the first read, and again after a failure."""

    def __init__(self, address: TcpAddress, options: LinkOptions) -> None:
        self._address = address
        self._options = options
        self._sock: socket.socket | None = None
        self._part: Part | None = None

    def read(self, part: Part) -> None:
        """Fill the views of `part`. Raises `TransferFailed` if the peer refuses; else `OSError`."""
        self._part = part
        retries_left = self._options.retries
        try:
            while True:
                try:
                    self._read(part)
                except TimeoutError:
                    raise
                except OSError:
                    if part.is_given_up or not retries_left:
                        raise
                    retries_left -= 1
                else:
                    return
        finally:
            self._part = None

    def give_up(self, part: Part) -> None:
        """From another thread: wake the one that reads `part`, which then fails."""
        part.is_given_up = True
        sock = self._sock
        if sock is not None and self._part is part:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _read(self, part: Part) -> None:
        try:
            sock = self._sock or self._connect(part)
            send_views(sock, [memoryview(part.request)], part.wait)
            reason = self._receive_answer(sock, part, sum(map(len, part.views)))
            if reason is None:
                receive_views(sock, part.views, part.wait)
                reason = self._receive_answer(sock, part, 0)
        except BaseException:
            # The stream is somewhere inside a frame.
            self.close()
            raise
        if reason is not None:
            raise self._address.failed(reason)

    def _connect(self, part: Part) -> socket.socket:
        address = self._address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        part.wait(sock)
        limit_s = min(self._options.connect_timeout_s, part.deadline - time.monotonic())
        sock.settimeout(max(limit_s, 1e-3))
        sock.connect((address.host, address.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_views(sock, [memoryview(HELLO.pack(MAGIC, address.token))], part.wait)
        reason = self._receive_answer(sock, part, 0)
        if reason is not None:
            raise address.failed(reason)
        return sock

    def _receive_answer(self, sock: socket.socket, part: Part, num_bytes: int) -> str | None:
        """None if the peer agrees and sends `num_bytes` next; otherwise why it refuses."""
        status, length = ANSWER.unpack(receive_bytes(sock, ANSWER.size, part.wait))
        if status == OK and length == num_bytes:
            return None
        if status == OK or length > MAX_REASON_BYTES:
            raise ConnectionAbortedError(
                f"it answered {status} with {length} bytes; {num_bytes} are expected"
            )
        return receive_bytes(sock, length, part.wait).decode(errors="replace")
