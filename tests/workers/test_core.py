"""One worker's own requests: admission, tokens, ends, registration, time."""

from array import array
from typing import Any

import msgpack
import pytest

from llmrt.engine.batch import Drawn, Logprobs, StepResult
from llmrt.simulation.content import EOS_TOKEN_ID
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32
from llmrt.wire.envelope import Header, decode_header, encode_body
from llmrt.wire.errors import InternalError
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import encode_step
from llmrt.workers import effects as do
from llmrt.workers import events as ev

TEN = list(range(10, 20))
GENERATE = encode_body(m.Generate(prompt_kind="tokens", sampling=SamplingParams()))


def test_registration_is_repeated_until_it_is_answered(make_worker: Any) -> None:
    bench = make_worker()
    bench.from_broker(m.UNKNOWN_WORKER)
    bench.tick()
    bench.tick()
    assert len(bench.sent(m.REGISTER)) == 3
    bench.from_broker(m.REGISTERED, m.Registered(broker_epoch=2, beat_s=1.0))
    bench.clear()
    bench.tick()
    assert not bench.sent(m.REGISTER)
    assert len(bench.sent(m.HEARTBEAT)) == 1


def test_a_new_broker_learns_what_is_held(make_worker: Any) -> None:
    bench = make_worker()
    request_id = bench.dispatch(TEN)
    bench.clear()
    bench.from_broker(m.UNKNOWN_WORKER)
    (register,) = bench.sent(m.REGISTER)
    assert register.body.holding == (m.Held(request_id, 1, 1, "prefill"),)


def test_a_refused_worker_exits_with_the_reason(make_worker: Any) -> None:
    bench = make_worker()
    bench.from_broker(m.REFUSED, m.Failure(code="registration_refused", message="why"))
    assert do.Exit("registration_refused", "why") in bench.effects


def warnings(bench: Any, event: str) -> list[dict[str, object]]:
    return [
        effect.fields
        for effect in bench.effects
        if isinstance(effect, do.Log) and (effect.event, effect.level) == (event, "warning")
    ]


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_broker_that_is_not_heard_is_named_after_some_beats_and_then_rarely(
    make_worker: Any, is_registered: bool
) -> None:
    bench = make_worker()
    if not is_registered:
        bench.from_broker(m.UNKNOWN_WORKER)
    for _ in range(5):
        bench.tick()
    assert warnings(bench, "broker.not_heard") == []
    for _ in range(60):
        bench.tick()
    told = warnings(bench, "broker.not_heard")
    assert [(fields["broker"], fields["silent_s"]) for fields in told] == [
        ("tcp://there", 5.0),
        ("tcp://there", 35.0),
    ]
    assert "start llmrt broker there" in str(told[0]["remedy"])


def test_a_broker_that_answers_beats_is_not_complained_of(make_worker: Any) -> None:
    bench = make_worker()
    for _ in range(40):
        bench.tick()
        bench.from_broker(m.BEAT)
    assert warnings(bench, "broker.not_heard") == []


def test_a_stopped_process_does_not_take_its_own_silence_for_the_brokers(make_worker: Any) -> None:
    bench = make_worker()
    bench.tick(600.0)
    assert warnings(bench, "broker.not_heard") == []


@pytest.mark.parametrize("code", ["config_invalid", "version_mismatch", "protocol_error"])
def test_a_worker_that_the_broker_cannot_take_exits_with_the_reason(
    make_worker: Any, code: str
) -> None:
    bench = make_worker()
    bench.from_broker(m.UNKNOWN_WORKER)
    bench.from_broker(m.FAILED, m.Failure(code=code, message="why"))
    assert do.Exit(code, "tcp://there: why") in bench.effects


