"""The client machine in virtual time: rules by example, then any history against a model."""

from typing import TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmrt.client.core import (
    ACK_S,
    ACK_TOKENS,
    GAP_S,
    GRACE_S,
    MAX_GAPS,
    RECONNECT_S,
    RESEND_S,
    ClientCore,
)
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
from llmrt.client.link import SILENT_BEATS
from llmrt.client.results import Outcome, StreamEvent
from llmrt.wire.envelope import Header, decode_header
from llmrt.wire.errors import (
    BrokerUnreachable,
    DeadlineExceeded,
    InternalError,
    LlmrtError,
    MessageTooLarge,
    Overloaded,
    ProtocolError,
    RemoteError,
    RequestCancelled,
    VersionMismatch,
)
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.messages import (
    ACK,
    BEAT,
    CANCEL,
    EVENTS,
    FAILED,
    FINISHED,
    GENERATE,
    HELLO,
    PS,
    PS_REPLY,
    TOKENIZE,
    TOKENIZED,
    WELCOME,
    Failure,
    Finished,
    Hello,
    PsReply,
    Usage,
    Welcome,
)
from llmrt.wire.steps import StepRow, make_row

T = TypeVar("T", bound=Effect)
A, B = RequestId(b"a" * 16), RequestId(b"b" * 16)
ENDPOINT = "tcp://127.0.0.1:7700"
PS_ANSWER = PsReply(broker_epoch=1, uptime_s=1.0, workers=(), requests=(), counters={})


class Harness:
    """A core, its clock, and what it did."""

    def __init__(self) -> None:
        self.core = ClientCore(Hello(), ENDPOINT, connect_timeout_s=5.0)
        self.now = 1000.0

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def receive(
        self, kind: str, body: Body, request_id: bytes = b"", *, seq: int = 0, epoch: int = 0
    ) -> list[Effect]:
        header = Header(kind=kind, request_id=request_id, seq=seq, epoch=epoch)
        return self.handle(Received(header, body))

    def rows(self, *rows: StepRow) -> list[Effect]:
        return self.receive(EVENTS, Rows(rows))

    def welcome(self, epoch: int = 1, *, max_raw_bytes: int = 1000) -> list[Effect]:
        body = Welcome(
            broker_epoch=epoch,
            max_body_bytes=100,
            max_raw_bytes=max_raw_bytes,
            max_frames=16,
            beat_s=1.0,
        )
        return self.receive(WELCOME, body)

    def submit(
        self, request_id: RequestId = A, *, kind: str = GENERATE, deadline_s: float = 100.0
    ) -> list[Effect]:
        return self.handle(Submit(request_id, kind, deadline_s, (b"body", b"prompt")))

    def run_until(self, end: float, *, answers_beats: bool = True) -> list[Effect]:
        """Tick at every deadline up to `end`; a broker answers beats."""
        effects: list[Effect] = []
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            new = self.handle(Tick())
            assert self.core.next_deadline() is None or self.core.next_deadline() > self.now  # type: ignore[operator]  # checked
            effects += new
            if answers_beats and BEAT in sent_kinds(new):
                effects += self.receive(BEAT, None, epoch=1)
        self.now = end
        return effects

    def open_with(self, request_id: RequestId = A, *, deadline_s: float = 100.0) -> None:
        self.submit(request_id, deadline_s=deadline_s)
        self.welcome()


def sent(effects: list[Effect], kind: str) -> list[Header]:
    headers = [decode_header(effect.frames[0]) for effect in effects if isinstance(effect, Send)]
    return [header for header in headers if header.kind == kind]


def sent_kinds(effects: list[Effect]) -> list[str]:
    return [decode_header(effect.frames[0]).kind for effect in effects if isinstance(effect, Send)]


def outcomes(effects: list[Effect]) -> list[Outcome]:
    return [effect.outcome for effect in effects if isinstance(effect, End)]


