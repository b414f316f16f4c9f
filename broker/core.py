"""The broker's machine: soft state only, rebuilt from what workers and clients say.

A request:

    generate ──admitted──> owned ──finished, failed, cancelled, deadline──> ended ──30 s──> gone
                            │  ^
                owner lost  v  │  a worker comes
                          homeless ──no worker in time, deadline──> ended

A worker: registered until `bye`, the end of its process, or `dead_after_beats` of silence.
A client: known until it is idle for long; silent with live requests, it is orphaned, and its
requests are cancelled after `resume_window_s`; at once if its process has ended.

Rules that are hard to see in the code:

- A row or an end from a worker passes only if it names the current attempt, comes from that
  attempt's owner, and its sequence number is the next. So no token is lost or repeated, whatever
  an earlier owner still sends.
- Every request has a deadline from its admission on, and its timer is dropped at its end only.
  So nothing hangs.
- A message to a living worker may be lost: heartbeats name what the worker holds, and what both
  sides do not agree on after two beats was lost.
- A broker that has just started may follow one that died, or its workers may still load: for two
  beats, or for longer by its settings, requests wait for a first worker instead of being refused.
- Liveness is measured by this machine's ticks. If a tick comes late, the broker itself did not
  run, and the peers are given that time.
"""

from typing import assert_never

import msgspec

from llmrt.broker.client_side import (
    MAX_PROMPT_BYTES,
    cancel_all,
    check_client,
    forget_client,
    on_client_message,
)
from llmrt.broker.delivery import fail, forget_ended
from llmrt.broker.dispatch import give_up_homeless
from llmrt.broker.effects import Effect
from llmrt.broker.events import (
    ClientGarbage,
    ClientMessage,
    ClientUnroutable,
    Event,
    ProcessDied,
    Tick,
    WorkerGarbage,
    WorkerMessage,
    WorkerUnroutable,
)
from llmrt.broker.placement import POLICIES
from llmrt.broker.settings import BrokerSettings
from llmrt.broker.state import State, Timer, TimerKey, failure_frames
from llmrt.broker.worker_side import (
    check_worker,
    on_unsent,
    on_worker_message,
    remove_worker,
)
from llmrt.wire.envelope import decode_header
from llmrt.wire.errors import ConfigError, DeadlineExceeded, ProtocolError, SlowConsumer
from llmrt.wire.ids import ClientId, RequestId
from llmrt.wire.messages import GENERATE, TOKENIZE, ProcessName

# A worker notices a new broker by the answer to its next beat, and registers at once.
SETTLE_BEATS = 2.0
MAX_EARLY = 1024


def _check(settings: BrokerSettings) -> None:
    """Raise `ConfigError` for a number that cannot be meant."""
    for name in ("beat_s", "dead_after_beats", "default_deadline_s", "max_deadline_s"):
        value = getattr(settings, name)
        if not 0 < value < 1e9:
            raise ConfigError(f"{name} is {value!r}: a number above 0 is needed")
    for name in ("max_live", "max_attempts"):
        value = getattr(settings, name)
        if value < 1:
            raise ConfigError(f"{name} is {value!r}: at least 1 is needed")
    for name in ("resume_window_s", "startup_window_s"):
        value = getattr(settings, name)
        if not 0 <= value < 1e9:
            raise ConfigError(f"{name} is {value!r}: 0 or more is needed")
    if settings.bind == settings.worker_bind and not settings.bind.endswith((":*", ":0")):
        raise ConfigError(
            f"bind and worker_bind are both {settings.bind}: clients and workers need two endpoints"
        )