def test_a_registered_worker_outlives_one_message_that_was_not_read(make_worker: Any) -> None:
    bench = make_worker()
    bench.from_broker(m.FAILED, m.Failure(code="protocol_error", message="why"))
    assert not any(isinstance(effect, do.Exit) for effect in bench.effects)
    (fields,) = warnings(bench, "message.refused")
    assert fields["error"] == "the broker could not read a message: why"
    bench.from_broker(m.FAILED, m.Failure(code="config_invalid", message="clients"))
    assert do.Exit("config_invalid", "tcp://there: clients") in bench.effects


def test_heartbeats_carry_progress_and_what_is_held(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN)
    bench.step(50)
    bench.clear()
    bench.tick()
    (beat,) = bench.sent(m.HEARTBEAT)
    assert beat.body.load.num_steps == 3  # one runs, and one is made ahead
    assert beat.body.load.num_prefill_tokens == 10
    assert [held.stage for held in beat.body.holding] == ["decode"]


def test_tokens_leave_with_contiguous_sequence_numbers_and_one_end(make_worker: Any) -> None:
    bench = make_worker()
    request_id = bench.dispatch(TEN, max_tokens=3)
    for token in (50, 51, 52):
        bench.step(token)
    assert [row.seq for row in bench.rows()] == [0, 1, 2]
    assert bench.tokens() == [50, 51, 52]
    (end,) = bench.sent(m.FINISHED)
    assert (end.header.request_id, end.header.attempt, end.header.seq) == (
        request_id,
        Attempt(1, 1),
        3,
    )
    assert end.body.finish_reason == "length"
    assert end.body.usage == m.Usage(prompt_tokens=10, completion_tokens=3)
    assert end.body.prefill_worker == end.body.decode_worker == "both-0"
    bench.assert_all_free()


def test_stages_sum_to_the_total(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, max_tokens=2)
    bench.step(50)
    bench.step(51)
    (end,) = bench.sent(m.FINISHED)
    stages = dict(end.body.timings_ms)
    total = stages.pop("total")
    assert sum(stages.values()) == pytest.approx(total)
    assert total == pytest.approx(20.0)


def returns(bench: Any, *tokens: int) -> list[do.Effect]:
    """The running step returns, and nothing else happens; what the machine wants done at once."""
    batch = bench.batch()
    drawn = tuple(
        Drawn(row.sequence_id, (token,)) for row, token in zip(batch.rows, tokens, strict=True)
    )
    result = StepResult(batch.step_id, drawn, 0.01, 0.01)
    effects: list[do.Effect] = bench.core.handle(ev.StepDone(result, bench.now), bench.now)
    bench.core.check()
    bench.effects += effects
    return effects


def test_the_next_step_is_started_before_tokens_are_delivered(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, repetition_penalty=1.5)  # so that no step can be made ahead
    (effect,) = returns(bench, 50)
    assert isinstance(effect, do.RunStep)
    bench.handle(ev.StepTaken())
    assert bench.tokens() == [50]


def test_a_step_made_ahead_runs_when_the_one_before_returns(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN)
    ahead = bench.scheduler.ahead
    assert do.RunStep(ahead) in bench.effects
    assert returns(bench, 50) == []
    assert bench.scheduler.step is ahead
    bench.handle(ev.StepTaken())
    assert bench.tokens() == [50]


def test_a_last_token_that_text_does_not_tell_is_known_before_the_next_step(
    make_worker: Any,
) -> None:
    bench = make_worker()
    bench.dispatch(TEN, number=1, repetition_penalty=1.5, max_tokens=9)
    bench.step(50)
    bench.dispatch(TEN, number=2, max_tokens=1)
    bench.step(51)
    (effect,) = returns(bench, 52, 53)
    assert isinstance(effect, do.RunStep)
    assert [row.sequence_id for row in effect.batch.rows] == [1]
    bench.core.check()
    bench.handle(ev.StepTaken())
    assert len(bench.sent(m.FINISHED)) == 1