def error_of(effects: list[Effect]) -> LlmrtError:
    (outcome,) = outcomes(effects)
    assert isinstance(outcome, LlmrtError)
    return outcome


def row(seq: int, *token_ids: int, text: str = "", request_id: RequestId = A) -> StepRow:
    return make_row(request_id, Attempt(1, 1), seq, token_ids, text)


def make_finished(reason: str = "stop") -> Finished:
    return Finished(
        finish_reason=reason,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings_ms={},
        decode_worker="d",
        prefill_worker="d",
    )


# Connecting


def test_calls_wait_for_the_welcome() -> None:
    h = Harness()
    assert sent_kinds(h.submit()) == [HELLO]
    assert sent_kinds(h.submit(B)) == []
    assert [header.request_id for header in sent(h.welcome(), GENERATE)] == [A, B]


def test_hello_is_repeated_until_it_is_answered() -> None:
    h = Harness()
    h.submit(deadline_s=100.0)
    assert len(sent(h.run_until(h.now + 4.0), HELLO)) == 4
    assert sent_kinds(h.welcome()) == [GENERATE]
    assert HELLO not in sent_kinds(h.run_until(h.now + 4.0))


def test_absent_broker_is_unreachable_after_the_connect_timeout() -> None:
    h = Harness()
    h.submit()
    start = h.now
    assert outcomes(h.run_until(start + 4.99)) == []
    error = error_of(h.run_until(start + 5.0))
    assert isinstance(error, BrokerUnreachable)
    assert ENDPOINT in error.message
    assert h.core.next_deadline() is None


def test_waiting_for_the_connection_is_a_call() -> None:
    h = Harness()
    h.submit(kind=HELLO)
    (outcome,) = outcomes(h.welcome())
    assert isinstance(outcome, Welcome)


def test_an_idle_session_greets_again() -> None:
    """The broker may have forgotten it, or be another one."""
    h = Harness()
    h.open_with()
    h.receive(FINISHED, make_finished(), A)
    h.now += SILENT_BEATS - 0.1
    assert sent_kinds(h.submit(B)) == [GENERATE]
    h.receive(FINISHED, make_finished(), B)
    h.now += SILENT_BEATS + 0.1
    assert sent_kinds(h.submit()) == [HELLO]


def test_nothing_is_due_when_nothing_is_wanted() -> None:
    h = Harness()
    assert h.core.next_deadline() is None
    h.open_with()
    h.receive(FINISHED, make_finished(), A)
    assert h.core.next_deadline() is None


def test_beats_are_sent_while_something_is_live() -> None:
    h = Harness()
    h.open_with()
    assert len(sent(h.run_until(h.now + 4.5), BEAT)) == 4


def test_a_second_welcome_of_one_broker_changes_nothing() -> None:
    h = Harness()
    h.open_with()
    assert h.welcome() == []


def test_another_version_ends_every_call() -> None:
    h = Harness()
    h.submit()
    h.submit(B)
    effects = h.handle(BadMessageReceived(VersionMismatch("peer speaks 2")))
    assert [type(outcome) for outcome in outcomes(effects)] == [VersionMismatch] * 2


def test_garbage_is_counted_and_dropped() -> None:
    h = Harness()
    h.open_with()
    assert h.handle(BadMessageReceived(ProtocolError("?"))) == []
    assert h.core.num_bad_messages == 1


def test_silence_counts_from_when_something_is_wanted() -> None:
    h = Harness()
    h.open_with()
    h.receive(FINISHED, make_finished(), A)
    h.now += SILENT_BEATS - 0.1
    h.submit(B)
    assert HELLO not in sent_kinds(h.run_until(h.now + 1.0))


# Losing the broker


def test_a_silent_broker_is_greeted_and_every_call_attaches_again() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, 1, 2))
    effects = h.run_until(h.now + SILENT_BEATS, answers_beats=False)
    assert sent_kinds(effects)[-1] == HELLO
    assert [header.seq for header in sent(h.welcome(), GENERATE)] == [2]


