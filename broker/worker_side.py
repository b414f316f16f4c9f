"""What workers tell the broker: their lives, their loads, and the output of their steps."""

from typing import Any

from llmrt.broker.delivery import (
    EVENTS_FRAME,
    end,
    fail,
    flush,
    log_end,
    send_cancel,
    send_rows,
)
from llmrt.broker.dispatch import lose_owner, place_homeless
from llmrt.broker.events import WorkerMessage
from llmrt.broker.registry import Worker
from llmrt.broker.requests import Request
from llmrt.broker.state import State, Timer
from llmrt.broker.wrong_side import WORKER_KINDS, not_from_worker
from llmrt.wire.envelope import Header, decode_body, encode_body, encode_header, frame_at
from llmrt.wire.errors import InternalError, ProtocolError, RegistrationRefused
from llmrt.wire.ids import Attempt, ClientId, RequestId
from llmrt.wire.messages import (
    BYE,
    FAILED,
    FINISHED,
    HEARTBEAT,
    REFUSED,
    REGISTER,
    REGISTERED,
    STEP,
    TOKENIZED,
    UNKNOWN_WORKER,
    Failure,
    Finished,
    Heartbeat,
    Held,
    Register,
    Registered,
)
from llmrt.wire.steps import StepRow, decode_step

# A dispatch and the heartbeat that names it may cross on the way; after two beats they can't.
HOLDING_GRACE_BEATS = 2
# One heartbeat without the request may have been on its way already.
MAX_UNNAMED = 2
# Epochs are nanoseconds since 1970; a value above this is no epoch.
MAX_EPOCH = 2**63

UNKNOWN_FRAME = encode_header(UNKNOWN_WORKER)


def on_worker_message(state: State, event: WorkerMessage, now: float) -> None:
    """Carry out one message; raises `ProtocolError` if it is none."""
    routing_id, header, frames = event.routing_id, event.header, event.frames
    worker = state.workers.at(routing_id)
    if worker is not None:
        _hear(state, worker, now)
    kind = header.kind
    if kind == REGISTER:
        _register(state, routing_id, decode_body(frame_at(frames, 1), Register), now)
    elif worker is None:
        # A life that was given up, or one that does not know yet that the broker is a new one.
        if kind == HEARTBEAT:
            state.to_worker(routing_id, [UNKNOWN_FRAME])
        elif kind == STEP:
            state.count("rows_stale", len(decode_step(frames)))
        elif kind not in WORKER_KINDS:
            raise not_from_worker(state.settings, kind)
        elif kind != BYE:
            state.count("ends_stale")
    elif kind == STEP:
        _pass_step(state, worker, frames, now)
    elif kind in (FINISHED, FAILED, TOKENIZED):
        _end_from_worker(state, worker, header, frames, now)
    elif kind == HEARTBEAT:
        _heartbeat(state, worker, decode_body(frame_at(frames, 1), Heartbeat), now)
    elif kind == BYE:
        remove_worker(state, worker, now, cause="left")
    else:
        raise not_from_worker(state.settings, kind)


def remove_worker(state: State, worker: Worker, now: float, *, cause: str) -> None:
    """The life has ended, or counts as ended: others take its requests over."""
    state.workers.remove(worker)
    state.timers.drop((Timer.WORKER, worker.routing_id))
    state.unwatch(worker.card.process, worker.routing_id)
    state.log(
        "worker.left" if cause == "left" else "worker.lost",
        "info" if cause == "left" else "warning",
        worker_id=worker.name.worker_id,
        role=worker.card.role,
        epoch=worker.name.epoch,
        cause=cause,
        num_requests=len(worker.requests),
    )
    if cause != "left":
        state.count("workers_lost")
    _tell_peers(state)
    for request_id in list(worker.requests):
        lose_owner(state, state.requests.live[request_id], now, cause=cause)


def check_worker(state: State, worker: Worker, now: float) -> None:
    """Its timer rings: it is silent for too long, or was heard since the timer was set."""
    if _silence_ends_at(state, worker) <= now:
        remove_worker(state, worker, now, cause="silent")
    else:
        _watch_silence(state, worker)


