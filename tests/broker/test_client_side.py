"""What clients may expect of the broker."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.broker.conftest import (
    ALICE,
    BOB,
    EPOCH,
    Rig,
    make_process,
    request_id,
    row,
    to_clients,
    to_workers,
)

from llmrt.broker.core import SETTLE_BEATS
from llmrt.broker.delivery import ENDED_KEPT_S, SLOW_READER_S
from llmrt.broker.events import ClientGarbage, ClientMessage, ClientUnroutable, ProcessDied
from llmrt.broker.requests import READER_WINDOW
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_body, decode_header, encode_body, encode_header
from llmrt.wire.ids import Attempt


def refusal(rig: Rig, number: int = 1, **options: Any) -> m.Failure:
    """The failure that a request is answered with; nothing goes to a worker."""
    effects = rig.generate(number, **options)
    assert not to_workers(effects)
    (sent,) = to_clients(effects)
    assert (sent.kind, sent.header.request_id) == (m.FAILED, request_id(number))
    return sent.failure


def test_hello_is_answered_with_the_limits(rig: Rig) -> None:
    (sent,) = to_clients(rig.hello())
    welcome = decode_body(sent.frames[1], m.Welcome)
    assert (sent.to, sent.kind) == (ALICE, m.WELCOME)
    assert (welcome.broker_epoch, welcome.beat_s) == (EPOCH, 1.0)
    assert welcome.max_body_bytes > 0
    assert welcome.max_raw_bytes > 0


def test_a_beat_is_answered_with_the_epoch(rig: Rig) -> None:
    """The epoch tells a client that its broker is another one now."""
    (sent,) = to_clients(rig.client(m.BEAT))
    assert (sent.kind, sent.header.epoch) == (m.BEAT, EPOCH)


def test_a_stream_passes_in_order_and_ends_once(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    first = to_clients(rig.step("d0", row(1, 0)))
    second = to_clients(rig.step("d0", row(1, 1)))
    last = to_clients(rig.finish("d0", seq=2))
    assert [sent.kind for sent in first + second + last] == [m.EVENTS, m.EVENTS, m.FINISHED]
    assert [sent.seqs for sent in first + second] == [[0], [1]]
    assert last[0].header.seq == 2
    assert not to_clients(rig.finish("d0", seq=2))
    assert rig.counters["requests_finished"] == 1
    assert rig.counters["tokens_passed"] == 2
    assert rig.counters["ends_stale"] == 1


def test_without_a_decode_worker_a_request_is_refused_at_once(rig: Rig) -> None:
    rig.register("p0", "prefill")
    rig.advance(SETTLE_BEATS)
    assert refusal(rig).code == "no_worker"


def test_a_new_broker_waits_two_beats_for_a_first_worker(rig: Rig) -> None:
    """The workers of its predecessor come with their next beat; a client may be faster."""
    rig.hello()
    assert to_clients(rig.generate(1)) == []
    assert to_workers(rig.register("d0"), m.DISPATCH)


def test_a_new_broker_does_not_wait_for_long(rig: Rig) -> None:
    rig.hello()
    rig.generate(1)
    (sent,) = to_clients(rig.advance(SETTLE_BEATS), m.FAILED)
    assert sent.failure.code == "no_worker"
    assert rig.counters["requests_refused"] == 1


def test_a_broker_waits_for_workers_that_load_as_long_as_it_is_told(
    make_rig: Callable[..., Rig],
) -> None:
    """Once, however often the request comes, and the time counts as the request's own."""
    rig = make_rig(startup_window_s=60.0)
    rig.hello()
    rig.generate(1, budget_ms=50_000)
    rig.generate(2, budget_ms=5_000)
    rig.advance(20.0)
    rig.generate(1, budget_ms=50_000)
    (sent,) = to_workers(rig.register("d0"), m.DISPATCH)
    assert (sent.header.request_id, sent.header.budget_ms) == (request_id(1), 30_000)
    (failed,) = to_clients(rig.seen, m.FAILED)
    assert failed.header.request_id == request_id(2)
    assert failed.failure.code == "deadline_exceeded"


def test_every_owner_is_told_the_same_time_of_admission(rig: Rig) -> None:
    """Else a template would render another prompt for the tokens that were passed on."""
    rig.hello()
    rig.register("d0")
    rig.register("d1")
    header = encode_header(m.GENERATE, request_id(1))
    frames = [header, encode_body(m.Tokenize()), b""]
    message = ClientMessage(ALICE, decode_header(header), frames, unix_s=1e9)
    (first,) = to_workers(rig.handle(message), m.DISPATCH)
    (second,) = to_workers(rig.worker(first.to, m.BYE), m.DISPATCH)
    assert first.route.admitted_unix_s == second.route.admitted_unix_s == 1e9


