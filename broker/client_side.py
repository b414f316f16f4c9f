"""What clients ask of the broker."""

import msgspec

from llmrt.broker.clients import Client
from llmrt.broker.delivery import (
    ENDED_KEPT_S,
    fail,
    fail_gone_rows,
    flush,
    forget_ended,
    keep_ended,
    replay,
    replay_ended,
    send_rows,
)
from llmrt.broker.dispatch import place
from llmrt.broker.events import ClientMessage
from llmrt.broker.requests import Ended, Request, Stream
from llmrt.broker.state import State, Timer, failure_frames
from llmrt.broker.status import ps_reply
from llmrt.broker.wrong_side import not_from_client
from llmrt.wire import messages
from llmrt.wire.envelope import (
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_RAW_BYTES,
    NO_BUDGET,
    decode_body,
    encode_body,
    encode_header,
)
from llmrt.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LlmrtError,
    MessageTooLarge,
    ModelNotFound,
    NoWorker,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    RequestConflict,
)
from llmrt.wire.ids import ClientId, RequestId
from llmrt.wire.messages import Hello, Welcome

# A dispatch has one frame more than the client's message in front, and one behind.
MAX_CLIENT_FRAMES = MAX_FRAMES - 2
# Prompts of all live requests, which are kept for a next owner.
MAX_PROMPT_BYTES = 512 << 20
# An idle session is forgotten after this, and introduces itself again when it wants something.
CLIENT_IDLE_S = 60.0


class _ModelChoice(msgspec.Struct, frozen=True):
    """The only field of a request that routing reads. Others are skipped, not decoded."""

    model: str | None = None


_MODEL_CHOICE = msgspec.msgpack.Decoder(_ModelChoice)


def on_client_message(state: State, event: ClientMessage, now: float) -> None:
    """Carry out one message; raises `ProtocolError` if it is none."""
    client_id, header = event.client_id, event.header
    client = _hear(state, client_id, now)
    request_id = RequestId(header.request_id)
    match header.kind:
        case messages.ACK:
            _acknowledge(state, client, request_id, header.seq, now)
        case messages.BEAT:
            state.to_client(client_id, [state.beat_frame])
        case messages.GENERATE | messages.TOKENIZE:
            _ask(state, client, event, now)
        case messages.CANCEL:
            _cancel(state, client, request_id, now)
        case messages.PS:
            _show(state, client, request_id, now)
        case messages.HELLO:
            _welcome(state, client, event.frames)
        case kind:
            raise not_from_client(state.settings, kind)


def check_client(state: State, client: Client, now: float) -> None:
    """Its timer rings: it is silent for too long, or was heard since the timer was set."""
    key = (Timer.CLIENT, client.client_id)
    live = [state.requests.live[i] for i in client.requests if i in state.requests.live]
    silent_at = client.heard_at + state.dead_after_s
    if not live:
        if client.heard_at + CLIENT_IDLE_S > now or client.requests:
            state.timers.set(key, now + CLIENT_IDLE_S)
        else:
            forget_client(state, client)
    elif silent_at > now:
        client.orphaned_at = None
        state.timers.set(key, silent_at)
    elif client.orphaned_at is None:
        client.orphaned_at = now
        state.count("clients_orphaned")
        state.log(
            "client.orphaned", "warning", client_id=client.client_id.hex(), num_requests=len(live)
        )
        state.timers.set(key, now + state.settings.resume_window_s)
    else:
        cancel_all(state, client, now, why="its client was silent for too long")
        state.timers.set(key, now + CLIENT_IDLE_S)


def cancel_all(state: State, client: Client, now: float, *, why: str) -> None:
    for request_id in list(client.requests):
        request = state.requests.live.get(request_id)
        if request is not None:
            fail(state, request, RequestCancelled(why), now, outcome="cancelled")


