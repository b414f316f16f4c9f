"""Frames of a bulk read over TCP, and moving bytes between a socket and an arena.

reader                              server
HELLO magic, token             -->
                               <--  ANSWER
REQUEST, source blocks (u32)   -->
                               <--  ANSWER, then the blocks' bytes or the reason of a refusal
                               <--  ANSWER: the lease still held when the last byte was sent
REQUEST ...
"""

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
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

Wait = Callable[[socket.socket], None]
"""Sets how long the next call on a socket may block, or raises if there is no time left."""


def refusal(reason: str) -> bytes:
    raw = reason.encode()[:MAX_REASON_BYTES]
    return ANSWER.pack(REFUSED, len(raw)) + raw


def send_views(sock: socket.socket, views: Iterable[memoryview], wait: Wait) -> None:
    """Send all bytes of `views`, straight from where they are."""
    queue = deque(views)
    while queue:
        wait(sock)
        _advance(queue, sock.sendmsg(list(islice(queue, _MAX_VIEWS))))


def receive_views(sock: socket.socket, views: Iterable[memoryview], wait: Wait) -> None:
    """Fill `views` straight from the socket; `ConnectionError` if the peer ends before."""
    queue = deque(views)
    while queue:
        wait(sock)
        num_bytes = sock.recvmsg_into(list(islice(queue, _MAX_VIEWS)))[0]
        if not num_bytes:
            raise ConnectionResetError("the peer hung up")
        _advance(queue, num_bytes)


def receive_bytes(sock: socket.socket, size_bytes: int, wait: Wait) -> bytes:
    raw = bytearray(size_bytes)
    if size_bytes:
        receive_views(sock, [memoryview(raw)], wait)
    return bytes(raw)


def _advance(queue: "deque[memoryview]", num_bytes: int) -> None:
    while queue and num_bytes >= len(queue[0]):
        num_bytes -= len(queue.popleft())
    if num_bytes:
        queue[0] = queue[0][num_bytes:]