def test_an_id_that_is_used_for_another_body_is_refused(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    header = encode_header(m.GENERATE, request_id(1))
    frames = [header, encode_body(m.Tokenize()), b"another prompt"]
    effects = rig.handle(ClientMessage(ALICE, decode_header(header), frames))
    (sent,) = to_clients(effects, m.FAILED)
    assert sent.failure.code == "request_conflict"


def test_the_id_of_an_ended_request_is_refused_for_another_body(rig: Rig) -> None:
    """Only the digest of its frames is left to tell: the same again gets the stream again."""
    rig.register("d0")
    header = encode_header(m.GENERATE, request_id(1))
    body = encode_body(m.Tokenize())
    asked, other = [header, body, b"a prompt"], [header, body, b"another prompt"]
    rig.handle(ClientMessage(ALICE, decode_header(header), asked))
    rig.step("d0", row(1, 0, 7))
    rig.finish("d0", 1, seq=1)
    again = to_clients(rig.handle(ClientMessage(ALICE, decode_header(header), asked)))
    assert [sent.kind for sent in again] == [m.EVENTS, m.FINISHED]
    (sent,) = to_clients(rig.handle(ClientMessage(ALICE, decode_header(header), other)))
    assert sent.failure.code == "request_conflict"


def test_an_ended_request_that_was_read_is_not_read_again(rig: Rig) -> None:
    """Its rows are gone: an end without them would leave the reader waiting for tokens."""
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", row(1, 0, 7))
    rig.client(m.ACK, 1, seq=1)
    rig.finish("d0", 1, seq=1)
    (sent,) = to_clients(rig.generate(1))
    assert sent.failure.code == "request_conflict"


def test_above_max_live_a_request_is_refused_at_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_live=1)
    rig.register("d0")
    rig.generate(1)
    assert refusal(rig, 2).code == "overloaded"
    rig.finish("d0", 1)
    assert to_workers(rig.generate(3), m.DISPATCH)


def test_a_request_without_time_left_is_refused(rig: Rig) -> None:
    rig.register("d0")
    assert refusal(rig, budget_ms=0).code == "deadline_exceeded"


def test_time_that_the_broker_slept_is_charged(rig: Rig) -> None:
    rig.register("d0")
    header = encode_header(m.GENERATE, request_id(1), budget_ms=5000)
    frames = [header, encode_body(m.Tokenize())]
    effects = rig.handle(ClientMessage(ALICE, decode_header(header), frames, waited_s=2.0))
    assert to_workers(effects, m.DISPATCH)[0].header.budget_ms == 3000


def test_models_are_chosen_by_name(rig: Rig) -> None:
    rig.register("a0", model="a")
    assert to_workers(rig.generate(1), m.DISPATCH)
    rig.register("b0", model="b")
    failure = refusal(rig, 2)
    assert failure.code == "invalid_request"
    assert "a, b" in failure.message
    failure = refusal(rig, 3, model="c")
    assert failure.code == "model_not_found"
    assert "a, b" in failure.message
    assert [sent.to for sent in to_workers(rig.generate(4, model="b"), m.DISPATCH)] == [b"b0"]


