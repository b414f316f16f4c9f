"""What workers may expect of the broker, and what it demands of them."""

from collections.abc import Callable

import pytest
from kv_mismatches import CONTRACT, MISMATCHES, other_contract
from tests.broker.conftest import (
    ALICE,
    BOB,
    EPOCH,
    Rig,
    held,
    make_process,
    request_id,
    row,
    to_clients,
    to_workers,
)
from tests.conftest import make_contract

from llmrt.broker.effects import Log, SendWorker, UnwatchProcess, WatchProcess
from llmrt.broker.events import ProcessDied, WorkerGarbage, WorkerUnroutable
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.ids import Attempt
from llmrt.wire.kv import TEXT_FIELDS


def peers_of(effects: list[object], worker: bytes) -> list[list[str]]:
    """The names in each PEERS message to a worker."""
    sent = to_workers([e for e in effects if isinstance(e, SendWorker)], m.PEERS)
    return [
        [peer.worker_id for peer in decode_body(message.frames[1], m.Peers).peers]
        for message in sent
        if message.to == worker
    ]


def failure_of_refused(rig: Rig, effects: list[object]) -> str:
    (sent,) = to_workers([e for e in effects if isinstance(e, SendWorker)])
    assert sent.kind == m.REFUSED
    assert sent.failure.code == "registration_refused"
    return sent.failure.message


def test_a_worker_is_registered_watched_and_told_of_its_peers(rig: Rig) -> None:
    effects = rig.register("d0")
    registered = to_workers(effects, m.REGISTERED)[0]
    assert decode_body(registered.frames[1], m.Registered).broker_epoch == EPOCH
    assert WatchProcess(make_process(sum(b"d0"))) in effects
    assert peers_of([*effects], b"d0") == [["d0"]]
    effects = rig.register("p0", "prefill")
    assert peers_of([*effects], b"d0") == peers_of([*effects], b"p0") == [["d0", "p0"]]


def test_a_second_worker_of_a_living_name_is_refused(rig: Rig) -> None:
    rig.register("d0", epoch=1)
    effects = rig.register("d0", epoch=2, routing_id=b"other", process=make_process(999))
    message = failure_of_refused(rig, [*effects])
    assert "'d0' is already registered by pid 148" in message
    assert "--worker-id" in message
    assert to_workers(rig.generate(1), m.DISPATCH)[0].to == b"d0"
    assert rig.counters["workers_refused"] == 1


def test_a_restarted_worker_takes_its_name_back_when_the_old_life_is_dead(rig: Rig) -> None:
    rig.register("d0", epoch=1, process=make_process(7))
    rig.generate(1)
    rig.handle(ProcessDied(make_process(7)))
    effects = rig.register("d0", epoch=2, routing_id=b"new", process=make_process(8))
    assert to_workers(effects, m.REGISTERED)
    assert [(s.to, s.header.n) for s in to_workers(effects, m.DISPATCH)] == [(b"new", 2)]
    assert not to_clients(rig.step("d0", row(1, 0))), "the old life speaks to nobody"


def test_a_new_life_of_the_same_process_replaces_the_old(rig: Rig) -> None:
    rig.register("d0", epoch=1)
    effects = rig.register("d0", epoch=2, routing_id=b"again")
    assert to_workers(effects, m.REGISTERED)[0].to == b"again"
    assert peers_of([*effects], b"again") == [["d0"]]


