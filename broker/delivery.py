"""The way out to the reader: rows, replays, and the end of a request."""

from typing import Any

from llmrt.broker.requests import Ended, Request
from llmrt.broker.state import State, Timer, failure_frames
from llmrt.wire.envelope import encode_header
from llmrt.wire.errors import InternalError, LlmrtError
from llmrt.wire.ids import Attempt, ClientId, RequestId
from llmrt.wire.messages import CANCEL, EVENTS
from llmrt.wire.steps import StepRow, encode_step

# A reader that comes back within this time finds the end of its stream, and what it missed.
ENDED_KEPT_S = 30.0
# An ended request without rows is some 500 bytes; the oldest goes first.
MAX_ENDED = 16384
# How long a stream waits for its reader's credit.
SLOW_READER_S = 10.0

EVENTS_FRAME = encode_header(EVENTS)


def flush(state: State, request: Request, now: float) -> list[StepRow]:
    """Rows that may go to the reader now; it has `SLOW_READER_S` to make room for the others."""
    client = state.clients.get(request.client_id)
    assert client is not None, "a client with a live request is not forgotten"
    if not client.is_reachable:
        return []
    rows = request.stream.take_unsent()
    key = (Timer.READER, request.request_id)
    if not request.stream.is_behind:
        state.timers.drop(key)
    elif key not in state.timers:
        state.timers.set(key, now + SLOW_READER_S)
    return rows


def send_rows(state: State, client_id: ClientId, rows: list[StepRow]) -> None:
    if rows:
        state.to_client(client_id, encode_step(rows, kind=EVENTS))


def replay(state: State, request: Request, seq: int, now: float) -> bool:
    """Send the rows from token `seq` on again; False if they are no longer kept."""
    if not request.stream.rewind(seq):
        return False
    send_rows(state, request.client_id, flush(state, request, now))
    return True


def replay_ended(state: State, ended: Ended, seq: int) -> bool:
    """Send the rows from token `seq` on and the end again; False if the rows are gone."""
    if seq < ended.stream.first_kept_seq or not ended.stream.rewind(seq):
        return False
    send_rows(state, ended.client_id, ended.stream.take_unsent(is_last=True))
    state.to_client(ended.client_id, ended.terminal)
    return True


def end(state: State, request: Request, terminal: list[bytes], now: float, *, outcome: str) -> None:
    """Tell the reader the end, once, and keep it. `outcome` is the counter's second word."""
    request_id, client_id = request.request_id, request.client_id
    client = state.clients.get(client_id)
    assert client is not None, "a client with a live request is not forgotten"
    if client.is_reachable:
        send_rows(state, client_id, request.stream.take_unsent(is_last=True))
        state.to_client(client_id, terminal)
    release_owner(request)
    for kind in (Timer.DEADLINE, Timer.HOMELESS, Timer.READER):
        state.timers.drop((kind, request_id))
    state.requests.end(request, terminal)
    # A repeat that comes within the request's own time must not start it again.
    kept_until = now + ENDED_KEPT_S
    keep_ended(
        state, request_id, max(kept_until, request.deadline if outcome == "cancelled" else 0)
    )
    state.count(f"requests_{outcome}")


def fail(
    state: State, request: Request, error: LlmrtError, now: float, *, outcome: str = "failed"
) -> None:
    """End a request with an error, and stop its owner's work on it."""
    cancel_at_owner(state, request)
    end(state, request, failure_frames(error, request.request_id), now, outcome=outcome)
    log_end(state, request, now, outcome=outcome, error=error.error_code, detail=error.message)


def fail_gone_rows(state: State, request: Request, seq: int, now: float) -> None:
    """The reader wants rows that are no longer kept."""
    error = InternalError(
        f"tokens from {seq} on were not kept for a second reading, because the output of all "
        "requests exceeds the broker's memory for it: send the request again under a new id"
    )
    fail(state, request, error, now)


def keep_ended(state: State, request_id: RequestId, until: float) -> None:
    """Start the clock of an ended request, and bound their number."""
    state.timers.set((Timer.ENDED, request_id), until)
    ended = state.requests.ended
    if len(ended) > MAX_ENDED:
        forget_ended(state, ended[next(iter(ended))])


def forget_ended(state: State, ended: Ended) -> None:
    state.timers.drop((Timer.ENDED, ended.request_id))
    client = state.clients.get(ended.client_id)
    if client is not None:
        client.requests.pop(ended.request_id, None)
    state.requests.forget(ended)


def release_owner(request: Request) -> None:
    request.settle_prompt()
    if request.owner is not None:
        request.owner.requests.pop(request.request_id, None)
        request.owner = None


def cancel_at_owner(state: State, request: Request) -> None:
    if request.owner is not None:
        send_cancel(state, request.owner.routing_id, request.request_id, request.attempt)


def send_cancel(state: State, routing_id: bytes, request_id: bytes, attempt: Attempt) -> None:
    state.to_worker(routing_id, [encode_header(CANCEL, request_id, attempt=attempt)])


def log_end(state: State, request: Request, now: float, *, outcome: str, **fields: Any) -> None:
    """The one line of a request."""
    first = request.first_token_at
    state.log(
        "request.finished",
        request_id=request.request_id.hex(),
        kind=request.kind,
        model=request.model,
        outcome=outcome,
        worker_id=request.owner_name,
        prefill_worker=request.prefill_worker,
        attempt=request.attempt.n,
        num_tokens=request.stream.next_seq,
        duration_ms=_milliseconds(now - request.admitted_at),
        ttft_ms=None if first is None else _milliseconds(first - request.admitted_at),
        **fields,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
