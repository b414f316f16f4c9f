"""Which worker gets a request, and what becomes of it when that worker is lost."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from tests.broker.conftest import (
    EPOCH,
    Rig,
    Sent,
    held,
    make_process,
    request_id,
    row,
    to_clients,
    to_workers,
)
from tests.conftest import make_contract

from llmrt.broker.events import ProcessDied, WorkerUnroutable
from llmrt.wire import messages as m
from llmrt.wire.ids import Attempt


def dispatched(effects: list[object]) -> Sent:
    (sent,) = to_workers(effects, m.DISPATCH)  # type: ignore[arg-type]
    return sent


def kill(rig: Rig, name: str) -> list[Sent]:
    effects = rig.handle(ProcessDied(make_process(sum(name.encode()))))
    return to_workers(effects, m.DISPATCH)


def test_a_dispatch_carries_the_clients_frames_untouched(rig: Rig) -> None:
    rig.register("d0")
    sent = dispatched([*rig.generate(1, budget_ms=7000)])
    assert (sent.to, sent.header.request_id) == (b"d0", request_id(1))
    assert sent.header.attempt == Attempt(EPOCH, 1)
    assert sent.header.budget_ms == 7000
    assert sent.route == m.Route()
    assert sent.frames[3] == b"prompt"
    assert len(sent.frames) == 4


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "prefix-aware"])
def test_requests_spread_over_equal_workers(make_rig: Callable[..., Rig], policy: str) -> None:
    rig = make_rig(decode_policy=policy, max_live=1000)
    for name in ("b0", "b1"):
        rig.register(name)
    owners = Counter(dispatched([*rig.generate(number)]).to for number in range(100))
    assert all(40 <= owners[name] <= 60 for name in (b"b0", b"b1"))


def test_the_idle_worker_is_chosen_after_all_requests_were_cancelled(rig: Rig) -> None:
    """Loads that were reported while they ran must not count for ever."""
    rig.register("b0")
    for number in range(20):
        rig.generate(number)
    rig.heartbeat("b0", [held(n) for n in range(20)], num_running=10, num_waiting=10)
    rig.register("b1")
    for number in range(100, 104):
        assert dispatched([*rig.generate(number)]).to == b"b1"
    for number in range(20):
        rig.client(m.CANCEL, number)
    rig.heartbeat("b0")
    assert dispatched([*rig.generate(200)]).to == b"b0"


def test_prefill_workers_are_chosen_by_what_they_were_given(rig: Rig) -> None:
    rig.register("d0", "decode")
    rig.register("p0", "prefill")
    rig.register("p1", "prefill")
    rig.heartbeat("p0", num_running=2)
    chosen = [dispatched([*rig.generate(n)]).route.prefill_worker for n in range(4)]
    assert chosen[:2] == ["p1", "p1"]
    assert Counter(chosen) == {"p1": 3, "p0": 1}


def test_every_pair_of_workers_gets_its_share(rig: Rig) -> None:
    for name, role in (("d0", "decode"), ("d1", "decode"), ("p0", "prefill"), ("p1", "prefill")):
        rig.register(name, role)
    pairs: Counter[tuple[str, str | None]] = Counter()
    for number in range(40):
        sent = dispatched([*rig.generate(number)])
        pairs[sent.to.decode(), sent.route.prefill_worker] += 1
        rig.finish(sent.to.decode(), number)
    assert set(pairs.values()) == {10}


def text(number: int, num_tokens: int) -> bytes:
    return random.Random(number).randbytes(2 * num_tokens).hex().encode()


def test_the_next_turn_goes_where_the_one_before_was(rig: Rig) -> None:
    for name in ("d0", "d1", "d2"):
        rig.register(name, "decode")
    owners: dict[int, set[bytes]] = defaultdict(set)
    for turn in range(4):
        for chat in range(9):
            number = turn * 9 + chat
            prompt = b"".join(text(chat * 10 + i, 100) for i in range(turn + 1))
            owner = dispatched([*rig.generate(number, prompt=prompt)]).to
            owners[chat].add(owner)
            rig.step(owner.decode(), row(number, 0))
        for chat in range(9):
            for owner in owners[chat]:
                rig.finish(owner.decode(), turn * 9 + chat, seq=1)
    assert all(len(of) == 1 for of in owners.values())
    assert Counter(next(iter(of)) for of in owners.values()) == {b"d0": 3, b"d1": 3, b"d2": 3}


def test_a_prompt_without_a_first_token_is_ahead_of_the_next_one(rig: Rig) -> None:
    """At its decode worker, until it has one or has ended."""
    rig.register("d0", "decode")
    rig.register("d1", "decode")
    long = dispatched([*rig.generate(1, prompt=text(1, 3000))]).to
    short = b"d1" if long == b"d0" else b"d0"
    assert [dispatched([*rig.generate(n, prompt=b"hi")]).to for n in (2, 3, 4)] == [short] * 3
    rig.step(long.decode(), row(1, 0))
    assert dispatched([*rig.generate(5, prompt=b"hi")]).to == long
    rig.generate(6, prompt=text(6, 3000))
    for number in range(1, 7):
        rig.client(m.CANCEL, number)
    assert all(worker.num_pending_tokens == 0 for worker in rig.core._state.workers)


@pytest.mark.parametrize(("link", "num_used"), [("shm", 2), ("tcp", 1)])
def test_a_prefill_worker_is_chosen_for_its_cache_if_it_has_one(
    rig: Rig, link: str, num_used: int
) -> None:
    """In place it computes into the owner's arena and keeps nothing."""
    rig.register("d0", "decode")
    rig.register("p0", "prefill")
    rig.register("p1", "prefill")
    rig.heartbeat("d0", links={"p0": link, "p1": link})
    used = set()
    for number in range(4):
        used.add(dispatched([*rig.generate(number, prompt=text(1, 500))]).route.prefill_worker)
        rig.step("d0", row(number, 0))
        rig.finish("d0", number, seq=1)
        for name in ("p0", "p1"):
            rig.heartbeat(name)
    assert len(used) == num_used