class BrokerCore:
    """`epoch` is new at every start, and higher than before: nanoseconds since 1970, say."""

    def __init__(self, settings: BrokerSettings, epoch: int) -> None:
        for name in ("prefill_policy", "decode_policy"):
            policy = getattr(settings, name)
            if policy not in POLICIES:
                raise ConfigError(f"{name} is {policy!r}: one of {', '.join(POLICIES)} is expected")
        _check(settings)
        self._state = State(settings, epoch)

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._state.counters)

    def handle(self, event: Event, now: float) -> list[Effect]:
        state = self._state
        if state.started_at is None:
            state.started_at = now
        self._take(event, now)
        if state.early and (now >= self._settled_at or state.workers.models()):
            early, state.early = state.early, {}
            for came_at, message in early.values():
                waited_s = message.waited_s + now - came_at
                self._take(msgspec.structs.replace(message, waited_s=waited_s), now)
        effects, state.effects = state.effects, []
        return effects

    def next_deadline(self) -> float | None:
        return self._state.timers.next()

    def _take(self, event: Event, now: float) -> None:
        state = self._state
        match event:
            # Captures in the patterns of the frequent two would take a microsecond each.
            case WorkerMessage():
                try:
                    on_worker_message(state, event, now)
                except ProtocolError as error:
                    self._reject_worker(event.routing_id, error, event.header.request_id)
            case ClientMessage() if self._is_early(event.header.kind, now):
                # A repeat finds the first one there.
                key = (event.client_id, event.header.request_id)
                state.early.setdefault(key, (now, event))
                state.timers.set_no_later((Timer.SETTLED, b""), self._settled_at)
            case ClientMessage():
                try:
                    on_client_message(state, event, now)
                except ProtocolError as error:
                    self._reject(event.client_id, error, event.header.request_id)
            case ClientGarbage(client_id, code, text):
                self._reject(client_id, ProtocolError(text, code=code))
            case WorkerGarbage(routing_id, code, text):
                self._reject_worker(routing_id, ProtocolError(text, code=code))
            case ClientUnroutable(client_id):
                state.count("messages_unsent")
                client = state.clients.get(client_id)
                if client is not None:
                    client.is_reachable = False
            case WorkerUnroutable(routing_id, frames):
                state.count("messages_unsent")
                worker = state.workers.at(routing_id)
                if worker is not None:
                    on_unsent(state, worker, decode_header(frames[0]), now)
            case ProcessDied(process):
                self._bury(process, now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)

    def check(self) -> None:
        state = self._state
        state.workers.check()
        state.requests.check()
        owned = {request_id for worker in state.workers for request_id in worker.requests}
        live, ended = state.requests.live, state.requests.ended
        assert owned | state.requests.homeless.keys() == live.keys()
        for request in live.values():
            assert request.owner is None or state.workers.is_alive(request.owner)
            assert request.owner or request.prompt_worker is None
            assert (Timer.DEADLINE, request.request_id) in state.timers
            assert request.owner or (Timer.HOMELESS, request.request_id) in state.timers
        for worker in state.workers:
            pending = [r.num_pending for r in live.values() if r.prompt_worker is worker]
            assert worker.num_pending_tokens == sum(pending)
        assert all((Timer.ENDED, request_id) in state.timers for request_id in ended)
        assert all((Timer.WORKER, worker.routing_id) in state.timers for worker in state.workers)
        assert {i for client in state.clients for i in client.requests} == {*live, *ended}
        count = state.counters
        assert count["requests_admitted"] == len(live) + sum(
            count[f"requests_{outcome}"]
            for outcome in ("finished", "failed", "cancelled", "expired")
        )
        assert not state.effects

    @property
    def _settled_at(self) -> float:
        """When the workers that outlived an earlier broker have surely registered."""
        started_at = self._state.started_at
        assert started_at is not None
        settings = self._state.settings
        return started_at + max(SETTLE_BEATS * settings.beat_s, settings.startup_window_s)

    def _is_early(self, kind: str, now: float) -> bool:
        """Whether a request came before the workers could: it waits for them, not for long."""
        return (
            not self._state.workers.models()
            and kind in (GENERATE, TOKENIZE)
            and now < self._settled_at
            and self._has_room_early()
        )

    def _has_room_early(self) -> bool:
        early = self._state.early
        sizes = (len(frame) for _, message in early.values() for frame in message.frames)
        return len(early) < MAX_EARLY and sum(sizes) < MAX_PROMPT_BYTES

    def _reject(self, client_id: ClientId, error: ProtocolError, request_id: bytes = b"") -> None:
        self._state.complain(client_id, error.error_code, error.message)
        self._state.to_client(client_id, failure_frames(error, request_id))

    def _reject_worker(
        self, routing_id: bytes, error: ProtocolError, request_id: bytes = b""
    ) -> None:
        self._state.complain(routing_id, error.error_code, error.message)
        self._state.to_worker(routing_id, failure_frames(error, request_id))

    def _bury(self, process: ProcessName, now: float) -> None:
        """A process has ended, and with it its workers and sessions."""
        state = self._state
        for worker in list(state.workers):
            if worker.card.process == process:
                remove_worker(state, worker, now, cause="killed")
        for client in list(state.clients):
            if client.process == process:
                client.is_reachable = False
                cancel_all(state, client, now, why="the process of its client has ended")
                forget_client(state, client)

    def _tick(self, now: float) -> None:
        state = self._state
        due = state.timers.next()
        if due is not None and now - due > state.settings.beat_s:
            self._excuse_silence(now - due, now)
        for key in state.timers.pop_due(now):
            self._ring(key, now)

    def _excuse_silence(self, stalled_s: float, now: float) -> None:
        state = self._state
        state.count("stalls")
        state.log("broker.stalled", "warning", duration_ms=round(stalled_s * 1000, 3))
        # One beat more is for reading what has come meanwhile: timers ring ahead of messages.
        excused_s = stalled_s + state.settings.beat_s
        for worker in state.workers:
            worker.heard_at = min(now, worker.heard_at + excused_s)
        for client in state.clients:
            client.heard_at = min(now, client.heard_at + excused_s)

    def _ring(self, key: TimerKey, now: float) -> None:
        """A timer rings. What it is for may have gone with a timer that rang just before."""
        state, (timer, name) = self._state, key
        live = state.requests.live.get(RequestId(name))
        match timer:
            case Timer.WORKER:
                worker = state.workers.at(name)
                if worker is not None:
                    check_worker(state, worker, now)
            case Timer.SETTLED:
                pass  # what waited is taken up after any event
            case Timer.CLIENT:
                client = state.clients.get(ClientId(name))
                if client is not None:
                    check_client(state, client, now)
            case Timer.ENDED:
                ended = state.requests.ended.get(RequestId(name))
                if ended is not None:
                    forget_ended(state, ended)
            case Timer.DEADLINE:
                if live is not None:
                    spent_s = now - live.admitted_at
                    error = DeadlineExceeded(
                        f"the request was not finished within its {spent_s:.3f} s: "
                        f"{live.stream.next_seq} tokens were passed on (stage {live.stage})"
                    )
                    fail(state, live, error, now, outcome="expired")
            case Timer.HOMELESS:
                if live is not None and live.owner is None:
                    give_up_homeless(state, live, now)
            case Timer.READER:
                if live is not None and live.stream.is_behind:
                    fail(
                        state,
                        live,
                        SlowConsumer(
                            "the reader did not acknowledge tokens for too long: read faster"
                        ),
                        now,
                    )
            case _:
                assert_never(timer)
