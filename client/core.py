"""The client session as a pure machine: one connection, many calls.

A call waits until the link is open (`llmrt.client.link`), is sent, and ends by exactly one `End`,
at the latest `GRACE_S` after its deadline. Rules that are hard to see:

- A repeated `generate` under the same id attaches to the running stream and names the token
  wanted next. So one rule covers a lost message, a lost connection and a restarted broker:
  send it again.
- Whatever names a call that is not live crossed with its end here: counted and dropped.
- Tokens are acknowledged when their reader has taken them, together, every `ACK_S`: a reader that
  stalls holds back its own stream, and nothing piles up here.
- A cancel that cannot be sent is owed until the link opens again.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import assert_never

from llmrt.client.events import (
    BadMessageReceived,
    Body,
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
from llmrt.client.link import Link
from llmrt.client.results import Outcome
from llmrt.client.sequencer import Sequencer, Skipped
from llmrt.wire.envelope import NO_REQUEST, Header, encode_header
from llmrt.wire.errors import (
    BrokerUnreachable,
    DeadlineExceeded,
    InternalError,
    LlmrtError,
    MessageTooLarge,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    VersionMismatch,
    error_from_code,
)
from llmrt.wire.ids import RequestId
from llmrt.wire.messages import (
    ACK,
    BEAT,
    CANCEL,
    GENERATE,
    HELLO,
    PS,
    TOKENIZE,
    Failure,
    Finished,
    Hello,
    PsReply,
    Welcome,
)
from llmrt.wire.steps import StepRow

# Only a message lost between two living processes needs this, so it may be slow.
RESEND_S, MAX_RESEND_S = 5.0, 60.0
# A broker is restarted within seconds; longer than that it is gone.
RECONNECT_S = 30.0
# The broker ends a request at its deadline; this is for one that cannot say so any more.
GRACE_S = 1.0
ACK_S, ACK_TOKENS = 0.25, 256
_REPLY_TO: dict[str, type[PsReply] | type[tuple[int, ...]]] = {PS: PsReply, TOKENIZE: tuple}
# Attaching again for missing tokens, without progress, before the stream is given up.
MAX_GAPS = 5
GAP_S = 1.0


@dataclass(slots=True)
class _Call:
    submit: Submit
    submitted_at: float
    is_sent: bool = False
    heard_at: float = 0.0
    resend_s: float = RESEND_S
    sequencer: Sequencer = field(default_factory=Sequencer)
    read_seq: int = 0
    acked_seq: int = 0
    num_gaps: int = 0
    gap_until: float = -math.inf
    timer_at: float = math.inf

    @property
    def deadline(self) -> float:
        return self.submitted_at + self.submit.deadline_s


class ClientCore:
    """Owns every call of a session. `hello` introduces it; `endpoint` is for messages only."""

    def __init__(self, hello: Hello, endpoint: str, *, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self.connect_timeout_s = connect_timeout_s
        self.num_late = 0
        self.num_duplicates = 0
        self.num_gaps = 0
        self.num_bad_messages = 0
        self._link = Link(hello)
        self._calls: dict[RequestId, _Call] = {}
        self._owed_cancels: list[RequestId] = []
        self._unacked: dict[RequestId, None] = {}
        # (time, id) of every call, and stale entries: only one that equals `timer_at` counts.
        self._timers: list[tuple[float, RequestId]] = []
        self._ack_at = math.inf
        self._effects: list[Effect] = []

    @property
    def num_live(self) -> int:
        return len(self._calls)

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._effects = []
        match event:
            case Submit():
                self._submit(event, now)
            case Received(header, body):
                self._link.heard_at = now
                self._receive(header, body, now)
            case BadMessageReceived(error):
                self.num_bad_messages += 1
                if isinstance(error, VersionMismatch):
                    self._end_all(error)
            case SendFailed():
                self._send_failed(event)
            case ReadTo(request_id, seq):
                self._read_to(request_id, seq, now)
            case CancelWanted(request_id):
                self._cancel(request_id, RequestCancelled("cancelled by the caller"))
            case CloseWanted():
                for request_id in list(self._calls):
                    self._cancel(request_id, RequestCancelled("the client was closed"))
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        return self._effects

    def next_deadline(self) -> float | None:
        if not self._calls:
            return None
        while not self._is_current(*self._timers[0]):
            heapq.heappop(self._timers)
        return min(self._link.deadline(), self._ack_at, self._timers[0][0])

    def check(self) -> None:
        entries = set(self._timers)
        for request_id, call in self._calls.items():
            assert (call.timer_at, request_id) in entries
            assert call.timer_at <= call.deadline + GRACE_S
            assert call.acked_seq <= call.read_seq <= call.sequencer.next_seq
            assert call.is_sent or not self._link.is_open
        assert self._unacked.keys() <= self._calls.keys()
        assert (self._ack_at < math.inf) == bool(self._unacked)
        assert not self._calls or self._link.deadline() < math.inf

    # Calls

    def _submit(self, submit: Submit, now: float) -> None:
        if submit.request_id in self._calls:
            return  # the caller has to take another id; the running call is left alone
        if not self._calls:
            self._effects += self._link.wake(now)
        call = self._calls[submit.request_id] = _Call(submit, now)
        if self._link.welcome is None:
            self._arm(call)
        else:
            self._send(call, self._link.welcome, now)

    def _send(self, call: _Call, welcome: Welcome, now: float) -> None:
        """Send a call for the first time, or attach to it again."""
        submit = call.submit
        if submit.kind == HELLO:
            self._end(call, welcome)
            return
        sizes = [len(frame) for frame in submit.frames]
        if sizes and (sizes[0] > welcome.max_body_bytes or max(sizes) > welcome.max_raw_bytes):
            error = MessageTooLarge(
                f"request of {sum(sizes)} bytes; the broker takes {welcome.max_body_bytes} "
                f"of body and {welcome.max_raw_bytes} of prompt: shorten the prompt"
            )
            self._end(call, error)
            return
        header = encode_header(
            submit.kind,
            submit.request_id,
            seq=call.sequencer.next_seq,
            budget_ms=max(1, int((call.deadline - now) * 1000)),
        )
        self._effects.append(Send([header, *submit.frames]))
        call.is_sent = True
        call.heard_at = now
        self._arm(call)

    def _send_failed(self, event: SendFailed) -> None:
        call = self._calls.get(event.request_id)
        # Hellos, beats and acknowledgements are repeated anyway.
        if call is not None and event.kind == call.submit.kind:
            reason = f"the outbox for {self.endpoint} is {event.reason}: wait for answers first"
            self._end(call, Overloaded(reason))

    def _tick(self, now: float) -> None:
        if not self._calls:
            return
        was_open = self._link.is_open
        self._effects += self._link.tick(now)
        if was_open and not self._link.is_open:
            self._arm_all()
        if now >= self._ack_at:
            for request_id in list(self._unacked):
                self._ack(self._calls[request_id])
        while self._timers and self._timers[0][0] <= now:
            when, request_id = heapq.heappop(self._timers)
            if self._is_current(when, request_id):
                call = self._calls[request_id]
                call.timer_at = math.inf
                self._call_due(call, now)

    def _call_due(self, call: _Call, now: float) -> None:
        submit = call.submit
        if now >= call.deadline + GRACE_S:
            error = DeadlineExceeded(
                f"request {submit.request_id.hex()} has no end after its deadline of "
                f"{submit.deadline_s:g} s: give more time by deadline_s"
            )
            self._cancel(submit.request_id, error)
            return
        welcome = self._link.welcome
        if welcome is None and now >= self._unreachable_at(call):
            silent_s = now - (self._link.heard_at if call.is_sent else call.submitted_at)
            reason = f"no broker answers at {self.endpoint} for {silent_s:.1f} s: is it running?"
            self._end(call, BrokerUnreachable(reason))
        elif welcome is not None and now >= self._resend_at(call):
            call.resend_s = min(2 * call.resend_s, MAX_RESEND_S)
            self._effects.append(self._link.hello)
            self._send(call, welcome, now)
        else:
            self._arm(call)

    def _resend_at(self, call: _Call) -> float:
        return call.heard_at + call.resend_s if call.submit.kind == GENERATE else math.inf

    def _unreachable_at(self, call: _Call) -> float:
        if call.is_sent:
            return max(self._link.heard_at, call.submitted_at) + RECONNECT_S
        return call.submitted_at + self.connect_timeout_s

    def _arm(self, call: _Call) -> None:
        """Set the call's timer. Hearing from a call does not: its timer then comes too early."""
        other = self._resend_at(call) if self._link.is_open else self._unreachable_at(call)
        due = min(call.deadline + GRACE_S, other)
        if due != call.timer_at:
            call.timer_at = due
            heapq.heappush(self._timers, (due, call.submit.request_id))

    def _arm_all(self) -> None:
        for call in self._calls.values():
            self._arm(call)

    def _is_current(self, when: float, request_id: RequestId) -> bool:
        call = self._calls.get(request_id)
        return call is not None and call.timer_at == when

    def _end(self, call: _Call, outcome: Outcome) -> None:
        request_id = call.submit.request_id
        del self._calls[request_id]
        self._settle(request_id)
        self._effects.append(End(request_id, outcome))
        if not self._calls:
            self._timers.clear()

    def _end_all(self, error: LlmrtError) -> None:
        for call in list(self._calls.values()):
            self._end(call, error)

    def _cancel(self, request_id: RequestId, error: LlmrtError) -> None:
        """End a call here, and tell the broker: now, or once it answers again."""
        call = self._calls.get(request_id)
        if call is None or call.submit.kind == GENERATE:
            if self._link.is_open:
                self._effects.append(Send([encode_header(CANCEL, request_id)]))
            elif call is not None and call.is_sent:
                self._owed_cancels.append(request_id)
        if call is not None:
            self._end(call, error)

    # What the broker says

    def _receive(self, header: Header, body: Body, now: float) -> None:
        match body:
            case Welcome():
                if self._link.take_welcome(body, now):
                    self._open(body, now)
            case Rows(rows):
                for row in rows:
                    self._take_row(row, now)
            case Failure() if header.request_id == NO_REQUEST:
                self._end_all(error_from_code(body.code, body.message))
            case Finished() | Failure() | PsReply() | tuple():
                call = self._calls.get(RequestId(header.request_id))
                if call is None:
                    self.num_late += 1  # it crossed with a cancel, or was answered twice
                elif isinstance(body, Failure):
                    self._end(call, error_from_code(body.code, body.message))
                elif isinstance(body, Finished) and call.submit.kind == GENERATE:
                    self._finished(call, header.seq, body, now)
                elif isinstance(body, _REPLY_TO.get(call.submit.kind, ())):
                    self._end(call, body)
            case None:
                if header.kind == BEAT and self._link.is_of_other_broker(header.epoch):
                    self._effects += self._link.greet(now)
                    self._arm_all()
            case _:
                assert_never(body)

    def _open(self, welcome: Welcome, now: float) -> None:
        for request_id in self._owed_cancels:
            self._effects.append(Send([encode_header(CANCEL, request_id)]))
        self._owed_cancels.clear()
        for call in list(self._calls.values()):
            self._send(call, welcome, now)

    def _take_row(self, row: StepRow, now: float) -> None:
        call = self._calls.get(row.request_id)
        if call is None or call.submit.kind != GENERATE:
            self.num_late += 1  # on its way when the call was cancelled or ended here
            return
        call.heard_at = now
        try:
            taken = call.sequencer.take(row)
        except (ProtocolError, InternalError) as error:
            self.num_bad_messages += 1
            self._cancel(row.request_id, error)
            return
        if taken is Skipped.DUPLICATE:
            self.num_duplicates += 1
        elif taken is Skipped.GAP:
            self._miss(call, now)
        else:
            call.num_gaps, call.gap_until, call.resend_s = 0, -math.inf, RESEND_S
            self._effects.append(Deliver(row.request_id, taken))

    def _finished(self, call: _Call, num_tokens: int, finished: Finished, now: float) -> None:
        if num_tokens > call.sequencer.next_seq:
            self._miss(call, now)
            return
        if call.sequencer.next_seq > call.acked_seq:
            # All of it is here, and no more will come: nothing need be kept for the reader.
            call.read_seq = call.sequencer.next_seq
            self._ack(call)
        if finished.finish_reason == "cancelled":
            self._end(call, RequestCancelled("the request was cancelled by the broker"))
        else:
            self._end(call, finished)

    def _miss(self, call: _Call, now: float) -> None:
        """Tokens are missing: attach again, once for all the rows that follow the gap."""
        self.num_gaps += 1
        if now < call.gap_until or self._link.welcome is None:
            return
        call.gap_until = now + GAP_S
        call.num_gaps += 1
        if call.num_gaps <= MAX_GAPS:
            self._send(call, self._link.welcome, now)
            return
        request_id = call.submit.request_id
        self._cancel(
            request_id,
            InternalError(
                f"tokens of request {request_id.hex()} are missing from number "
                f"{call.sequencer.next_seq} on, after {MAX_GAPS} tries to get them: send it again"
            ),
        )

    def _read_to(self, request_id: RequestId, seq: int, now: float) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return  # the last tokens are read after the end has come
        call.read_seq = max(call.read_seq, min(seq, call.sequencer.next_seq))
        if call.read_seq - call.acked_seq >= ACK_TOKENS:
            self._ack(call)
        elif call.read_seq > call.acked_seq:
            self._unacked[call.submit.request_id] = None
            self._ack_at = min(self._ack_at, now + ACK_S)

    def _ack(self, call: _Call) -> None:
        call.acked_seq = call.read_seq
        request_id = call.submit.request_id
        self._effects.append(Send([encode_header(ACK, request_id, seq=call.acked_seq)]))
        self._settle(request_id)

    def _settle(self, request_id: RequestId) -> None:
        self._unacked.pop(request_id, None)
        if not self._unacked:
            self._ack_at = math.inf