@pytest.mark.parametrize("token", [EOS_TOKEN_ID, 71])
def test_what_a_step_made_ahead_draws_behind_the_end_is_dropped(
    make_worker: Any, token: int
) -> None:
    """By the end token, or by a stop string; its blocks stay until that step has returned."""
    bench = make_worker()
    words = bench.core._context.vocabulary.token_bytes
    bench.dispatch(TEN, stop=(words[71].decode().strip(),))
    bench.step(50)
    bench.step(token)
    assert len(bench.sent(m.FINISHED)) == 1
    assert bench.ledger.num_held == 1
    bench.step(60)
    assert bench.tokens() == [50, token]
    assert len(bench.sent(m.FINISHED)) == 1
    assert bench.scheduler.step is None
    bench.assert_all_free()


@pytest.mark.parametrize("token", [50, EOS_TOKEN_ID])
@pytest.mark.parametrize(
    "event",
    [
        ev.FromBroker(Header(kind=m.CANCEL, request_id=(1).to_bytes(16, "big"), epoch=1, n=1), ()),
        ev.Tick(),
        ev.StopWanted(),
    ],
    ids=["cancel", "tick", "stop"],
)
def test_whatever_comes_before_a_delivery_finds_it_done(
    make_worker: Any, event: ev.Event, token: int
) -> None:
    bench = make_worker()
    bench.dispatch(TEN, repetition_penalty=1.5)
    bench.dispatch(TEN, number=2, repetition_penalty=1.5)
    returns(bench, token)
    assert not bench.sent(m.STEP)
    bench.now += 2.0
    bench.handle(event)
    kinds = [
        decode_header(effect.frames[0]).kind
        for effect in bench.effects
        if isinstance(effect, do.SendBroker)
    ]
    assert bench.tokens() == [token]
    ends = [kind for kind in kinds if kind in (m.FINISHED, m.FAILED)]
    is_cancel = isinstance(event, ev.FromBroker)
    assert ends == ([m.FINISHED] if token == EOS_TOKEN_ID else [m.FAILED] * is_cancel)
    for kind in ends:
        assert kinds.index(m.STEP) < kinds.index(kind)


def test_a_new_request_is_in_the_step_behind_the_one_made_ahead(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN)
    bench.step(50)
    bench.dispatch(TEN, number=2)
    bench.step(51)
    assert bench.scheduler.ahead is None
    bench.step(52)
    assert len(bench.batch().rows) == 2
    assert not bench.batch().follows


def test_the_end_token_ends_without_text(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN)
    bench.step(EOS_TOKEN_ID)
    (row,) = bench.rows()
    assert row.text == b""
    (end,) = bench.sent(m.FINISHED)
    assert (end.body.finish_reason, end.body.usage.completion_tokens) == ("stop", 1)


def test_ignore_eos_goes_on_to_the_limit(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, max_tokens=3, ignore_eos=True)
    for _ in range(3):
        bench.step(EOS_TOKEN_ID)
    assert bench.sent(m.FINISHED)[0].body.finish_reason == "length"


def test_end_tokens_are_banned_before_min_tokens(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, min_tokens=2, stop_token_ids=(60,))
    banned = []
    for token in (50, 51):
        banned.append(bench.batch().rows[0].sample.banned)
        bench.step(token)
    banned.append(bench.batch().rows[0].sample.banned)
    assert banned == [(EOS_TOKEN_ID, 60), (EOS_TOKEN_ID, 60), ()]


def test_a_stop_token_is_named_in_the_end(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, stop_token_ids=(60,))
    bench.step(60)
    (end,) = bench.sent(m.FINISHED)
    assert (end.body.finish_reason, end.body.stop) == ("stop", 60)