def test_a_lost_broker_is_greeted_as_often_as_a_new_one() -> None:
    h = Harness()
    h.open_with()
    effects = h.run_until(h.now + SILENT_BEATS + 4.0, answers_beats=False)
    assert len(sent(effects, HELLO)) == 5
    h.welcome()
    effects = h.run_until(h.now + SILENT_BEATS + 4.0, answers_beats=False)
    assert len(sent(effects, HELLO)) == 5


def test_a_lost_broker_ends_calls_without_a_timer_of_their_own() -> None:
    """Not only streams, which are sent again now and then."""
    h = Harness()
    h.submit(kind=TOKENIZE, deadline_s=600.0)
    h.welcome()
    effects = h.run_until(h.now + RECONNECT_S, answers_beats=False)
    assert isinstance(error_of(effects), BrokerUnreachable)


def test_a_restarted_broker_is_told_by_its_beat() -> None:
    h = Harness()
    h.open_with()
    assert sent_kinds(h.receive(BEAT, None, epoch=2)) == [HELLO]
    assert sent_kinds(h.welcome(epoch=2)) == [GENERATE]


def test_a_restarted_broker_is_told_by_its_welcome() -> None:
    h = Harness()
    h.open_with()
    assert sent_kinds(h.welcome(epoch=2)) == [GENERATE]


def test_a_sent_call_outlives_the_broker_for_a_restart_only() -> None:
    h = Harness()
    h.open_with()
    heard_at = h.now
    assert outcomes(h.run_until(heard_at + RECONNECT_S - 0.1, answers_beats=False)) == []
    error = error_of(h.run_until(heard_at + RECONNECT_S, answers_beats=False))
    assert isinstance(error, BrokerUnreachable)


def test_a_call_without_a_sign_is_sent_again_with_growing_pauses() -> None:
    h = Harness()
    h.open_with()
    effects = h.run_until(h.now + 7 * RESEND_S - 0.1)
    assert len(sent(effects, GENERATE)) == 2  # after 5 and after 15 seconds


def test_a_call_with_signs_is_not_sent_again() -> None:
    h = Harness()
    h.open_with()
    for seq in range(4):
        assert sent(h.run_until(h.now + RESEND_S - 0.1), GENERATE) == []
        h.rows(row(seq, seq))


def test_the_budget_is_what_is_left() -> None:
    h = Harness()
    h.submit(deadline_s=10.0)
    h.now += 2.5
    assert [header.budget_ms for header in sent(h.welcome(), GENERATE)] == [7500]


# Tokens


def test_tokens_are_delivered_once_and_in_order() -> None:
    h = Harness()
    h.open_with()
    assert h.rows(row(0, 7, 8, text="ab"), row(2, 9, text="c")) == [
        Deliver(A, StreamEvent(0, "ab", (7, 8))),
        Deliver(A, StreamEvent(2, "c", (9,))),
    ]
    assert h.rows(row(0, 7, 8, text="ab"), row(2, 9, text="c")) == []
    assert h.core.num_duplicates == 2


def test_a_gap_attaches_again_once() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, 7))
    effects = h.rows(row(2, 9), row(3, 10))
    assert [header.seq for header in sent(effects, GENERATE)] == [1]
    assert [type(effect) for effect in h.rows(row(1, 8), row(2, 9))] == [Deliver, Deliver]


def test_a_gap_that_stays_ends_the_stream() -> None:
    h = Harness()
    h.open_with()
    for _ in range(MAX_GAPS):
        assert sent_kinds(h.rows(row(2, 9))) == [GENERATE]
        h.now += GAP_S
    effects = h.rows(row(2, 9))
    assert isinstance(error_of(effects), InternalError)
    assert sent_kinds(effects) == [CANCEL]


def test_gaps_with_progress_in_between_are_survived() -> None:
    h = Harness()
    h.open_with()
    for seq in range(2 * MAX_GAPS):
        assert sent_kinds(h.rows(row(seq + 1, 9))) == [GENERATE]
        assert Deliver(A, StreamEvent(seq, "", (9,))) in h.rows(row(seq, 9))


