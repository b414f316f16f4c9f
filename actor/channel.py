"""A ZeroMQ socket on the running asyncio loop: messages come as calls, sends never block.

The descriptor of a ZeroMQ socket only signals that *something* changed, and any call on the
socket may swallow that signal. So every wake-up and every send is followed by a turn of
`_pump`, which reads until nothing is left (zguide, "edge-triggered"; zmq_getsockopt ZMQ_FD).
A wake-up itself takes one message, unasked: mostly it is the only one, and somebody waits for it.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import zmq

from llmrt.actor.sockets import Socket

Frames: TypeAlias = "list[bytes]"

UNROUTABLE = "unroutable"
FULL = "full"
CLOSED = "closed"

# Messages per turn of the loop: enough to hide the cost of a turn, few enough that timers and
# other sockets get theirs (some 2 ms with a handler of 30 us).
_MESSAGES_PER_TURN = 64
_RETRY_S = 0.02
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE_NOBLOCK = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
# The calls below the convenient ones take half of their time: 10 instead of 18 us for a message of
# four frames in and out again. A frame object knows whether more follow; asking the socket is dear.
_send, _recv, _get = zmq.backend.Socket.send, zmq.backend.Socket.recv, zmq.backend.Socket.get


class _Outbox:
    """What waits for one peer, in order."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages: deque[Frames] = deque()
        self.size_bytes = 0


class Channel:
    """Owns `socket`. Frames of a ROUTER begin with the routing id, both ways.

    A message that cannot go out now waits in the outbox of its peer, up to `max_outbox_bytes`
    per peer. One that never will is handed back by `on_unsent(frames, reason)`, always from the
    loop and never from within `send`: the reason is `unroutable` (the peer is not connected),
    `full` (its outbox is) or `closed` (this channel is).
    """

    def __init__(
        self,
        socket: Socket,
        on_message: Callable[[Frames], None],
        on_unsent: Callable[[Frames, str], None],
        *,
        max_outbox_bytes: int = 64 << 20,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_unsent = on_unsent
        self._max_outbox_bytes = max_outbox_bytes
        self._is_router = socket.type == zmq.ROUTER
        # The first message of a turn goes out at once; those behind it together at its end, so that
        # libzmq wakes its thread once for all of them (measured: a fifth of a broker's time).
        self._ready: list[Frames] = []
        self._outboxes: dict[bytes, _Outbox] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.SocketOption.FD))
        self._is_pump_due = False
        self._is_retry_due = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self._wake)
        self._pump_soon()

    def send(self, frames: Frames) -> None:
        """Send, or keep in the outbox. Messages to one peer keep their order."""
        if self._is_closed:
            self._give_back(frames, CLOSED)
            return
        if self._is_pump_due:
            self._ready.append(frames)
        else:
            self._send_or_keep(frames)
            self._pump_soon()

    def waiting_bytes(self, peer: bytes = b"") -> int:
        """Bytes that wait to go to a peer (of a DEALER: to its only one)."""
        outbox = self._outboxes.get(peer)
        ready = [f for f in self._ready if not self._is_router or f[0] == peer]
        kept_bytes = 0 if outbox is None else outbox.size_bytes
        return kept_bytes + sum(len(frame) for frames in ready for frame in frames)

    def close(self) -> None:
        """Close the socket. libzmq goes on sending what it took, for `LINGER` at most."""
        if self._is_closed:
            return
        self._flush()
        self._send_ready()
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        for outbox in self._outboxes.values():
            for frames in outbox.messages:
                self._give_back(frames, CLOSED)
        self._outboxes.clear()
        self._socket.close()

    def _wake(self) -> None:
        if self._is_pump_due:  # this turn of the loop has its pump
            return
        try:
            frames = self._receive()
            if frames is not None:
                self._on_message(frames)
        finally:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        if self._is_closed:
            return
        if self._outboxes:
            # This takes in which peers take messages again, or left; a send may put that off
            # (libzmq throttles it), and the descriptor would not signal it again.
            _get(self._socket, _EVENTS)
            self._flush()
        self._send_ready()
        # Behind the sends, which may have swallowed the signal of what has come.
        is_drained = not int(_get(self._socket, _EVENTS)) & _POLLIN
        try:
            for _ in range(0 if is_drained else _MESSAGES_PER_TURN):
                frames = self._receive()
                is_drained = frames is None
                if frames is None:
                    return
                self._on_message(frames)
                if self._socket.closed:
                    return
        finally:
            # Also after a fault of the receiver: messages left behind would give no new signal.
            if not is_drained:
                self._pump_soon()

    def _receive(self) -> "list[bytes] | None":
        """The next message, or None if there is none."""
        socket = self._socket
        try:
            frame = _recv(socket, _NOBLOCK, False)
        except zmq.Again:
            return None
        frames = [frame.bytes]
        while frame.more:
            frame = _recv(socket, _NOBLOCK, False)
            frames.append(frame.bytes)
        return frames

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        for frames in ready:
            self._send_or_keep(frames)

    def _send_or_keep(self, frames: Frames) -> None:
        peer = frames[0] if self._is_router else b""
        if peer in self._outboxes or not self._try_send(frames):
            self._keep(peer, frames)

    def _retry_later(self) -> None:
        """A send to one peer may swallow the signal that another takes messages again."""
        if not self._is_retry_due:
            self._is_retry_due = True
            self._loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._pump_soon()

    def _try_send(self, frames: Frames) -> bool:
        """False if the peer takes nothing now. A message goes out whole or not at all."""
        socket = self._socket
        try:
            for frame in frames[:-1]:
                _send(socket, frame, _SNDMORE_NOBLOCK)
            _send(socket, frames[-1], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._give_back(frames, UNROUTABLE)
        return True

    def _keep(self, peer: bytes, frames: Frames) -> None:
        outbox = self._outboxes.setdefault(peer, _Outbox())
        size_bytes = sum(map(len, frames))
        if outbox.size_bytes + size_bytes > self._max_outbox_bytes:
            self._give_back(frames, FULL)
            if not outbox.messages:
                del self._outboxes[peer]
            return
        outbox.messages.append(frames)
        outbox.size_bytes += size_bytes
        self._retry_later()

    def _flush(self) -> None:
        for peer, outbox in list(self._outboxes.items()):
            messages = outbox.messages
            while messages and self._try_send(messages[0]):
                outbox.size_bytes -= sum(map(len, messages.popleft()))
            if not messages:
                del self._outboxes[peer]
        if self._outboxes:
            self._retry_later()

    def _give_back(self, frames: Frames, reason: str) -> None:
        self._loop.call_soon(self._on_unsent, frames, reason)