def test_another_clients_request_id_is_refused(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    assert refusal(rig, 1, client=BOB).code == "request_conflict"
    rig.client(m.CANCEL, 1, client=BOB)
    rig.client(m.ACK, 1, client=BOB, seq=5)
    assert to_clients(rig.step("d0", row(1, 0)), m.EVENTS)
    rig.finish("d0", seq=1)
    assert refusal(rig, 1, client=BOB).code == "request_conflict"


def test_a_request_sent_again_attaches_to_the_running_stream(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for seq in range(4):
        rig.step("d0", row(1, seq))
    effects = rig.generate(1, seq=2)
    assert not to_workers(effects)
    assert [sent.seqs for sent in to_clients(effects)] == [[2, 3]]
    assert [sent.seqs for sent in to_clients(rig.step("d0", row(1, 4)))] == [[4]]
    assert rig.counters["requests_attached"] == 1
    assert rig.counters["requests_admitted"] == 1


def test_a_request_sent_again_after_its_end_gets_the_rest_and_the_end(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for seq in range(3):
        rig.step("d0", row(1, seq))
    rig.client(m.ACK, 1, seq=1)
    rig.finish("d0", seq=3)
    again = to_clients(rig.generate(1, seq=1))
    assert [sent.kind for sent in again] == [m.EVENTS, m.FINISHED]
    assert again[0].seqs == [1, 2]
    rig.advance(ENDED_KEPT_S)
    rig.register("d1")
    assert to_workers(rig.generate(1), m.DISPATCH), "forgotten, so it is a new request"


def test_a_reader_with_tokens_of_an_earlier_broker_has_credit_for_them(rig: Rig) -> None:
    """The stream is repeated from its first token, and the reader acknowledges none of those."""
    rig.register("d0")
    num_old = READER_WINDOW + 10
    rig.generate(1, seq=num_old)
    rows = [row(1, seq) for seq in range(num_old + 1)]
    assert len(to_clients(rig.step("d0", *rows))[0].rows) == num_old + 1


def test_a_cancel_reaches_the_owner_and_ends_the_stream(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    effects = rig.client(m.CANCEL, 1)
    (to_owner,) = to_workers(effects)
    assert (to_owner.kind, to_owner.header.attempt) == (m.CANCEL, Attempt(EPOCH, 1))
    assert [sent.failure.code for sent in to_clients(effects)] == ["cancelled"]
    assert not to_clients(rig.step("d0", row(1, 0)))
    assert not to_clients(rig.client(m.CANCEL, 1))
    assert rig.counters["rows_stale"] == 1
    assert rig.counters["requests_cancelled"] == 1


def test_a_finish_that_raced_a_cancel_wins_quietly(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.finish("d0")
    assert rig.client(m.CANCEL, 1) == []
    assert to_clients(rig.generate(1))[0].kind == m.FINISHED


def test_a_cancel_that_overtook_its_request_stops_it(rig: Rig) -> None:
    rig.register("d0")
    assert rig.client(m.CANCEL, 1) == []
    effects = rig.generate(1)
    assert not to_workers(effects)
    assert [sent.failure.code for sent in to_clients(effects)] == ["cancelled"]


def test_a_cancelled_id_stays_cancelled_for_the_requests_own_time(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1, budget_ms=100_000)
    rig.client(m.CANCEL, 1)
    for _ in range(99):
        rig.advance(1.0)
        rig.heartbeat("d0")
    assert to_clients(rig.generate(1))[0].failure.code == "cancelled"


def test_a_deadline_ends_the_request_everywhere(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1, budget_ms=2500)
    rig.advance(2.4)
    assert rig.counters["requests_expired"] == 0
    effects = rig.advance(0.2)
    assert [sent.kind for sent in to_workers(effects)] == [m.CANCEL]
    assert [sent.failure.code for sent in to_clients(effects)] == ["deadline_exceeded"]
    assert rig.counters["requests_expired"] == 1


def test_a_deadline_is_capped_by_the_broker(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(default_deadline_s=20.0, max_deadline_s=30.0)
    rig.register("d0")
    budgets = [
        to_workers(rig.generate(number, budget_ms=ms), m.DISPATCH)[0].header.budget_ms
        for number, ms in ((1, -1), (2, 10_000), (3, 99_000))
    ]
    assert budgets == [20_000, 10_000, 30_000]


def test_a_silent_client_is_orphaned_and_then_cancelled(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for _ in range(13):
        rig.heartbeat("d0")
        rig.advance(1.0)
    assert rig.counters["clients_orphaned"] == 1
    assert rig.counters["requests_cancelled"] == 0
    rig.heartbeat("d0")
    effects = rig.advance(1.0)
    assert [sent.kind for sent in to_workers(effects)] == [m.CANCEL]
    assert rig.counters["requests_cancelled"] == 1


def test_an_orphan_whose_client_returns_goes_on(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for second in range(40):
        rig.heartbeat("d0")
        if second % 8 == 0:
            rig.client(m.BEAT)
        rig.advance(1.0)
    assert rig.counters["clients_orphaned"] >= 4
    assert to_clients(rig.step("d0", row(1, 0)), m.EVENTS)


def test_a_beating_client_is_never_orphaned(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for _ in range(60):
        rig.heartbeat("d0")
        rig.client(m.BEAT)
        rig.advance(1.0)
    assert rig.counters["clients_orphaned"] == 0


def test_the_death_of_a_clients_process_cancels_at_once(rig: Rig) -> None:
    rig.register("d0")
    rig.hello(pid=77)
    rig.generate(1)
    effects = rig.handle(ProcessDied(make_process(77)))
    assert [sent.kind for sent in to_workers(effects)] == [m.CANCEL]
    assert not to_clients(effects)
    assert rig.counters["requests_cancelled"] == 1


def test_an_unreachable_client_gets_what_it_missed_when_it_returns(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.generate(2)
    rig.step("d0", row(1, 0))
    rig.client(m.ACK, 1, seq=1)
    lost = to_clients(rig.step("d0", row(1, 1)))[0]
    rig.handle(ClientUnroutable(ALICE, lost.frames))
    assert not to_clients(rig.step("d0", row(1, 2), row(2, 0)))
    assert not to_clients(rig.finish("d0", 2, seq=1))
    effects = to_clients(rig.client(m.BEAT))
    assert [sent.kind for sent in effects] == [m.EVENTS, m.EVENTS, m.FINISHED, m.BEAT]
    assert [sent.seqs for sent in effects[:2]] == [[1, 2], [0]]


def test_a_reader_that_never_acknowledges_is_ended_as_slow(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", *(row(1, seq) for seq in range(READER_WINDOW)))
    assert not to_clients(rig.step("d0", row(1, READER_WINDOW)))
    for _ in range(int(SLOW_READER_S)):
        rig.client(m.BEAT)
        rig.heartbeat("d0")
        effects = rig.advance(1.0)
    rows, end = to_clients(effects)
    assert rows.seqs == [READER_WINDOW]
    assert end.failure.code == "slow_consumer"
    assert [sent.kind for sent in to_workers(effects)] == [m.CANCEL]


def test_an_acknowledgement_gives_credit(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", *(row(1, seq) for seq in range(READER_WINDOW + 1)))
    (sent,) = to_clients(rig.client(m.ACK, 1, seq=100))
    assert sent.seqs == [READER_WINDOW]
    for _ in range(20):
        rig.client(m.BEAT)
        rig.heartbeat("d0")
        rig.advance(1.0)
    assert rig.counters["requests_failed"] == 0


def test_tokenize_goes_to_a_worker_and_back(rig: Rig) -> None:
    rig.register("p0", "prefill")
    rig.register("d0", "decode")
    effects = rig.client(m.TOKENIZE, 1, encode_body(m.Tokenize()), b"some text")
    (sent,) = to_workers(effects)
    assert (sent.to, sent.route.kind, sent.frames[3]) == (b"d0", m.TOKENIZE, b"some text")
    assert sent.route.prefill_worker is None
    effects = rig.worker(b"d0", m.TOKENIZED, b"\1\0\0\0", number=1, attempt=Attempt(EPOCH, 1))
    (answer,) = to_clients(effects)
    assert (answer.kind, answer.header.request_id) == (m.TOKENIZED, request_id(1))
    assert answer.frames[1] == b"\1\0\0\0"


def test_ps_tells_workers_requests_and_counters(rig: Rig) -> None:
    rig.register("p0", "prefill")
    rig.register("d0", "decode")
    rig.heartbeat("d0", num_running=3, num_waiting=1, num_blocks=64, num_free_blocks=60)
    rig.generate(1)
    rig.step("d0", row(1, 0))
    rig.advance(1.0)
    (sent,) = to_clients(rig.client(m.PS, 9))
    assert (sent.kind, sent.header.request_id) == (m.PS_REPLY, request_id(9))
    reply = decode_body(sent.frames[1], m.PsReply)
    assert [(w.worker_id, w.role, w.state) for w in reply.workers] == [
        ("p0", "prefill", "alive"),
        ("d0", "decode", "alive"),
    ]
    assert (reply.workers[1].num_running, reply.workers[1].num_free_blocks) == (3, 60)
    assert reply.workers[1].heartbeat_age_s == 1.0
    (request,) = reply.requests
    assert (request.request_id, request.stage) == (request_id(1).hex(), "decode")
    assert (request.decode_worker, request.prefill_worker) == ("d0", "p0")
    assert (request.num_tokens, request.age_s) == (1, 1.0)
    assert reply.counters["requests_live"] == 1
    assert reply.counters["tokens_passed"] == 1


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("dance", ()),
        (m.HELLO, (b"\xc1",)),
        (m.HELLO, ()),
        (m.GENERATE, ()),
    ],
)
def test_a_bad_message_is_answered_with_a_code(
    rig: Rig, kind: str, frames: tuple[bytes, ...]
) -> None:
    rig.register("d0")
    (sent,) = to_clients(rig.client(kind, 1, *frames))
    assert sent.failure.code == "protocol_error"


def test_a_worker_at_the_endpoint_for_clients_is_told_the_other(rig: Rig) -> None:
    (sent,) = to_clients(rig.client(m.REGISTER))
    assert sent.header.request_id == b""
    assert sent.failure == m.Failure(
        code="config_invalid",
        message="this is the broker's endpoint for clients: "
        "give --broker the one for workers, tcp://127.0.0.1:7701",
    )


def test_garbage_is_answered_and_logged_once_per_peer(rig: Rig) -> None:
    first = rig.handle(ClientGarbage(ALICE, "version_mismatch", "speak 1.0"))
    second = rig.handle(ClientGarbage(ALICE, "version_mismatch", "speak 1.0"))
    assert (len(first), len(second)) == (2, 1)
    assert to_clients(second)[0].failure.code == "version_mismatch"
    assert rig.counters["protocol_errors"] == 2


def test_an_idle_client_is_forgotten(rig: Rig) -> None:
    rig.hello(pid=5)
    rig.advance(1000.0)
    (sent,) = to_clients(rig.client(m.PS, 9, client=BOB))
    reply = decode_body(sent.frames[1], m.PsReply)
    assert reply.counters["clients_known"] == 1