def test_a_stop_string_is_cut_from_the_text(make_worker: Any) -> None:
    bench = make_worker()
    words = bench.core._context.vocabulary.token_bytes
    bench.dispatch(TEN, stop=(words[71].decode().strip(),))
    bench.step(70)
    bench.step(71)
    text = b"".join(row.text for row in bench.rows())
    assert text == words[70]
    assert bench.sent(m.FINISHED)[0].body.finish_reason == "stop"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "code"),
    [
        (255, 1, None),
        (255, 2, "context_length_exceeded"),
        (256, 1, "context_length_exceeded"),
        (257, 1, "context_length_exceeded"),
        (256, None, "context_length_exceeded"),
        (200, None, None),
    ],
)
def test_the_context_limit_is_exact(
    make_worker: Any, tokens_of: Any, num_prompt: int, max_tokens: int | None, code: str | None
) -> None:
    bench = make_worker()
    bench.dispatch(tokens_of(num_prompt), max_tokens=max_tokens)
    if code is not None:
        assert bench.failure().code == code
        assert str(num_prompt) in bench.failure().message
        assert "256" in bench.failure().message
        return
    while not bench.sent(m.FINISHED):
        sampled = [row for row in bench.scheduler.step.rows if row.sample]
        bench.step(*[50] * len(sampled))
    (end,) = bench.sent(m.FINISHED)
    assert end.body.finish_reason == "length"
    assert num_prompt + end.body.usage.completion_tokens == 256


def test_what_can_never_fit_the_arena_is_refused(make_worker: Any, tokens_of: Any) -> None:
    bench = make_worker(num_blocks=4)
    bench.dispatch(tokens_of(100), max_tokens=40)
    assert bench.failure().code == "out_of_blocks"
    assert "128" in bench.failure().message


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {100_000: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (100_000,)}, "stop_token_ids"),
    ],
)
def test_bad_sampling_is_refused_naming_the_field(
    make_worker: Any, sampling: dict[str, Any], field: str
) -> None:
    """Also when it comes past the SDK, which checks the same."""
    bench = make_worker()
    bench.dispatch(TEN, **sampling)
    assert bench.failure().code == "invalid_request"
    assert field in bench.failure().message


@pytest.mark.parametrize("prompt", [[], [5, 100_000]])
def test_bad_prompts_are_refused_and_the_worker_serves_on(make_worker: Any, prompt: Any) -> None:
    bench = make_worker()
    bench.dispatch(prompt)
    assert bench.failure().code == "invalid_request"
    bench.dispatch(TEN, number=2, max_tokens=1)
    bench.step(50)
    assert len(bench.sent(m.FINISHED)) == 1


@pytest.mark.parametrize("kind", [m.GENERATE, m.TOKENIZE])
def test_a_body_that_is_no_request_fails_at_once(make_worker: Any, kind: str) -> None:
    """Nobody has read it before; dropped, it would be tried on one worker after the other."""
    bench = make_worker()
    names = {"request_id": (1).to_bytes(16, "big"), "attempt": Attempt(1, 1)}
    bench.from_broker(m.DISPATCH, m.Route(kind=kind), b"\xc1garbage", b"hi", **names)
    assert bench.failure().code == "protocol_error"
    assert bench.sent(m.FAILED)[0].header.attempt == Attempt(1, 1)
    bench.dispatch(TEN)  # the same attempt again: it has ended
    assert len(bench.sent(m.FAILED)) == 1
    assert not bench.rows()


def test_more_requests_than_may_wait_are_refused(make_worker: Any) -> None:
    bench = make_worker(max_waiting=2)
    for number in (1, 2, 3):
        bench.dispatch(TEN, number=number)
    assert bench.failure().code == "overloaded"


def test_a_repeated_dispatch_changes_nothing(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, max_tokens=1)
    bench.dispatch(TEN, max_tokens=1)
    bench.step(50)
    bench.dispatch(TEN, max_tokens=1)
    assert len(bench.sent(m.FINISHED)) == 1
    assert bench.scheduler.step is None