def on_unsent(state: State, worker: Worker, header: Header, now: float) -> None:
    """A message to the worker was not sent: it has a beat's time to be heard again."""
    if worker.suspect_at is None:
        worker.suspect_at = now
        _watch_silence(state, worker)
    request = state.requests.live.get(RequestId(header.request_id))
    if request is not None and request.owner is worker and request.attempt == header.attempt:
        state.count("dispatches_lost")
        lose_owner(state, request, now, cause="unsent")


def _hear(state: State, worker: Worker, now: float) -> None:
    worker.heard_at = now
    if worker.suspect_at is not None:
        worker.suspect_at = None
        # What was not sent may have been the news of its peers.
        state.to_worker(worker.routing_id, state.workers.peers_frames())
        place_homeless(state, now)


def _watch_silence(state: State, worker: Worker) -> None:
    state.timers.set((Timer.WORKER, worker.routing_id), _silence_ends_at(state, worker))


def _silence_ends_at(state: State, worker: Worker) -> float:
    at = worker.heard_at + state.dead_after_s
    if worker.suspect_at is not None:
        at = min(at, worker.suspect_at + state.settings.beat_s)
    return at


def _register(state: State, routing_id: bytes, card: Register, now: float) -> None:
    try:
        holder = state.workers.holder(card)
    except RegistrationRefused as error:
        state.count("workers_refused")
        refusal = Failure(code=error.error_code, message=error.message)
        state.to_worker(routing_id, [encode_header(REFUSED), encode_body(refusal)])
        state.log("worker.refused", "warning", worker_id=card.worker_id, error=error.message)
        return
    if state.epoch <= card.broker_epoch_seen < MAX_EPOCH:
        # The clock that gave this broker its epoch was set back since the one before it.
        state.take_epoch(card.broker_epoch_seen + 1)
    worker = _enter(state, routing_id, card, holder, now)
    body = Registered(broker_epoch=state.epoch, beat_s=state.settings.beat_s)
    state.to_worker(routing_id, [encode_header(REGISTERED), encode_body(body)])
    _tell_peers(state)
    _reconcile(state, worker, card.holding, now)
    if worker.can_decode:
        place_homeless(state, now)


def _enter(
    state: State, routing_id: bytes, card: Register, holder: Worker | None, now: float
) -> Worker:
    """The registered worker; an earlier life under its name or on its connection ends."""
    tenant = state.workers.at(routing_id)
    if tenant is not None and tenant is not holder:
        remove_worker(state, tenant, now, cause="silent")
    if holder is not None and holder.name.epoch == card.epoch:
        state.timers.drop((Timer.WORKER, holder.routing_id))
        state.unwatch(holder.card.process, holder.routing_id)
        state.workers.move(holder, routing_id, card)
        worker = holder
        worker.heard_at, worker.suspect_at = now, None
    else:
        if holder is not None:
            remove_worker(state, holder, now, cause="silent")
        worker = state.workers.add(routing_id, card, now)
        state.count("workers_registered")
    state.watch(card.process, routing_id)
    _watch_silence(state, worker)
    state.log(
        "worker.registered",
        worker_id=card.worker_id,
        role=card.role,
        epoch=card.epoch,
        model=card.model,
        family=worker.family,
        num_blocks=card.num_blocks,
        pid=card.process.pid,
    )
    return worker


def _tell_peers(state: State) -> None:
    frames = state.workers.peers_frames()
    for worker in state.workers:
        state.to_worker(worker.routing_id, frames)


def _heartbeat(state: State, worker: Worker, beat: Heartbeat, now: float) -> None:
    worker.take_heartbeat(beat, now)
    state.to_worker(worker.routing_id, [state.beat_frame])
    _reconcile(state, worker, beat.holding, now)


def _reconcile(state: State, worker: Worker, holding: tuple[Held, ...], now: float) -> None:
    """Find messages that were lost although both sides live: what one side misses, it lost."""
    for held in holding:
        attempt = Attempt(held.epoch, held.n)
        request = state.requests.live.get(RequestId(held.request_id))
        if request is None or request.attempt != attempt:
            send_cancel(state, worker.routing_id, held.request_id, attempt)
        elif request.owner is worker:  # a prefill worker names what it computes for the owner
            request.stage, request.num_unnamed = held.stage, -1
    grace_s = HOLDING_GRACE_BEATS * state.settings.beat_s
    for request_id in list(worker.requests):
        request = state.requests.live[request_id]
        request.num_unnamed += 1
        if request.dispatched_at + grace_s >= now:
            request.num_unnamed = 0
        elif request.num_unnamed >= MAX_UNNAMED:
            state.count("dispatches_lost")
            lose_owner(state, request, now, cause="unnamed")


