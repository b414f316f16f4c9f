"""The shell around `ClientCore`: a DEALER socket on the running asyncio loop."""

import asyncio
import secrets
import time
from typing import TypeAlias

from llmrt.actor import sockets
from llmrt.actor.channel import CLOSED, Channel
from llmrt.actor.process import this_process
from llmrt.actor.timer import DeadlineTimer
from llmrt.client.core import ClientCore
from llmrt.client.events import (
    BadMessageReceived,
    CancelWanted,
    CloseWanted,
    Deliver,
    Effect,
    End,
    Event,
    ReadTo,
    Received,
    Rows,
    Send,
    SendFailed,
    Submit,
    Tick,
)
from llmrt.client.results import Outcome, StreamEvent
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.envelope import check_frames, decode_body, decode_header, frame_at
from llmrt.wire.errors import ProtocolError, RequestCancelled, RequestConflict
from llmrt.wire.ids import RequestId
from llmrt.wire.messages import (
    EVENTS,
    FAILED,
    FINISHED,
    PS_REPLY,
    TOKENIZED,
    WELCOME,
    Failure,
    Finished,
    Hello,
    PsReply,
    Welcome,
)
from llmrt.wire.steps import decode_step

# The routing id of the connection, drawn per session.
SESSION_BYTES = 16
Mailbox: TypeAlias = "asyncio.Queue[StreamEvent | Outcome]"


def decode_message(frames: list[bytes]) -> Received:
    """A message of the broker; raises `ProtocolError`, whatever the bytes."""
    check_frames(frames)
    header = decode_header(frames[0])
    if header.kind == EVENTS:
        return Received(header, Rows(tuple(decode_step(frames))))
    if header.kind == TOKENIZED:
        return Received(header, tuple(unpack_u32(frame_at(frames, 1))))
    for kind, body_type in _BODIES.items():
        if header.kind == kind:
            return Received(header, decode_body(frame_at(frames, 1), body_type))
    return Received(header, None)


class Session:
    """One connection to a broker, on one loop. Owns socket, context and the timer."""

    def __init__(self, endpoint: str, *, connect_timeout_s: float) -> None:
        self._core = ClientCore(_hello(), endpoint, connect_timeout_s=connect_timeout_s)
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._context = sockets.context()
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._channel: Channel | None = None
        self._timer = DeadlineTimer(
            self._core.next_deadline, lambda: self._handle(Tick()), type(self._core).__name__
        )

    async def connect(self) -> None:
        """Start connecting, once; raises `ConfigError` for a malformed endpoint."""
        async with self._connecting:
            if self._channel is not None:
                return
            # A name lookup may block.
            targets = await asyncio.to_thread(sockets.resolve, self._core.endpoint)
            if self._is_closed:
                raise _closed()
            socket = sockets.dealer(self._context, secrets.token_bytes(SESSION_BYTES))
            for target in targets:
                sockets.connect(socket, target)
            self._channel = Channel(socket, self._on_message, self._on_unsent)

    @property
    def is_connected(self) -> bool:
        """Whether `submit` may be called; the broker may still be away."""
        return self._channel is not None

    def submit(self, submit: Submit) -> Mailbox:
        """Start a call. Its mailbox gets the events of a stream, then one outcome."""
        if self._channel is None:
            raise _closed()
        if submit.request_id in self._mailboxes:
            raise RequestConflict(
                f"request {submit.request_id.hex()} runs already in this client: "
                "wait for its end, or take another id"
            )
        mailbox = self._mailboxes[submit.request_id] = asyncio.Queue()
        self._handle(submit)
        return mailbox

    def cancel(self, request_id: RequestId) -> None:
        if self._channel is not None:
            self._handle(CancelWanted(request_id))

    def read_to(self, request_id: RequestId, seq: int) -> None:
        """The reader has taken every token below `seq`."""
        if self._channel is not None and request_id in self._mailboxes:
            self._handle(ReadTo(request_id, seq))

    def leave(self, request_id: RequestId) -> None:
        """The reader of a call goes: cancel it unless it has ended."""
        if request_id in self._mailboxes:
            self.cancel(request_id)

    async def close(self) -> None:
        """Cancel what is live and close the socket; waits until the last frames are out."""
        self._is_closed = True
        if self._channel is not None:
            self._handle(CloseWanted())
            self._channel.close()
            self._channel = None
        self._timer.close()
        await asyncio.to_thread(self._context.term)

    def _handle(self, event: Event) -> None:
        for effect in self._core.handle(event, time.monotonic()):
            self._perform(effect)
        self._timer.arm()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(frames):
                if self._channel is not None:
                    self._channel.send(frames)
            case Deliver(request_id, event):
                self._mailboxes[request_id].put_nowait(event)
            case End(request_id, outcome):
                self._mailboxes.pop(request_id).put_nowait(outcome)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            received = decode_message(frames)
        except ProtocolError as error:
            self._handle(BadMessageReceived(error))
            return
        self._handle(received)

    def _on_unsent(self, frames: list[bytes], reason: str) -> None:
        if reason == CLOSED or self._channel is None:
            return
        header = decode_header(frames[0])
        self._handle(SendFailed(header.kind, RequestId(header.request_id), reason))


_BODIES: dict[str, type[Welcome | Finished | Failure | PsReply]] = {
    WELCOME: Welcome,
    FINISHED: Finished,
    FAILED: Failure,
    PS_REPLY: PsReply,
}


def _hello() -> Hello:
    try:
        return Hello(process=this_process())
    except OSError:  # no /proc: the broker will notice the end of this process by its silence
        return Hello()


def _closed() -> RequestCancelled:
    return RequestCancelled("the client is closed: make a new one")