def test_an_end_that_overtakes_tokens_waits_for_them() -> None:
    h = Harness()
    h.open_with()
    assert sent_kinds(h.receive(FINISHED, make_finished(), A, seq=1)) == [GENERATE]
    h.rows(row(0, 7))
    assert outcomes(h.receive(FINISHED, make_finished(), A, seq=1)) == [make_finished()]


def test_rows_of_an_ended_call_are_counted() -> None:
    h = Harness()
    h.open_with()
    h.handle(CancelWanted(A))
    assert h.rows(row(0, 7)) == []
    assert h.receive(FINISHED, make_finished(), A, seq=1) == []
    assert h.core.num_late == 2


def test_damaged_log_probabilities_end_the_stream() -> None:
    h = Harness()
    h.open_with()
    effects = h.rows(msgspec.structs.replace(row(0, 7), extras=b"\xc1"))
    assert type(error_of(effects)) is ProtocolError
    assert sent_kinds(effects) == [CANCEL]


def test_a_stream_that_comes_again_with_other_tokens_ends() -> None:
    """A broker that was restarted computes it anew, and need not get the same."""
    h = Harness()
    h.open_with()
    h.rows(row(0, 7, 8))
    h.welcome(epoch=2)
    effects = h.rows(row(0, 7, 9, 10))
    assert "token 1" in error_of(effects).message
    assert type(error_of(effects)) is InternalError
    assert sent_kinds(effects) == [CANCEL]


# Acknowledgements


def test_tokens_are_acknowledged_together_after_a_pause() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, 7))
    h.handle(ReadTo(A, 1))
    h.rows(row(1, 8))
    h.handle(ReadTo(A, 2))
    acks = sent(h.run_until(h.now + 5 * ACK_S), ACK)
    assert [(header.request_id, header.seq) for header in acks] == [(A, 2)]


def test_many_tokens_are_acknowledged_at_once() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, *range(ACK_TOKENS)))
    acks = sent(h.handle(ReadTo(A, ACK_TOKENS)), ACK)
    assert [header.seq for header in acks] == [ACK_TOKENS]
    assert sent(h.run_until(h.now + 5 * ACK_S), ACK) == []


def test_a_reader_that_stalls_is_not_acknowledged_for() -> None:
    """So the broker stops sending, and the other streams of this session go on."""
    h = Harness()
    h.open_with()
    h.rows(row(0, *range(10 * ACK_TOKENS)))
    assert sent(h.run_until(h.now + 5 * ACK_S), ACK) == []


def test_a_reader_cannot_have_read_what_has_not_come() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, 7))
    h.handle(ReadTo(A, 99))
    assert [header.seq for header in sent(h.run_until(h.now + 5 * ACK_S), ACK)] == [1]


def test_the_end_acknowledges_the_rest() -> None:
    h = Harness()
    h.open_with()
    h.rows(row(0, 7))
    effects = h.receive(FINISHED, make_finished(), A, seq=1)
    assert [header.seq for header in sent(effects, ACK)] == [1]


# Ends


def test_a_silent_request_ends_a_grace_after_its_deadline() -> None:
    h = Harness()
    h.open_with(deadline_s=3.0)
    start = h.now
    assert outcomes(h.run_until(start + 3.0 + GRACE_S - 0.01)) == []
    effects = h.run_until(start + 3.0 + GRACE_S)
    assert isinstance(error_of(effects), DeadlineExceeded)
    assert sent_kinds(effects)[-1] == CANCEL


@pytest.mark.parametrize("code", ["overloaded", "no_worker", "brand_new_code"])
def test_a_failure_keeps_its_code(code: str) -> None:
    h = Harness()
    h.open_with()
    error = error_of(h.receive(FAILED, Failure(code=code, message="why"), A))
    assert isinstance(error, RemoteError)
    assert (error.error_code, error.message) == (code, "why")