def test_a_later_attempt_replaces_the_running_one_and_goes_on_behind_the_forced_tokens(
    make_worker: Any,
) -> None:
    bench = make_worker()
    bench.dispatch(TEN, max_tokens=4)
    bench.step(50)
    bench.clear()
    bench.dispatch(TEN, n=2, forced=(50, 51), max_tokens=4)
    bench.step(51)  # the steps of the first attempt return
    bench.step(51)
    bench.step(52)
    bench.step(53)
    assert [(row.seq, row.attempt.n) for row in bench.rows()] == [(2, 2), (3, 2)]
    assert bench.sent(m.FINISHED)[0].body.usage.completion_tokens == 4
    bench.assert_all_free()


@pytest.mark.parametrize(
    ("forced", "sampling", "reason"),
    [((50, EOS_TOKEN_ID), {}, "stop"), ((50, 51), {"max_tokens": 2}, "length")],
)
def test_an_attempt_whose_tokens_are_all_there_only_ends(
    make_worker: Any, forced: tuple[int, ...], sampling: dict[str, Any], reason: str
) -> None:
    """The last token had been passed on, and only the end was lost with the worker."""
    bench = make_worker()
    bench.dispatch(TEN, n=2, forced=forced, **sampling)
    assert bench.rows() == []
    (end,) = bench.sent(m.FINISHED)
    assert (end.body.finish_reason, end.header.seq) == (reason, 2)


def test_a_cancel_frees_the_blocks_when_the_step_returns(make_worker: Any) -> None:
    bench = make_worker()
    request_id = bench.dispatch(TEN)
    bench.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
    assert bench.failure().code == "cancelled"
    for token in (50, 51):  # the running step, and the one that was made ahead
        assert bench.ledger.num_held == 1
        bench.step(token)
    assert bench.rows() == []
    bench.assert_all_free()


def test_a_cancel_that_overtakes_its_dispatch_meets_it(make_worker: Any) -> None:
    bench = make_worker()
    bench.from_broker(m.CANCEL, request_id=(1).to_bytes(16, "big"), attempt=Attempt(1, 1))
    bench.dispatch(TEN)
    assert bench.scheduler.step is None
    assert bench.sent(m.FINISHED) == bench.sent(m.FAILED) == []


def test_a_deadline_ends_a_request_in_any_stage(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, budget_ms=500)
    deadline = bench.core.next_deadline()
    assert deadline is not None
    assert deadline <= bench.now + 0.5
    bench.tick(0.6)
    assert bench.failure().code == "deadline_exceeded"
    assert bench.core.next_deadline() > bench.now


def test_a_message_that_waited_while_the_process_stood_still_has_less_time(
    make_worker: Any,
) -> None:
    bench = make_worker()
    body = encode_body(m.Generate(prompt_kind="tokens", sampling=SamplingParams()))
    frames = (encode_body(m.Route()), body, pack_u32(TEN))
    header = Header(
        kind=m.DISPATCH, request_id=(1).to_bytes(16, "big"), epoch=1, n=1, budget_ms=5000
    )
    bench.handle(ev.FromBroker(header, frames, waited_s=4.5))
    bench.tick(0.6)
    assert bench.failure().code == "deadline_exceeded"


def test_a_failed_row_ends_its_own_request_only(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN, number=1)
    bench.step(50)
    bench.dispatch(TEN, number=2)
    bench.step(51)
    bench.step(51)
    bench.clear()
    batch = bench.scheduler.step
    good, bad = (row.sequence_id for row in batch.rows)
    drawn = (Drawn(good, (52,)), Drawn(bad, (), error=InternalError("a logit is nan")))
    bench.step_done(StepResult(batch.step_id, drawn, 0.0, 0.0))
    assert bench.failure().message == "a logit is nan"
    assert bench.tokens() == [52]
    bench.step(53, 54)
    assert bench.tokens() == [52, 53]


def test_a_failed_step_ends_its_requests_and_the_worker_serves_on(make_worker: Any) -> None:
    bench = make_worker()
    bench.dispatch(TEN)
    failure = m.Failure(code="internal_error", message="boom")
    bench.handle(ev.StepDone(None, bench.now, failure))
    assert bench.failure().code == "internal_error"
    bench.handle(ev.StepDone(None, bench.now, failure))  # the one that was made ahead
    bench.assert_all_free()
    bench.dispatch(TEN, number=2, max_tokens=1)
    bench.step(50)
    assert len(bench.sent(m.FINISHED)) == 1