def test_a_restarted_worker_has_nothing_cached(rig: Rig) -> None:
    rig.register("d0", "decode")
    rig.register("d1", "decode")
    first = dispatched([*rig.generate(1, prompt=text(1, 500))]).to
    rig.finish(first.decode(), 1)
    kill(rig, first.decode())
    rig.register(first.decode(), "decode", epoch=2)
    worker = rig.core._state.workers.named(first.decode())
    assert worker is not None
    assert len(worker.prefixes) == 0


def test_a_both_worker_prefills_for_nobody_else(rig: Rig) -> None:
    rig.register("b0")
    rig.register("b1")
    assert dispatched([*rig.generate(1)]).route.prefill_worker is None


def test_a_lost_owners_requests_go_on_elsewhere_at_the_next_token(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.generate(2)
    rig.step("d0", row(1, 0, 100), row(1, 1, 200))
    rig.client(m.ACK, 1, seq=2)
    rig.register("d1")
    rig.advance(1.0)
    first, second = kill(rig, "d0")
    assert (first.to, first.header.attempt) == (b"d1", Attempt(EPOCH, 2))
    assert first.header.seq == first.route.num_forced == 2
    assert first.header.budget_ms == 599_000
    assert first.frames[3:] == [b"prompt", bytes([100, 0, 0, 0, 200, 0, 0, 0])]
    assert second.route.num_forced == 0
    assert len(second.frames) == 4
    assert [s.seqs for s in to_clients(rig.step("d1", row(1, 2, n=2)))] == [[2]]
    assert rig.counters["requests_resumed"] == 2


def test_without_another_worker_a_request_waits_for_one(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    assert kill(rig, "d0") == []
    rig.advance(3.0)
    assert dispatched([*rig.register("d1")]).header.n == 2


def test_a_request_fails_if_no_worker_comes_in_time(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    kill(rig, "d0")
    rig.client(m.BEAT)
    effects = rig.advance(10.0)
    (sent,) = to_clients(effects)
    assert sent.failure.code == "worker_lost"
    assert "d0" in sent.failure.message


def test_a_request_that_kills_two_workers_is_failed(rig: Rig) -> None:
    for name in ("d0", "d1", "d2"):
        rig.register(name)
    first = dispatched([*rig.generate(1)]).to.decode()
    rig.advance(0.2)
    (second,) = kill(rig, first)
    rig.advance(0.2)
    assert kill(rig, second.to.decode()) == []
    end = to_clients(rig.seen, m.FAILED)
    assert [sent.failure.code for sent in end] == ["worker_lost"]


def test_a_worker_that_was_dead_already_is_not_held_against_a_request(rig: Rig) -> None:
    """Two workers die at once, and the news of the second comes behind the dispatch to it."""
    for name in ("d0", "d1", "d2"):
        rig.register(name)
    first = dispatched([*rig.generate(1)]).to.decode()
    rig.advance(0.2)
    (second,) = kill(rig, first)
    rig.advance(0.01)
    (third,) = kill(rig, second.to.decode())
    assert third.header.n == 3
    assert to_clients(rig.seen, m.FAILED) == []


def test_attempts_are_bounded(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_attempts=3, default_deadline_s=1000.0)
    rig.register("d0")
    rig.generate(1)
    for _ in range(60):
        rig.client(m.BEAT)
        rig.heartbeat("d0", [])
        rig.advance(0.9)
    assert [s.header.n for s in to_workers(rig.seen, m.DISPATCH)] == [1, 2, 3]
    (end,) = to_clients(rig.seen, m.FAILED)
    assert end.failure.code == "worker_lost"
    assert "3 attempts" in end.failure.message


def test_a_worker_of_another_family_does_not_continue_a_stream(rig: Rig) -> None:
    """Same model, other KV: it would go on with other last bits, and perhaps another text."""
    rig.register("d0")
    rig.generate(1)
    rig.generate(2)
    rig.step("d0", row(1, 0))
    rig.register("d1", contract=make_contract(kv_dtype="int8"))
    (sent,) = kill(rig, "d0")
    assert (sent.to, sent.header.request_id) == (b"d1", request_id(2))
    rig.register("d2")
    assert to_workers(rig.seen, m.DISPATCH)[-1].to == b"d2"


def test_other_weights_of_a_name_do_not_continue_a_stream(rig: Rig) -> None:
    """Whoever served it before is dead: the name is free, but not for what has begun."""
    rig.register("d0")
    rig.generate(1)
    rig.generate(2)
    rig.step("d0", row(1, 0))
    kill(rig, "d0")
    sent = to_workers(rig.register("d1", contract=make_contract(model_hash="other")), m.DISPATCH)
    assert [(s.to, s.header.request_id) for s in sent] == [(b"d1", request_id(2))]


def test_a_resume_on_other_numerics_is_counted(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", row(1, 0))
    rig.register("d1", contract=make_contract(numerics_id="other"))
    assert len(kill(rig, "d0")) == 1
    assert rig.counters["resumes_on_other_numerics"] == 1


def test_a_dispatch_that_was_not_sent_goes_elsewhere_at_once(rig: Rig) -> None:
    rig.register("d0")
    rig.register("d1")
    sent = dispatched([*rig.generate(1)])
    again = dispatched([*rig.handle(WorkerUnroutable(sent.to, sent.frames))])
    assert again.to != sent.to
    assert again.header.n == 2
    assert not rig.handle(WorkerUnroutable(sent.to, sent.frames)), "an old attempt"


def test_an_unreachable_worker_is_given_nothing(rig: Rig) -> None:
    """Else one lost message would follow the other without end."""
    rig.register("d0")
    sent = dispatched([*rig.generate(1)])
    assert not to_workers(rig.handle(WorkerUnroutable(sent.to, sent.frames)), m.DISPATCH)
    rig.advance(0.5)
    assert dispatched([*rig.heartbeat("d0")]).header.n == 2


def test_a_worker_that_is_silent_gets_no_new_requests(rig: Rig) -> None:
    rig.register("d0")
    rig.register("d1")
    rig.advance(2.0)
    rig.heartbeat("d1")
    assert {dispatched([*rig.generate(n)]).to for n in range(4)} == {b"d1"}