def test_a_failure_of_the_connection_ends_every_call() -> None:
    h = Harness()
    h.open_with()
    h.submit(B)
    effects = h.receive(FAILED, Failure(code="protocol_error", message="?"))
    assert [type(outcome) for outcome in outcomes(effects)] == [ProtocolError] * 2


def test_cancelled_by_the_broker_is_no_success() -> None:
    h = Harness()
    h.open_with()
    error = error_of(h.receive(FINISHED, make_finished("cancelled"), A))
    assert isinstance(error, RequestCancelled)


def test_cancel_tells_the_broker_and_ends_here() -> None:
    h = Harness()
    h.open_with()
    effects = h.handle(CancelWanted(A))
    assert sent_kinds(effects) == [CANCEL]
    assert isinstance(error_of(effects), RequestCancelled)
    assert h.core.num_live == 0


def test_cancel_before_the_welcome_sends_nothing() -> None:
    h = Harness()
    h.submit()
    effects = h.handle(CancelWanted(A))
    assert sent_kinds(effects) == []
    assert sent_kinds(h.welcome()) == []


def test_cancel_without_a_broker_is_sent_when_it_answers_again() -> None:
    h = Harness()
    h.open_with()
    h.submit(B)
    h.run_until(h.now + SILENT_BEATS, answers_beats=False)
    assert sent_kinds(h.handle(CancelWanted(A))) == []
    assert [header.request_id for header in sent(h.welcome(), CANCEL)] == [A]


def test_close_ends_and_cancels_everything() -> None:
    h = Harness()
    h.open_with()
    h.submit(B)
    effects = h.handle(CloseWanted())
    assert sent_kinds(effects) == [CANCEL, CANCEL]
    assert [type(outcome) for outcome in outcomes(effects)] == [RequestCancelled] * 2


def test_more_than_the_broker_takes_is_not_sent() -> None:
    h = Harness()
    h.submit()
    effects = h.welcome(max_raw_bytes=5)
    assert isinstance(error_of(effects), MessageTooLarge)
    assert sent_kinds(effects) == []


def test_a_full_outbox_ends_the_call() -> None:
    h = Harness()
    h.open_with()
    assert isinstance(error_of(h.handle(SendFailed(GENERATE, A, "full"))), Overloaded)


def test_an_unsent_acknowledgement_ends_nothing() -> None:
    h = Harness()
    h.open_with()
    assert h.handle(SendFailed(ACK, A, "full")) == []


def test_replies_go_to_the_call_of_their_kind() -> None:
    h = Harness()
    h.submit(kind=PS)
    h.submit(B, kind=TOKENIZE)
    h.welcome()
    assert h.receive(TOKENIZED, (1, 2), A) == []
    assert outcomes(h.receive(TOKENIZED, (1, 2), B)) == [(1, 2)]
    assert outcomes(h.receive(PS_REPLY, PS_ANSWER, A)) == [PS_ANSWER]