def test_a_prefill_worker_owns_nothing(make_worker: Any) -> None:
    bench = make_worker("prefill")
    bench.dispatch(TEN)
    assert bench.failure().code == "internal_error"


@pytest.mark.parametrize("kind", [m.DISPATCH, m.PEERS, m.REGISTERED, "from_the_future"])
def test_bad_and_unknown_messages_are_counted_and_nothing_else(make_worker: Any, kind: str) -> None:
    bench = make_worker()
    bench.from_broker(kind, None, b"\xc1garbage")
    bench.from_broker(kind)
    counters = bench.core.counters
    assert counters.get("bad_messages", 0) + counters.get("unknown_messages", 0) == 2


def test_a_text_is_tokenized_outside_and_its_failure_ends_the_request(make_worker: Any) -> None:
    bench = make_worker()
    body = m.Generate(prompt_kind="text", sampling=SamplingParams())
    request_id, attempt = (1).to_bytes(16, "big"), Attempt(1, 1)
    bench.from_broker(
        m.DISPATCH, m.Route(), encode_body(body), b"hi", request_id=request_id, attempt=attempt
    )
    (wanted,) = [effect for effect in bench.effects if isinstance(effect, do.Tokenize)]
    assert (wanted.prompt, wanted.generate) == (b"hi", body)
    failure = m.Failure(code="invalid_request", message="not UTF-8")
    bench.handle(ev.Tokenized(wanted.request_id, wanted.attempt, None, failure))
    assert bench.failure() == failure


def test_a_tokenize_call_is_answered_with_raw_ids(make_worker: Any) -> None:
    bench = make_worker()
    request_id, attempt = RequestId((1).to_bytes(16, "big")), Attempt(1, 1)
    route = m.Route(kind=m.TOKENIZE)
    bench.from_broker(
        m.DISPATCH, route, encode_body(m.Tokenize()), b"hi", request_id=request_id, attempt=attempt
    )
    bench.handle(ev.Tokenized(request_id, attempt, array("I", [5, 6])))
    (answer,) = bench.sent(m.TOKENIZED)
    assert answer.raw == (pack_u32([5, 6]),)


def test_a_stopping_worker_says_goodbye(make_worker: Any) -> None:
    bench = make_worker()
    bench.handle(ev.StopWanted())
    assert len(bench.sent(m.BYE)) == 1
    assert bench.core.next_deadline() is None


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        (m.REGISTERED, ()),
        (m.PEERS, ()),
        (m.DISPATCH, ()),
        (m.DISPATCH, (encode_body(m.Route()),)),
        (m.DISPATCH, (encode_body(m.Route(num_forced=2)), GENERATE)),
    ],
)
def test_a_message_that_lacks_a_frame_is_counted_and_the_worker_goes_on(
    make_worker: Any, kind: str, frames: tuple[bytes, ...]
) -> None:
    bench = make_worker()
    bench.handle(
        ev.FromBroker(Header(kind=kind, request_id=(1).to_bytes(16, "big"), epoch=1, n=1), frames)
    )
    assert bench.core.counters["bad_messages"] == 1
    bench.dispatch(TEN, number=2)
    bench.step(50)
    assert bench.tokens() == [50]


def held_back(make_worker: Any, **sampling: Any) -> Any:
    """One request on a worker with an interval of 50 ms, whose first token has left."""
    bench = make_worker(stream_interval_s=0.05)
    bench.dispatch(TEN, **sampling)
    bench.step(50)
    assert bench.tokens() == [50]
    bench.clear()
    return bench