def forget_client(state: State, client: Client) -> None:
    for request_id in list(client.requests):
        forget_ended(state, state.requests.ended[request_id])
    state.timers.drop((Timer.CLIENT, client.client_id))
    if client.process is not None:
        state.unwatch(client.process, client.client_id)
    state.clients.forget(client)


def _hear(state: State, client_id: ClientId, now: float) -> Client:
    client = state.clients.get(client_id)
    if client is None:
        # Perhaps an old one: a session that was idle for long is forgotten, and comes back so.
        client = state.clients.add(client_id, now)
        state.timers.set((Timer.CLIENT, client_id), now + CLIENT_IDLE_S)
    client.heard_at = now
    if client.orphaned_at is not None:
        client.orphaned_at = None
        _watch_silence(state, client)
    if not client.is_reachable:
        client.is_reachable = True
        _catch_up(state, client, now)
    return client


def _catch_up(state: State, client: Client, now: float) -> None:
    """It is back: what could not be sent, and what may have been lost, is sent again."""
    for request_id in list(client.requests):
        request = state.requests.live.get(request_id)
        if request is None:
            ended = state.requests.ended[request_id]
            replay_ended(state, ended, ended.stream.acked_seq)
        elif not replay(state, request, request.stream.acked_seq, now):
            fail_gone_rows(state, request, request.stream.acked_seq, now)


def _watch_silence(state: State, client: Client) -> None:
    key = (Timer.CLIENT, client.client_id)
    state.timers.set_no_later(key, client.heard_at + state.dead_after_s)


def _welcome(state: State, client: Client, frames: list[bytes]) -> None:
    hello = decode_body(_body(frames), Hello)
    if hello.process is not None and hello.process != client.process:
        if client.process is not None:
            state.unwatch(client.process, client.client_id)
        client.process = hello.process
        state.watch(hello.process, client.client_id)
    welcome = Welcome(
        broker_epoch=state.epoch,
        max_body_bytes=MAX_BODY_BYTES,
        max_raw_bytes=MAX_RAW_BYTES,
        max_frames=MAX_CLIENT_FRAMES,
        beat_s=state.settings.beat_s,
    )
    state.to_client(client.client_id, [encode_header(messages.WELCOME), encode_body(welcome)])


def _show(state: State, client: Client, request_id: RequestId, now: float) -> None:
    try:
        frames = [encode_header(messages.PS_REPLY, request_id), ps_reply(state, now)]
    except MessageTooLarge as error:
        frames = failure_frames(error, request_id)
    state.to_client(client.client_id, frames)


def _ask(state: State, client: Client, event: ClientMessage, now: float) -> None:
    """Admit a request, attach to a known one, or refuse it."""
    header = event.header
    request_id = RequestId(header.request_id)
    if not request_id:
        raise ProtocolError(f"{header.kind} without a request id")
    known = state.requests.live.get(request_id) or state.requests.ended.get(request_id)
    try:
        if known is None:
            _admit(state, client, event, now)
        elif known.client_id != client.client_id:
            raise RequestConflict(
                f"request id {request_id.hex()} is in use by another client: take a random one"
            )
        else:
            if not known.asks(event.frames[1:]):
                raise RequestConflict(
                    f"request id {request_id.hex()} was used for another request: take a random one"
                )
            _attach(state, known, header.seq, now)
    except LlmrtError as error:
        state.count("requests_refused")
        state.to_client(client.client_id, failure_frames(error, request_id))
        state.log(
            "request.refused",
            request_id=request_id.hex(),
            error=error.error_code,
            detail=error.message,
        )


def _attach(state: State, known: Request | Ended, seq: int, now: float) -> None:
    state.count("requests_attached")
    if isinstance(known, Ended):
        if not replay_ended(state, known, seq):
            raise RequestConflict(
                f"request {known.request_id.hex()} has ended, and its reader has read it: "
                "take another id"
            )
    elif not replay(state, known, seq, now):
        fail_gone_rows(state, known, seq, now)