def _pass_step(state: State, worker: Worker, frames: list[bytes], now: float) -> None:
    """Pass each row on that is the next of its request's current attempt."""
    rows = decode_step(frames)
    client_to_rows: dict[ClientId, list[StepRow]] = {}
    gaps: dict[RequestId, Request] = {}
    num_direct = 0
    for row in rows:
        request = state.requests.live.get(row.request_id)
        if request is None or request.attempt != row.attempt or request.owner is not worker:
            state.count("rows_stale")
        elif row.seq == request.stream.next_seq:
            was_behind = request.stream.is_behind
            _accept(state, request, row, worker, now)
            ready = flush(state, request, now)
            num_direct += len(ready) == 1 and not was_behind
            if ready:
                client_to_rows.setdefault(request.client_id, []).extend(ready)
        elif row.seq < request.stream.next_seq:
            state.count("rows_duplicate")
        else:
            state.count("rows_gap")
            gaps[row.request_id] = request
    if num_direct == len(rows) and len(client_to_rows) == 1:
        # Everything goes to one reader as it came.
        client_id = next(iter(client_to_rows))
        state.to_client(client_id, [EVENTS_FRAME, *frames[1:]])
    else:
        for client_id, ready in client_to_rows.items():
            send_rows(state, client_id, ready)
    for request in gaps.values():
        lose_owner(state, request, now, cause="gap")


def _accept(state: State, request: Request, row: StepRow, worker: Worker, now: float) -> None:
    request.stream.accept(row)
    if request.prompt_worker is not None:
        request.settle_prompt()
    state.count("tokens_passed", row.num_tokens)
    if request.first_token_at is None:
        request.first_token_at = now
        request.stage = "decode"
        request.family = worker.family


def _end_from_worker(
    state: State, worker: Worker, header: Header, frames: list[bytes], now: float
) -> None:
    request = state.requests.live.get(RequestId(header.request_id))
    if request is None or request.attempt != header.attempt or request.owner is not worker:
        state.count("ends_stale")
        return
    if header.kind == FINISHED and header.seq != request.stream.next_seq:
        state.count("rows_gap")
        lose_owner(state, request, now, cause="gap")
        return
    try:
        outcome, fields = _outcome(header, frames)
    except ProtocolError as error:
        state.complain(worker.routing_id, error.error_code, error.message)
        fail(state, request, InternalError(f"{request.owner_name} sent a bad end: {error}"), now)
        return
    # The worker has ended it: no cancel is due.
    terminal = [
        encode_header(
            header.kind,
            request.request_id,
            attempt=header.attempt,
            seq=header.seq,
            stamps=header.stamps,
        ),
        *frames[1:],
    ]
    request.prefill_worker = fields.pop("prefill_worker", request.prefill_worker)
    end(state, request, terminal, now, outcome=outcome)
    log_end(state, request, now, outcome=outcome, **fields)


def _outcome(header: Header, frames: list[bytes]) -> tuple[str, dict[str, Any]]:
    """The outcome that the worker tells, and what the log line says of it."""
    if header.kind == TOKENIZED:
        return "finished", {"size_bytes": len(frame_at(frames, 1))}
    if header.kind == FAILED:
        failure = decode_body(frame_at(frames, 1), Failure)
        return "failed", {"error": failure.code}
    finished = decode_body(frame_at(frames, 1), Finished)
    return "finished", {
        "finish_reason": finished.finish_reason,
        "prompt_tokens": finished.usage.prompt_tokens,
        "completion_tokens": finished.usage.completion_tokens,
        "cached_tokens": finished.usage.cached_tokens,
        "timings_ms": finished.timings_ms,
        "prefill_worker": finished.prefill_worker,
        "num_preemptions": finished.num_preemptions,
        "num_drafted": finished.num_drafted,
        "num_accepted": finished.num_accepted,
    }