class ClientHistory(RuleBasedStateMachine):
    """Any mix of loss, repetition, restarts and cancels between a core and a model of a broker.

    The reader's side asserts that tokens come once and in order, and that each request ends
    once; at the end the network heals, and then every request must end in time.
    """

    NUM_TOKENS = 12

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness()
        self.epoch = 1
        self.is_up = True
        # Broker: tokens that each known request has produced. Network: messages on their way.
        self.made: dict[bytes, int] = {}
        self.to_client: list[tuple[Header, Body]] = []
        self.read: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, Outcome] = {}
        self.deadlines: dict[RequestId, float] = {}

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(frames):
                    if self.is_up:
                        self.broker_takes(decode_header(frames[0]))
                case Deliver(request_id, event):
                    tokens = self.read[request_id]
                    assert event.seq == len(tokens)
                    tokens.extend(event.token_ids)
                    assert tokens == list(range(len(tokens)))
                case End(request_id, outcome):
                    assert request_id not in self.ended
                    self.ended[request_id] = outcome
                    if isinstance(outcome, Finished):
                        assert len(self.read[request_id]) == self.NUM_TOKENS

    def broker_takes(self, header: Header) -> None:
        if header.kind == HELLO:
            welcome = Welcome(
                broker_epoch=self.epoch, max_body_bytes=99, max_raw_bytes=99, max_frames=9, beat_s=1
            )
            self.to_client.append((Header(kind=WELCOME), welcome))
        elif header.kind == BEAT:
            self.to_client.append((Header(kind=BEAT, epoch=self.epoch), None))
        elif header.kind == CANCEL:
            self.made.pop(header.request_id, None)
        elif header.kind == GENERATE:
            known = self.made.setdefault(header.request_id, 0)
            self.emit(header.request_id, min(header.seq, known), known)

    def emit(self, request_id: bytes, start: int, end: int) -> None:
        if start < end:
            piece = row(start, *range(start, end), request_id=RequestId(request_id))
            self.to_client.append((Header(kind=EVENTS), Rows((piece,))))
        if end == self.NUM_TOKENS:
            header = Header(kind=FINISHED, request_id=request_id, seq=end)
            self.to_client.append((header, make_finished()))

    def advance(self, seconds: float) -> None:
        end = self.h.now + seconds
        while (deadline := self.h.core.next_deadline()) is not None and deadline <= end:
            self.h.now = max(self.h.now, deadline)
            self.perform(self.h.handle(Tick()))
            later = self.h.core.next_deadline()
            assert later is None or later > self.h.now
        self.h.now = end

    @rule()
    def client_submits(self) -> None:
        request_id = RequestId(len(self.read).to_bytes(16, "big"))
        self.read[request_id] = []
        self.deadlines[request_id] = self.h.now + 60.0
        self.perform(self.h.submit(request_id, deadline_s=60.0))

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def client_cancels(self, data: st.DataObject) -> None:
        self.perform(self.h.handle(CancelWanted(data.draw(st.sampled_from(list(self.read))))))

    @precondition(lambda self: self.made)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def worker_steps(self, data: st.DataObject, num_tokens: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.made)))
        start = self.made[request_id]
        if self.is_up and start < self.NUM_TOKENS:
            self.made[request_id] = min(start + num_tokens, self.NUM_TOKENS)
            self.emit(request_id, start, self.made[request_id])

    @precondition(lambda self: self.to_client)
    @rule()
    def network_delivers(self) -> None:
        header, body = self.to_client.pop(0)
        self.perform(self.h.handle(Received(header, body)))

    @precondition(lambda self: self.to_client)
    @rule()
    def network_loses(self) -> None:
        self.to_client.pop(0)

    @precondition(lambda self: self.to_client)
    @rule()
    def network_repeats(self) -> None:
        self.to_client.append(self.to_client[0])

    @rule()
    def broker_restarts_without_memory(self) -> None:
        self.epoch += 1
        self.made.clear()
        self.is_up = True

    @rule()
    def broker_dies(self) -> None:
        self.is_up = False
        self.made.clear()

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    @invariant()
    def every_request_ends_in_time(self) -> None:
        for request_id, deadline in self.deadlines.items():
            assert request_id in self.ended or self.h.now < deadline + GRACE_S
        assert self.h.core.num_live == len(self.read) - len(self.ended)

    def teardown(self) -> None:
        if not self.is_up:
            self.broker_restarts_without_memory()
        for _ in range(100):
            self.advance(1.0)
            for request_id in sorted(self.made):
                start, self.made[request_id] = self.made[request_id], self.NUM_TOKENS
                if start < self.NUM_TOKENS:
                    self.emit(request_id, start, self.NUM_TOKENS)
            while self.to_client:
                self.network_delivers()
        assert self.ended.keys() == self.read.keys()
        assert self.h.core.next_deadline() is None


TestClientHistory = ClientHistory.TestCase
TestClientHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