def _admit(state: State, client: Client, event: ClientMessage, now: float) -> None:
    header, frames = event.header, event.frames
    settings, requests = state.settings, state.requests
    if len(frames) > MAX_CLIENT_FRAMES:
        raise ProtocolError(
            f"{header.kind} of {len(frames)} frames; at most {MAX_CLIENT_FRAMES} are allowed"
        )
    if len(requests.live) >= settings.max_live:
        raise Overloaded(
            f"{len(requests.live)} requests are live, the broker's limit (max_live): try later"
        )
    if requests.prompt_bytes > MAX_PROMPT_BYTES:
        raise Overloaded(
            f"prompts of live requests take {requests.prompt_bytes} bytes, above the broker's "
            f"limit of {MAX_PROMPT_BYTES}: try later"
        )
    model = _model_of(state, header.kind, frames)
    wanted_s = (
        settings.default_deadline_s if header.budget_ms == NO_BUDGET else header.budget_ms / 1000
    ) - event.waited_s
    if wanted_s <= 0:
        raise DeadlineExceeded("the request had no time left when it came to the broker")
    request = Request(
        request_id=RequestId(header.request_id),
        client_id=client.client_id,
        kind=header.kind,
        frames=frames[1:],
        model=model,
        admitted_at=now,
        deadline=now + min(wanted_s, settings.max_deadline_s),
        stamps=header.stamps,
        stream=Stream(requests.output, acked_seq=header.seq),
        prompt_bytes=sum(map(len, frames)),
        admitted_unix_s=event.unix_s,
    )
    requests.admit(request)
    client.requests[request.request_id] = None
    state.count("requests_admitted")
    state.timers.set((Timer.DEADLINE, request.request_id), request.deadline)
    _watch_silence(state, client)
    place(state, request, now)


def _model_of(state: State, kind: str, frames: list[bytes]) -> str:
    """The model that the request is for; raises unless some worker can take it."""
    try:
        choice = _MODEL_CHOICE.decode(_body(frames)).model
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"no {kind}: {error}") from None
    models = state.workers.models()
    if not models:
        raise NoWorker(
            f"{len(state.workers)} workers are alive, none of role both or decode: "
            "start one (llmrt worker --role both)"
        )
    if choice is None and len(models) == 1:
        return models[0]
    if choice in models:
        return choice
    served = ", ".join(models)
    if choice is None:
        raise InvalidRequest(f"model is missing, and several are served: name one of {served}")
    raise ModelNotFound(f"model {choice!r} is not served here: name one of {served}")


def _cancel(state: State, client: Client, request_id: RequestId, now: float) -> None:
    request = state.requests.live.get(request_id)
    if request is not None:
        if request.client_id == client.client_id:
            error = RequestCancelled("cancelled by its client")
            fail(state, request, error, now, outcome="cancelled")
    elif request_id and request_id not in state.requests.ended:
        # It may have overtaken its request, which shall not start then.
        error = RequestCancelled("cancelled by its client before it came")
        terminal = failure_frames(error, request_id)
        stream = Stream(state.requests.output)
        state.requests.ended[request_id] = Ended(request_id, client.client_id, stream, terminal)
        client.requests[request_id] = None
        keep_ended(state, request_id, now + ENDED_KEPT_S)


def _acknowledge(state: State, client: Client, request_id: RequestId, seq: int, now: float) -> None:
    known = state.requests.live.get(request_id) or state.requests.ended.get(request_id)
    if known is None or known.client_id != client.client_id:
        # The end was acknowledged late, after it was forgotten.
        return
    known.stream.acknowledge(seq)
    if isinstance(known, Request) and known.stream.is_behind:
        send_rows(state, client.client_id, flush(state, known, now))


def _body(frames: list[bytes]) -> bytes:
    if len(frames) < 2:
        raise ProtocolError("a body is expected behind the header")
    return frames[1]
