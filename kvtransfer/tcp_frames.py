"""Frames of a bulk read over TCP, and moving bytes between a socket and an arena.

reader                              server
HELLO magic, token             -->
                               <--  ANSWER
REQUEST, source blocks (u32)   -->
                               <--  ANSWER, then the blocks' bytes or the reason of a refusal
                               <--  ANSWER: the lease still held when the last byte was sent
REQUEST ...
"""

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

MAGIC = b"llmrtkv1"
TOKEN_BYTES = 16
HELLO = struct.Struct(f"<8s{TOKEN_BYTES}s")

REQUEST = struct.Struct("<QQQI")
"""Arena generation, lease, bytes per block, number of blocks."""

ANSWER = struct.Struct("<BQ")
"""OK and the number of bytes that follow, or REFUSED and the length of the reason in UTF-8."""

OK, REFUSED = 0, 1
MAX_REASON_BYTES = 1024
# Well below IOV_MAX (1024): a longer list costs more to build again after a partial write.
_MAX_VIEWS = 128
_TIMEVAL = struct.Struct("ll")

Wait = Callable[[socket.socket], None]
"""Sets how long the next call on a socket may block, or raises if there is no time left."""


def set_limit(sock: socket.socket, limit_s: float | None) -> None:
    """How long a call on `sock` may wait without a byte, by the kernel's clock; None: for ever.

    Python's own timeouts make a socket non-blocking, which costs three system calls for one.
    """
    sock.setblocking(True)
    seconds, part = divmod(0.0 if limit_s is None else max(limit_s, 1e-3), 1.0)
    value = _TIMEVAL.pack(int(seconds), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def refusal(reason: str) -> bytes:
    raw = reason.encode()[:MAX_REASON_BYTES]
    return ANSWER.pack(REFUSED, len(raw)) + raw


def send_views(sock: socket.socket, views: Iterable[memoryview], wait: Wait) -> None:
    """Send all bytes of `views`, straight from where they are."""
    queue = deque(views)
    while queue:
        wait(sock)
        with _timeouts_raised():
            num_bytes = sock.sendmsg(list(islice(queue, _MAX_VIEWS)))
        _advance(queue, num_bytes)


def receive_views(sock: socket.socket, views: Iterable[memoryview], wait: Wait) -> None:
    """Fill `views` straight from the socket; `ConnectionError` if the peer ends before."""
    queue = deque(views)
    while queue:
        wait(sock)
        with _timeouts_raised():
            # One call fills all views, and wakes up less often than with every packet.
            views = list(islice(queue, _MAX_VIEWS))
            num_bytes = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise ConnectionResetError("the peer hung up")
        _advance(queue, num_bytes)


def receive_bytes(sock: socket.socket, size_bytes: int, wait: Wait) -> bytes:
    raw = bytearray(size_bytes)
    if size_bytes:
        receive_views(sock, [memoryview(raw)], wait)
    return bytes(raw)


@contextlib.contextmanager
def _timeouts_raised() -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def _advance(queue: "deque[memoryview]", num_bytes: int) -> None:
    while queue and num_bytes >= len(queue[0]):
        num_bytes -= len(queue.popleft())
    if num_bytes:
        queue[0] = queue[0][num_bytes:]