def test_within_an_interval_tokens_leave_in_one_row(make_worker: Any) -> None:
    bench = held_back(make_worker, logprobs=0)
    words = bench.core._context.vocabulary.token_bytes
    for token in (51, 52, 53, 54):  # 10 ms each
        bench.step(token)
        assert not bench.rows()
    bench.step(55)
    (row,) = bench.rows()
    assert (row.seq, row.num_tokens) == (1, 5)
    assert bench.tokens() == [51, 52, 53, 54, 55]
    assert row.text == b"".join(words[51:56])


def test_extras_of_tokens_that_leave_together_are_one_list(make_worker: Any) -> None:
    bench = held_back(make_worker)
    for token in (51, 52, 53, 54, 55):
        batch = bench.batch()
        logprobs = Logprobs(-float(token), ((token, -1.0),))
        drawn = (Drawn(batch.rows[0].sequence_id, (token,), (logprobs,)),)
        bench.now += 0.01
        bench.step_done(StepResult(batch.step_id, drawn, 0.01, 0.01))
    (row,) = bench.rows()
    entries = msgpack.unpackb(row.extras)
    assert entries == [[-float(token), [[token, -1.0]]] for token in range(51, 56)]


def test_what_is_held_leaves_in_time_if_nothing_follows(make_worker: Any) -> None:
    bench = held_back(make_worker)
    bench.step(51)
    assert not bench.rows()
    deadline = bench.core.next_deadline()
    assert deadline == pytest.approx(bench.now + 0.04)
    bench.now = deadline
    bench.handle(ev.Tick())
    assert bench.tokens() == [51]
    assert bench.core.next_deadline() > deadline


def test_what_is_held_leaves_before_the_end(make_worker: Any) -> None:
    bench = held_back(make_worker, max_tokens=3)
    bench.step(51)
    bench.step(52)
    (row,) = bench.rows()
    assert (row.seq, row.num_tokens) == (1, 2)
    (end,) = bench.sent(m.FINISHED)
    assert end.header.seq == 3
    sent = [effect for effect in bench.effects if isinstance(effect, do.SendBroker)]
    assert sent[0] == do.SendBroker(encode_step([row]))


@pytest.mark.parametrize("kind", [m.CANCEL, m.BYE])
def test_what_is_held_leaves_before_a_failure_and_a_goodbye(make_worker: Any, kind: str) -> None:
    bench = held_back(make_worker)
    bench.step(51)
    if kind == m.CANCEL:
        bench.from_broker(kind, request_id=(1).to_bytes(16, "big"), attempt=Attempt(1, 1))
    else:
        bench.handle(ev.StopWanted())
    kinds = [
        decode_header(effect.frames[0]).kind
        for effect in bench.effects
        if isinstance(effect, do.SendBroker)
    ]
    assert kinds == [m.STEP, m.FAILED if kind == m.CANCEL else m.BYE]
    assert bench.tokens() == [51]


def test_what_an_older_attempt_holds_is_dropped(make_worker: Any) -> None:
    bench = held_back(make_worker)
    bench.step(51)
    bench.dispatch(TEN, n=2, forced=(50,))
    for _ in range(2):
        bench.step(51)
    bench.step(61)
    assert [(row.seq, row.attempt.n) for row in bench.rows()] == [(1, 2)]
    assert bench.tokens() == [61]


def test_the_time_of_steps_and_of_python_between_them_is_told(make_worker: Any) -> None:
    """Of 10 ms from return to return, 9 are computed; what comes after a pause does not count."""
    bench = make_worker()
    for number in (1, 2):
        bench.dispatch(TEN, number=number, max_tokens=3)
        for token in (50, 51, 52):
            batch = bench.batch()
            bench.now += 0.01
            drawn = (Drawn(batch.rows[0].sequence_id, (token,)),)
            bench.step_done(StepResult(batch.step_id, drawn, 0.0095, 0.009))
        bench.now += 5.0
    bench.clear()
    bench.tick()
    load = bench.sent(m.HEARTBEAT)[0].body.load
    assert load.steps_s == pytest.approx(0.04)
    assert load.python_s == pytest.approx(0.004)