def test_the_same_life_on_a_new_connection_keeps_its_requests(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    effects = rig.register("d0", routing_id=b"again", holding=(held(1),))
    assert not to_workers(effects, m.DISPATCH)
    rows = rig.worker(b"again", m.STEP, *_step_frames(1, 0))
    assert to_clients(rows, m.EVENTS)


def _step_frames(number: int, seq: int) -> list[bytes]:
    from llmrt.wire.steps import encode_step

    return encode_step([row(number, seq)])[1:]


@pytest.mark.parametrize(("name", "value"), MISMATCHES)
def test_workers_of_other_contracts_are_refused_or_never_paired(
    rig: Rig, name: str, value: object
) -> None:
    """Refused if clients would get one text or another, or if the contract says nothing."""
    rig.register("d0", "decode", contract=CONTRACT)
    effects = rig.register("p0", "prefill", contract=other_contract(name, value))
    says_nothing = value in ("", "\t") or (isinstance(value, int) and value < 1)
    if says_nothing:
        assert failure_of_refused(rig, [*effects]).endswith(
            f"{name} is {value!r}, which says nothing"
        )
    elif name in TEXT_FIELDS:
        both = f"{name} is {value!r} here and {getattr(CONTRACT, name)!r} there"
        assert both in failure_of_refused(rig, [*effects])
    else:
        assert len(to_workers(effects, m.REGISTERED)) == 1
    (dispatch,) = to_workers(rig.generate(1), m.DISPATCH)
    assert (dispatch.to, dispatch.route.prefill_worker) == (b"d0", None)


def test_one_text_may_be_served_in_several_kv_formats(rig: Rig) -> None:
    """And each prefill worker is paired with its own."""
    for n, contract in enumerate((CONTRACT, other_contract("kv_dtype", "int8"))):
        rig.register(f"d{n}", "decode", contract=contract)
        rig.register(f"p{n}", "prefill", contract=contract)
    sent = [to_workers(rig.generate(number), m.DISPATCH)[0] for number in (1, 2)]
    assert {(s.to, s.route.prefill_worker) for s in sent} == {(b"d0", "p0"), (b"d1", "p1")}


def test_other_models_and_lives_that_are_over_forbid_nothing(rig: Rig) -> None:
    rig.register("d0", contract=CONTRACT)
    other = other_contract("model_hash", "other")
    assert to_workers(rig.register("d1", contract=other, model="other"), m.REGISTERED)
    rig.worker(b"d0", m.BYE)
    assert to_workers(rig.register("d2", contract=other), m.REGISTERED)


@pytest.mark.parametrize(
    "change",
    [{"role": "chef"}, {"worker_id": ""}, {"model": ""}, {"link": "x" * 5000}],
    ids=str,
)
def test_a_bad_card_is_refused(rig: Rig, change: dict[str, str]) -> None:
    failure_of_refused(rig, [*rig.register("d0", **change)])


def test_a_broker_takes_an_epoch_above_any_that_it_hears_of(rig: Rig) -> None:
    effects = rig.register("d0", broker_epoch_seen=EPOCH + 5)
    registered = to_workers(effects, m.REGISTERED)[0]
    assert decode_body(registered.frames[1], m.Registered).broker_epoch == EPOCH + 6
    assert to_workers(rig.generate(1), m.DISPATCH)[0].header.attempt == Attempt(EPOCH + 6, 1)


def test_a_heartbeat_is_answered(rig: Rig) -> None:
    rig.register("d0")
    assert [sent.kind for sent in to_workers(rig.heartbeat("d0"))] == [m.BEAT]


def test_an_unknown_worker_is_told_to_register(rig: Rig) -> None:
    assert [sent.kind for sent in to_workers(rig.heartbeat("d0"))] == [m.UNKNOWN_WORKER]
    assert rig.step("d0", row(1, 0)) == []
    assert rig.finish("d0") == []
    assert rig.counters["rows_stale"] == 1
    assert rig.counters["ends_stale"] == 1


def test_rows_pass_only_in_order_and_of_the_current_attempt(rig: Rig) -> None:
    rig.register("d0")
    rig.register("d1", worker_id="d1")
    owner = to_workers(rig.generate(1), m.DISPATCH)[0].to.decode()
    other = {"d0": "d1", "d1": "d0"}[owner]
    rig.step(owner, row(1, 0), row(1, 0), row(1, 1))
    assert not to_clients(rig.step(other, row(1, 2)))
    assert not to_clients(rig.step(owner, row(1, 2, n=7), row(5, 0)))
    assert rig.counters["rows_duplicate"] == 1
    assert rig.counters["rows_stale"] == 3
    assert rig.counters["tokens_passed"] == 2


def test_each_client_gets_one_message_per_step(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1, client=ALICE)
    rig.generate(2, client=BOB)
    rig.generate(3, client=ALICE)
    sent = to_clients(rig.step("d0", row(1, 0), row(2, 0), row(3, 0), row(4, 0)))
    assert [(s.to, [r.request_id[-1] for r in s.rows]) for s in sent] == [
        (ALICE, [1, 3]),
        (BOB, [2]),
    ]


def test_a_gap_starts_a_new_attempt_behind_what_was_passed_on(rig: Rig) -> None:
    """A step message was lost: its tokens are drawn again, so that none is missing."""
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", row(1, 0, 11), row(1, 1, 12))
    effects = rig.step("d0", row(1, 3, 14), row(1, 4, 15))
    cancel, dispatch = to_workers(effects)
    assert (cancel.kind, cancel.header.n) == (m.CANCEL, 1)
    assert (dispatch.kind, dispatch.header.n, dispatch.header.seq) == (m.DISPATCH, 2, 2)
    assert dispatch.route.num_forced == 2
    assert dispatch.frames[-1] == bytes([11, 0, 0, 0, 12, 0, 0, 0])
    assert rig.counters["rows_gap"] == 2


def test_an_end_before_its_last_token_is_a_gap(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.step("d0", row(1, 0))
    effects = rig.finish("d0", seq=2)
    assert not to_clients(effects)
    assert [sent.kind for sent in to_workers(effects)] == [m.CANCEL, m.DISPATCH]


def test_a_worker_may_fail_a_request(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    body = encode_body(m.Failure(code="out_of_blocks", message="too long"))
    effects = rig.worker(b"d0", m.FAILED, body, number=1, attempt=Attempt(EPOCH, 1))
    assert [sent.failure.code for sent in to_clients(effects)] == ["out_of_blocks"]
    assert not to_workers(effects)
    assert rig.counters["requests_failed"] == 1


def test_a_damaged_end_fails_the_request(rig: Rig) -> None:
    """The worker has forgotten it, so that nothing else would end it before its deadline."""
    rig.register("d0")
    rig.generate(1)
    effects = rig.worker(b"d0", m.FINISHED, b"\xc1", number=1, attempt=Attempt(EPOCH, 1))
    assert [sent.failure.code for sent in to_clients(effects)] == ["internal_error"]


def test_one_line_is_logged_per_request(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    rig.advance(0.5)
    rig.step("d0", row(1, 0))
    rig.advance(0.25)
    (line,) = [e for e in rig.finish("d0", seq=1, reason="length") if isinstance(e, Log)]
    assert (line.event, line.level) == ("request.finished", "info")
    assert line.fields["finish_reason"] == "length"
    assert line.fields["num_tokens"] == 1
    assert line.fields["ttft_ms"] == 500.0
    assert line.fields["duration_ms"] == 750.0
    assert (line.fields["num_drafted"], line.fields["num_accepted"]) == (8, 3)


def test_a_dispatch_that_the_owner_never_names_is_made_again(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    effects = []
    for _ in range(4):
        rig.advance(0.9)
        effects += rig.heartbeat("d0", [])
    assert [s.header.n for s in to_workers(effects, m.DISPATCH)] == [2]
    assert rig.counters["dispatches_lost"] == 1


def test_a_dispatch_that_the_owner_names_in_between_is_not_lost(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    for number in range(12):
        rig.client(m.BEAT)
        rig.advance(0.9)
        effects = rig.heartbeat("d0", [held(1)] if number % 2 else [])
        assert not to_workers(effects, m.DISPATCH)


def test_what_a_worker_should_not_hold_is_cancelled(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1)
    wrong = [held(1, n=3), held(8), m.Held(b"z" * 16, EPOCH - 1, 4, "decode")]
    effects = rig.heartbeat("d0", [held(1), *wrong])
    cancelled = [(s.header.request_id[-1], s.header.n) for s in to_workers(effects, m.CANCEL)]
    assert cancelled == [(1, 3), (8, 1), (ord("z"), 4)]


def test_a_prefill_worker_may_name_what_it_computes_for_the_owner(rig: Rig) -> None:
    rig.register("p0", "prefill")
    rig.register("d0", "decode")
    rig.generate(1)
    assert not to_workers(rig.heartbeat("p0", [held(1, stage="prefill")]), m.CANCEL)
    rig.client(m.CANCEL, 1)
    assert to_workers(rig.heartbeat("p0", [held(1, stage="prefill")]), m.CANCEL)


def test_a_wrongly_buried_worker_returns_without_its_old_attempts(rig: Rig) -> None:
    """Stopped for ten seconds and continued: what it holds has gone on elsewhere."""
    rig.register("d0")
    rig.generate(1)
    rig.client(m.BEAT)
    rig.register("d1")
    for _ in range(5):
        rig.client(m.BEAT)
        rig.heartbeat("d1", [held(1, n=2)])
        rig.advance(0.9)
    assert rig.counters["workers_lost"] == 1
    assert not to_clients(rig.step("d0", row(1, 0)))
    assert [s.kind for s in to_workers(rig.heartbeat("d0", [held(1)]))] == [m.UNKNOWN_WORKER]
    effects = rig.register("d0", holding=(held(1),))
    assert [(s.to, s.header.n) for s in to_workers(effects, m.CANCEL)] == [(b"d0", 1)]
    assert to_clients(rig.step("d1", row(1, 0, n=2)), m.EVENTS)


def test_a_silent_worker_is_dead_after_its_beats(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(beat_s=2.0, dead_after_beats=3.5)
    rig.register("d0")
    rig.advance(6.9)
    assert rig.counters["workers_lost"] == 0
    effects = rig.advance(0.2)
    assert rig.counters["workers_lost"] == 1
    assert UnwatchProcess(make_process(sum(b"d0"))) in effects


def test_a_worker_that_says_goodbye_is_not_lost(rig: Rig) -> None:
    rig.register("d0")
    rig.register("d1")
    first = to_workers(rig.generate(1), m.DISPATCH)[0].to
    effects = rig.worker(first, m.BYE)
    (again,) = to_workers(effects, m.DISPATCH)
    assert again.to != first
    assert peers_of([*effects], again.to) == [[again.to.decode()]]
    assert rig.counters["workers_lost"] == 0


def test_an_unreachable_worker_is_dead_after_one_beat_of_silence(rig: Rig) -> None:
    rig.register("d0")
    rig.handle(WorkerUnroutable(b"d0", [*to_workers(rig.heartbeat("d0"))[0].frames]))
    rig.advance(0.9)
    assert rig.counters["workers_lost"] == 0
    rig.advance(0.2)
    assert rig.counters["workers_lost"] == 1


def test_an_unreachable_worker_that_is_heard_again_lives(rig: Rig) -> None:
    rig.register("d0")
    rig.handle(WorkerUnroutable(b"d0", to_workers(rig.heartbeat("d0"))[0].frames))
    rig.advance(0.5)
    assert [s.kind for s in to_workers(rig.heartbeat("d0"))] == [m.PEERS, m.BEAT]
    rig.advance(2.0)
    assert rig.counters["workers_lost"] == 0


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("dance", ()),
        (m.HEARTBEAT, (b"\xc1",)),
        (m.STEP, (b"12345",)),
        (m.STEP, (b"1", b"", b"", b"")),
        (m.REGISTER, ()),
    ],
)
def test_a_bad_message_is_answered_and_harms_nobody(
    rig: Rig, kind: str, frames: tuple[bytes, ...]
) -> None:
    rig.register("d0")
    rig.generate(1)
    (to_worker,) = to_workers(rig.worker(b"d0", kind, *frames))
    garbage = WorkerGarbage(b"stranger", "version_mismatch", "speak 1.0")
    (to_stranger,) = to_workers(rig.handle(garbage))
    assert (to_worker.to, to_worker.failure.code) == (b"d0", "protocol_error")
    assert (to_stranger.to, to_stranger.failure.code) == (b"stranger", "version_mismatch")
    assert rig.counters["protocol_errors"] == 2
    assert to_clients(rig.step("d0", row(1, 0)), m.EVENTS)


@pytest.mark.parametrize("kind", [m.HELLO, m.PS, m.GENERATE, m.BEAT])
def test_a_client_at_the_endpoint_for_workers_is_told_the_other(rig: Rig, kind: str) -> None:
    (sent,) = to_workers(rig.worker(b"client", kind, number=1))
    assert sent.header.request_id == request_id(1)
    assert sent.failure == m.Failure(
        code="config_invalid",
        message="tcp://127.0.0.1:7701: this is the broker's endpoint for workers: "
        "give --broker the one for clients, tcp://127.0.0.1:7700",
    )
    assert rig.counters["ends_stale"] == 0


def test_a_port_that_was_left_open_is_not_named(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(bind="tcp://127.0.0.1:*", worker_bind="tcp://127.0.0.1:*")
    (sent,) = to_workers(rig.worker(b"client", m.HELLO))
    assert sent.failure.message == (
        "this is the broker's endpoint for workers: give --broker the one for clients"
    )


def test_ps_has_a_few_reasons_of_refused_links_and_cuts_long_ones(rig: Rig) -> None:
    rig.register("d0")
    rig.heartbeat("d0", refusals={f"p{n}": "x" * 999 for n in range(9)})
    (sent,) = to_clients(rig.client(m.PS, 9))
    (row,) = decode_body(sent.frames[1], m.PsReply).workers
    assert row.refusals == {f"p{n}": "x" * 200 for n in range(4)}


def test_two_sessions_of_one_process_share_a_watch(rig: Rig) -> None:
    rig.hello(ALICE, pid=5)
    assert WatchProcess(make_process(5)) not in rig.hello(BOB, pid=5)
    rig.register("d0", process=make_process(5))
    rig.handle(ProcessDied(make_process(5)))
    watches = [e for e in rig.seen if isinstance(e, WatchProcess | UnwatchProcess)]
    assert watches == [WatchProcess(make_process(5)), UnwatchProcess(make_process(5))]


def test_another_contract_is_never_paired(rig: Rig) -> None:
    rig.register("p0", "prefill", contract=make_contract(kv_dtype="f32"))
    rig.register("d0", "decode")
    assert to_workers(rig.generate(1), m.DISPATCH)[0].route.prefill_worker is None
    rig.register("p1", "prefill", contract=make_contract(numerics_id="other"), epoch=3)
    route = to_workers(rig.generate(2), m.DISPATCH)[0].route
    assert (route.prefill_worker, route.prefill_epoch) == ("p1", 3)


def test_an_end_passes_only_for_the_current_attempt_of_its_owner(rig: Rig) -> None:
    rig.register("d0")
    rig.register("d1")
    rig.generate(1)
    first = to_workers(rig.seen, m.DISPATCH)[0].to.decode()
    second = {"d0": "d1", "d1": "d0"}[first]
    rig.step(first, row(1, 0))
    rig.step(first, row(1, 2))
    assert to_workers(rig.seen, m.DISPATCH)[1].to.decode() == second
    assert not to_clients(rig.finish(first, n=1, seq=1))
    assert not to_clients(rig.finish(first, n=2, seq=1))
    assert not to_clients(rig.finish(second, n=1, seq=1))
    assert rig.counters["ends_stale"] == 3
    assert to_clients(rig.finish(second, n=2, seq=1), m.FINISHED)
