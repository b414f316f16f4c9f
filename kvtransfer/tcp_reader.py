"""Reads a peer's blocks over plain TCP into an arena of ours, without a copy in between."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.layout import block_views
from llmrt.kvtransfer.tcp_frames import (
    ANSWER,
    HELLO,
    MAGIC,
    MAX_REASON_BYTES,
    OK,
    REQUEST,
    TOKEN_BYTES,
    receive_bytes,
    receive_views,
    send_views,
)
from llmrt.wire.arrays import pack_u32
from llmrt.wire.errors import ProtocolError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId


@dataclass(slots=True)
class _Call:
    """One read on its thread. `deadline` is on the monotonic clock."""

    request: bytes
    views: list[memoryview]
    deadline: float
    is_cancelled: bool = False

    def wait(self, sock: socket.socket) -> None:
        remaining_s = self.deadline - time.monotonic()
        if self.is_cancelled:
            raise ConnectionAbortedError("the read was given up")
        if remaining_s <= 0:
            raise TimeoutError
        sock.settimeout(remaining_s)


class BulkReader:
    """A connection to a peer's `BulkServer`, made at the first read and again after a failure.

    One read at a time, on a thread of its own. `url` is what the server's `url_for` returned.
    Raises `ProtocolError` if it is no such URL.
    """

    def __init__(self, url: str) -> None:
        self._host, self._port, self._token = _parse(url)
        self._sock: socket.socket | None = None
        self._call: _Call | None = None
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-read")

    async def read(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_arena: Arena,
        dst_blocks: Sequence[BlockId],
        *,
        timeout_s: float,
    ) -> None:
        """Copy `src_blocks` of the peer's arena into `dst_blocks`, in that order.

        Returns when all bytes are there and the lease held until the last was sent. Raises
        `TransferFailed` if the peer refuses, dies, or takes longer than `timeout_s`. Either way,
        and when cancelled, nothing writes to `dst_blocks` afterwards.
        """
        assert len(src_blocks) == len(dst_blocks) > 0, (len(src_blocks), len(dst_blocks))
        assert 0 <= min(dst_blocks) <= max(dst_blocks) < dst_arena.num_blocks, dst_blocks
        block_bytes = dst_arena.block_bytes
        call = _Call(
            REQUEST.pack(generation, lease, block_bytes, len(src_blocks)) + pack_u32(src_blocks),
            block_views(dst_arena.buffer, block_bytes, dst_blocks),
            deadline=time.monotonic() + timeout_s,
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise self._failed(f"earlier reads took {timeout_s:g} s") from None
        try:
            self._call = call
            await self._run(call)
        except TimeoutError:
            raise self._failed(f"it took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from None
        finally:
            self._call = None
            self._lock.release()

    async def close(self) -> None:
        """Hang up; a read that goes on fails. Returns when its thread has ended."""
        if self._call is not None:
            self._give_up(self._call)
        async with self._lock:
            self._disconnect()
            self._thread.shutdown()

    async def _run(self, call: _Call) -> None:
        """Run `call` on the thread; when cancelled, wait until the thread has let go."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._read, call)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            self._give_up(call)
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            done.exception()
            raise

    def _give_up(self, call: _Call) -> None:
        call.is_cancelled = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # On the thread

    def _read(self, call: _Call) -> None:
        try:
            sock = self._sock or self._connect(call)
            send_views(sock, [memoryview(call.request)], call.wait)
            reason = self._receive_answer(sock, call, sum(map(len, call.views)))
            if reason is None:
                receive_views(sock, call.views, call.wait)
                reason = self._receive_answer(sock, call, 0)
        except BaseException:
            # The stream is somewhere inside a frame.
            self._disconnect()
            raise
        if reason is not None:
            raise self._failed(reason)

    def _connect(self, call: _Call) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        call.wait(sock)
        sock.connect((self._host, self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_views(sock, [memoryview(HELLO.pack(MAGIC, self._token))], call.wait)
        reason = self._receive_answer(sock, call, 0)
        if reason is not None:
            raise self._failed(reason)
        return sock

    def _receive_answer(self, sock: socket.socket, call: _Call, num_bytes: int) -> str | None:
        """None if the peer agrees and sends `num_bytes` next; otherwise why it refuses."""
        status, length = ANSWER.unpack(receive_bytes(sock, ANSWER.size, call.wait))
        if status == OK and length == num_bytes:
            return None
        if status == OK or length > MAX_REASON_BYTES:
            raise ConnectionAbortedError(
                f"it answered {status} with {length} bytes; {num_bytes} are expected"
            )
        return receive_bytes(sock, length, call.wait).decode(errors="replace")

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _failed(self, reason: str) -> TransferFailed:
        return TransferFailed(f"KV could not be read from {self._host}:{self._port}: {reason}")


def _parse(url: str) -> tuple[str, int, bytes]:
    try:
        parts = urlsplit(url)
        token = bytes.fromhex(parts.path.removeprefix("/"))
        if parts.scheme == "tcp" and parts.hostname and parts.port and len(token) == TOKEN_BYTES:
            return parts.hostname, parts.port, token
    except ValueError:
        pass
    raise ProtocolError(
        f"the peer's bulk address is no tcp://HOST:PORT/TOKEN (it has {len(url)} characters)"
    )
