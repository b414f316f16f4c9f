"""Drafts change no answer: neither tokens, nor text, nor how and where a request ends."""

from typing import Any

import msgpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrt.engine.batch import LOCAL_ARENA, Drawn, Logprobs, StepResult
from llmrt.simulation.content import SimArena, SimDevice
from llmrt.wire import messages as m
from llmrt.wire.errors import InternalError
from llmrt.workers import events as ev

WORDS = ("dd", "de", "df")  # of the tokens 3, 4 and 5 in SimVocabulary, a space behind each
REPEATING = [10, 11, 12, 13, 10, 11, 12, 13, 10, 11]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A prompt and how to continue it: texts of few words, and stops that they come across."""
    stop = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
    max_tokens = draw(st.integers(1, 60))
    return {
        "prompt": draw(st.lists(st.integers(3, 5), min_size=1, max_size=70)),
        "top_k": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 1 << 20)),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.sampled_from([0, 0, max_tokens // 2])),
        "stop": tuple(draw(st.lists(stop, max_size=2))),
        "stop_token_ids": draw(st.sampled_from([(), (), (5,)])),
        "ignore_eos": draw(st.booleans()),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.5])),
    }


def answers(
    make_worker: Any, wanted: list[dict[str, Any]], *, num_drafts: int, num_blocks: int
) -> tuple[dict[bytes, list[Any]], Any]:
    """What a worker says of each request, all asked at once; and the worker."""
    bench = make_worker(num_drafts=num_drafts, num_blocks=num_blocks)
    device = SimDevice(bench.name.full_name)
    arena = device.arenas[LOCAL_ARENA] = SimArena(device.name, 1, bench.ledger)
    for number, request in enumerate(wanted, 1):
        bench.dispatch(
            request["prompt"],
            number=number,
            **{name: value for name, value in request.items() if name != "prompt"},
        )
    while bench.scheduler.step is not None:
        bench.handle(ev.StepTaken())
        bench.now += 0.01
        bench.step_done(device.run(bench.batch()))
    assert not arena.violations
    assert not arena.num_broken
    told: dict[bytes, list[Any]] = {}
    for row in bench.rows():
        tokens, text = told.setdefault(row.request_id, [b"", b""])
        assert row.seq * 4 == len(tokens)
        told[row.request_id] = [tokens + row.token_ids, text + row.text]
    for end in bench.sent(m.FINISHED):
        body = end.body
        told[end.header.request_id] += [
            end.header.seq,
            body.finish_reason,
            body.stop,
            body.usage.prompt_tokens,
            body.usage.completion_tokens,
        ]
    bench.assert_all_free()
    return told, bench


@given(
    st.lists(requests(), min_size=1, max_size=4), st.integers(1, 16), st.sampled_from([5, 6, 9, 64])
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_answers_with_drafts_are_those_without(
    make_worker: Any, wanted: list[dict[str, Any]], num_drafts: int, num_blocks: int
) -> None:
    """With few blocks, requests preempt each other; the fixture only makes workers."""
    plain, _ = answers(make_worker, wanted, num_drafts=0, num_blocks=num_blocks)
    drafted, _ = answers(make_worker, wanted, num_drafts=num_drafts, num_blocks=num_blocks)
    assert drafted == plain
    assert len(plain) == len(wanted)
    assert all(len(told) == 7 for told in plain.values())


def test_drafts_are_told_and_save_steps(make_worker: Any) -> None:
    request = {"prompt": [3] * 8, "top_k": 1, "seed": 1, "max_tokens": 50, "ignore_eos": True}
    _, plain = answers(make_worker, [request], num_drafts=0, num_blocks=8)
    _, bench = answers(make_worker, [request], num_drafts=4, num_blocks=8)
    scheduler = bench.scheduler
    assert 0 < scheduler.drafting.num_accepted <= scheduler.drafting.num_drafted
    assert scheduler.num_steps <= plain.scheduler.num_steps - scheduler.drafting.num_accepted
    (end,) = bench.sent(m.FINISHED)
    counts = scheduler.drafting.num_drafted, scheduler.drafting.num_accepted
    assert (end.body.num_drafted, end.body.num_accepted) == counts
    bench.tick()
    load = bench.sent(m.HEARTBEAT)[-1].body.load
    assert (load.num_drafted, load.num_accepted) == counts
    assert load.num_decode_tokens == 49  # all but the prompt's


def test_steps_without_drafts_are_made_ahead(make_worker: Any) -> None:
    bench = make_worker(num_drafts=4)
    bench.dispatch(list(range(20, 40)))
    bench.handle(ev.StepTaken())
    for token in (50, 51, 52):
        assert bench.scheduler.ahead is not None
        bench.step(token)
    assert bench.scheduler.ahead is not None
    assert bench.scheduler.drafting.num_drafted == 0


def drafting(make_worker: Any, **sampling: Any) -> Any:
    """A worker that has told its first token, 12, and drafts 13, 10, 11, 12 behind it."""
    bench = make_worker(num_drafts=4)
    bench.dispatch(REPEATING, **sampling)
    bench.step(12)
    bench.clear()
    (row,) = bench.batch().rows
    assert row.token_ids.tolist() == [12, 13, 10, 11, 12]
    assert row.num_drafts == 4
    return bench


def returns(bench: Any, *token_ids: int, logprobs: tuple[Logprobs, ...] = ()) -> None:
    batch = bench.batch()
    drawn = (Drawn(batch.rows[0].sequence_id, token_ids, logprobs),)
    bench.step_done(StepResult(batch.step_id, drawn, 0.0, 0.0))


def test_tokens_of_one_step_leave_in_one_row(make_worker: Any) -> None:
    bench = drafting(make_worker)
    logprobs = tuple(Logprobs(-float(token), ()) for token in (13, 10, 50))
    returns(bench, 13, 10, 50, logprobs=logprobs)
    (row,) = bench.rows()
    assert (row.seq, bench.tokens()) == (1, [13, 10, 50])
    assert msgpack.unpackb(row.extras) == [[-13.0, []], [-10.0, []], [-50.0, []]]
    (following,) = bench.batch().rows
    assert following.start == len(REPEATING) + 3
    assert following.token_ids[0] == 50


def test_an_end_among_accepted_drafts_cuts_the_rest(make_worker: Any) -> None:
    bench = drafting(make_worker, stop_token_ids=(10,))
    logprobs = tuple(Logprobs(-float(token), ()) for token in (13, 10, 11))
    returns(bench, 13, 10, 11, logprobs=logprobs)
    (row,) = bench.rows()
    assert bench.tokens() == [13, 10]
    assert msgpack.unpackb(row.extras) == [[-13.0, []], [-10.0, []]]
    (end,) = bench.sent(m.FINISHED)
    assert (end.body.finish_reason, end.body.stop) == ("stop", 10)
    assert end.body.usage.completion_tokens == end.header.seq == 3
    bench.assert_all_free()


def test_a_row_with_drafts_that_fails_ends_its_request(make_worker: Any) -> None:
    bench = drafting(make_worker)
    batch = bench.batch()
    error = InternalError("a logit is nan")
    drawn = (Drawn(batch.rows[0].sequence_id, (), error=error),)
    bench.step_done(StepResult(batch.step_id, drawn, 0.0, 0.0))
    assert bench.failure().message == "a logit is nan"
    bench.assert_all_free()
