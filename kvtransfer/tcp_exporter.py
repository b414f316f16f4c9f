"""Serves reads of an arena over plain TCP, for peers that cannot map it.

One thread per connection, none of them the event loop's. Bytes go from the arena to the socket
without a copy in between. The network is trusted: a token keeps strangers out, nothing hides the
bytes from who can listen.
"""

import contextlib
import hmac
import secrets
import socket
import threading

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.layout import block_views
from llmrt.kvtransfer.tcp_frames import (
    ANSWER,
    HELLO,
    MAGIC,
    OK,
    REQUEST,
    TOKEN_BYTES,
    receive_bytes,
    refusal,
    send_views,
    set_limit,
)
from llmrt.kvtransfer.transport import Check, LinkOptions, ReadRequest
from llmrt.wire.arrays import U32_BYTES, unpack_u32
from llmrt.wire.errors import AddressInUse
from llmrt.wire.ids import LeaseId

# A peer host that vanished while nothing was asked is noticed after 10 + 3 * 5 seconds.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class TcpExporter:
    """Lets peers with a token read blocks of `arena` that `check` allows.

    `check` is asked on a connection's thread, before the first byte is sent and after the last one.
    """

    def __init__(self, arena: Arena, check: Check, options: LinkOptions) -> None:
        self.host = options.host
        self.port = options.port
        self._arena = arena
        self._check = check
        self._options = options
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._peer_to_token: dict[str, bytes] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._connection_to_peer: dict[socket.socket, str] = {}
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)

    def start(self) -> None:
        """Listen. Raises `AddressInUse` if the port is taken or the address is not ours."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise AddressInUse(
                f"KV cannot be served at {self.host}:{self.port}: {error.strerror}"
            ) from None
        self.port = self._listener.getsockname()[1]
        self._acceptor.start()

    def address_for(self, peer: str) -> str:
        """Where `peer` reads, with a new token in it; tell it to nobody else.

        It holds until `revoke`, also when connections break, and ends an earlier one.
        """
        self.revoke(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._peer_to_token[peer] = token
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{token.hex()}"

    def revoke(self, peer: str) -> None:
        """End a peer's right to read, and its connections."""
        with self._lock:
            self._peer_to_token.pop(peer, None)
            for sock, name in self._connection_to_peer.items():
                if name == peer:
                    _shut_down(sock)

    def close(self) -> None:
        """Hang up on all peers. When it returns, no thread touches the arena any more."""
        if self._listener is None:
            return
        with self._lock:
            self._is_closing.set()
            threads = list(self._connections.values())
            for sock in self._connections:
                _shut_down(sock)
        _shut_down(self._listener)
        for thread in [self._acceptor, *threads]:
            thread.join()
        self._listener.close()
        self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Out of files, or a peer that gave up; trying again at once would spin.
                if self._is_closing.wait(0.1):
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="kv-send", daemon=True)
            with self._lock:
                has_room = len(self._connections) < self._options.max_readers
                if has_room and not self._is_closing.is_set():
                    self._connections[sock] = thread
                    thread.start()
                    continue
            _refuse_and_close(sock, f"{self._options.max_readers} readers are connected already")

    def _serve(self, sock: socket.socket) -> None:
        try:
            # A reader that is gone, slow or not ours: it has learned, or sees, that it ended.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
                peer = self._welcome(sock)
                while peer is not None and self._serve_read(sock, peer):
                    pass
        finally:
            with self._lock:
                del self._connections[sock]
                self._connection_to_peer.pop(sock, None)
            sock.close()

    def _welcome(self, sock: socket.socket) -> str | None:
        magic, token = HELLO.unpack(receive_bytes(sock, HELLO.size, self._wait_for_progress))
        if magic != MAGIC:
            return None
        with self._lock:
            known = list(self._peer_to_token.items())
            # All are compared, so that the time tells nothing.
            peers = [name for name, other in known if hmac.compare_digest(token, other)]
            for name in peers:
                self._connection_to_peer[sock] = name
        if not peers:
            sock.sendall(refusal("the token is unknown or revoked: connect the workers again"))
            return None
        sock.sendall(ANSWER.pack(OK, 0))
        return peers[0]

    def _serve_read(self, sock: socket.socket, peer: str) -> bool:
        """Serve one read; False if the connection is of no use after it."""
        raw = receive_bytes(sock, REQUEST.size, _wait_for_request)
        generation, lease_id, block_bytes, num_blocks = REQUEST.unpack(raw)
        if not 0 < num_blocks <= self._arena.num_blocks:
            sock.sendall(
                refusal(f"{num_blocks} blocks are asked for; 1 to {self._arena.num_blocks} exist")
            )
            return False
        raw = receive_bytes(sock, num_blocks * U32_BYTES, self._wait_for_progress)
        request = ReadRequest(peer, LeaseId(lease_id), unpack_u32(raw))
        reason = self._refuse(request, generation, block_bytes)
        if reason is not None:
            sock.sendall(refusal(reason))
            return True
        sock.sendall(ANSWER.pack(OK, num_blocks * block_bytes))
        views = block_views(self._arena.buffer, block_bytes, request.blocks)
        send_views(sock, views, self._wait_for_progress)
        reason = self._check(request)
        sock.sendall(ANSWER.pack(OK, 0) if reason is None else refusal(reason))
        return True

    def _wait_for_progress(self, sock: socket.socket) -> None:
        set_limit(sock, self._options.stall_timeout_s)

    def _refuse(self, request: ReadRequest, generation: int, block_bytes: int) -> str | None:
        arena = self._arena
        if generation != arena.generation:
            return f"the arena has generation {arena.generation}, not {generation}"
        if block_bytes != arena.block_bytes:
            return f"a block has {arena.block_bytes} bytes, not {block_bytes}"
        highest = max(request.blocks)
        if highest >= arena.num_blocks:
            return f"there is no block {highest}: the arena has {arena.num_blocks}"
        return self._check(request)


def _wait_for_request(sock: socket.socket) -> None:
    # Keep-alive bounds it: an idle reader stays, a vanished one goes.
    set_limit(sock, None)


def _shut_down(sock: socket.socket) -> None:
    """Wake the thread that waits on `sock`; it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _refuse_and_close(sock: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError), sock:
        sock.setblocking(False)
        sock.send(refusal(reason))
