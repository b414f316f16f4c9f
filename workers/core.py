"""The machine of a worker: joins its requests, its offers, its links and its scheduler. Pure.

After every event the machine looks whether prompts can be offered and whether a step can start.
One step runs at a time, in the shell; when it has begun, the one behind it is made ahead if that is
possible, and the shell starts it as soon as the first returns. Of a step that returns, only what
the next one depends on is decided at once: which requests go on. What it gave is delivered by the
next event, whatever that is: `StepTaken`, as a rule, while the device computes the next step; a
cancel, a deadline or a heartbeat that comes before it finds everything delivered. Messages go out
in this order: to peers (a hand-over waits for them), the next step, then to the broker.

    starting    REGISTER every beat until REGISTERED
    registered  HEARTBEAT every beat; UNKNOWN_WORKER (a new broker) -> starting
    stopping    BYE was sent

A broker that answers FAILED is the wrong one, or takes no worker like this: the worker ends. One
that answers no beat is waited for, with a warning now and then.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, assert_never

import msgspec

from llmrt.engine.batch import Vocabulary
from llmrt.engine.scheduler import Scheduler
from llmrt.wire import messages as m
from llmrt.wire.envelope import Header, decode_body, frame_at
from llmrt.wire.errors import InternalError, ProtocolError, VersionMismatch
from llmrt.wire.ids import RequestId, WorkerName
from llmrt.workers import events as ev
from llmrt.workers.context import CoreSettings, WorkerContext
from llmrt.workers.effects import Effect, Exit, Ready, RunStep
from llmrt.workers.links import PeerLinks
from llmrt.workers.offered import OfferedPrefills
from llmrt.workers.owned import OwnedRequests
from llmrt.workers.step_clock import StepClock

T = TypeVar("T", bound=msgspec.Struct)
M = TypeVar("M", ev.FromBroker, ev.FromPeer)

# A restarted broker is back sooner.
SILENT_BEATS = 5
SILENT_AGAIN_BEATS = 30


class WorkerCore:
    """`handle(event, now)` gives the effects; see `llmrt.actor.machine`."""

    def __init__(
        self, settings: CoreSettings, scheduler: Scheduler, vocabulary: Vocabulary
    ) -> None:
        self._context = WorkerContext(settings, scheduler, vocabulary)
        self._links = PeerLinks(self._context)
        self._offered = OfferedPrefills(self._context, self._links)
        self._owned = OwnedRequests(self._context, self._links)
        self._clock = StepClock()
        self._state = "starting"
        self._next_beat = 0.0
        self._broker_epoch = 0
        self._unanswered_beats = 0
        self._num_bad_seals = 0
        self._block_bytes = settings.contract.block_bytes
        self._from_broker = self._broker_handlers()
        self._from_peer = self._peer_handlers()

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._context.counters)

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        context = self._context
        context.now, context.effects = now, []
        self._owned.deliver()
        self._take(event)
        if self._links.has_news and self._state == "registered":
            self._send_heartbeat()  # whoever waits for the links need not wait for the beat
        self._owned.place()
        self._start_step(has_time=isinstance(event, ev.StepTaken))
        if context.scheduler.step is None:
            self._owned.deliver()
        self._owned.flush()
        if context.ledger.num_bad_seals > self._num_bad_seals:
            num_blocks = context.ledger.num_bad_seals - self._num_bad_seals
            self._num_bad_seals += num_blocks
            context.log("kv.seal_broken", "error", num_blocks=num_blocks)
        effects, context.effects = context.effects, []
        return effects

    def next_deadline(self) -> float | None:
        if self._state == "stopping":
            return None
        request_deadline = self._owned.next_deadline()
        return (
            self._next_beat if request_deadline is None else min(self._next_beat, request_deadline)
        )

    def check(self) -> None:
        scheduler = self._context.scheduler
        scheduler.check()
        scheduler.ledger.check()
        self._owned.check()
        self._offered.check()
        if not (len(self._owned) or len(self._offered) or len(self._owned.grants)):
            assert scheduler.step is not None or not (scheduler.waiting or scheduler.running)

    # -- events ------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Tick():
                self._tick()
            case ev.FromBroker():
                self._unanswered_beats = 0
                self._message(self._from_broker, event)
            case ev.BrokerMismatch(message):
                self._exit(VersionMismatch.code, message)
            case ev.FromPeer():
                self._message(self._from_peer, event)
            case ev.Tokenized(request_id, attempt, token_ids, failure):
                self._owned.tokenized(request_id, attempt, token_ids, failure)
            case ev.StepTaken():
                pass  # what it gives time for, every event does first
            case ev.StepDone():
                self._step_done(event)
            case ev.PeerConnected(peer, bulk):
                self._links.connected(peer, bulk)
            case ev.ArenaAttached(owner, arena):
                self._links.arena_attached(owner, arena)
            case ev.ArenaRefused(owner, reason):
                self._links.arena_refused(owner, reason)
            case ev.ArenaLost(owner):
                # An owner hangs up at its end only.
                self._peer_died(owner)
            case ev.ArenaMapped(reader):
                self._links.mapped(reader)
            case ev.MapperDied(reader):
                self._peer_died(reader)
            case ev.PeerUnreachable(peer):
                self._context.counters["peer_unreachable"] += 1
                self._context.log("peer.unreachable", "debug", peer=peer.worker_id)
            case ev.BlocksRead(read_id, failure):
                self._owned.grants.blocks_read(read_id, failure)
            case ev.LinkProbed():
                self._links.probed(event)
            case ev.BlocksHashed(hash_id, checksums):
                if not self._offered.hashed(hash_id, checksums):
                    self._owned.grants.blocks_hashed(hash_id, checksums)
            case ev.StopWanted():
                self._state = "stopping"
                self._owned.stopping()
                self._owned.flush()
                self._context.send_broker(m.BYE)
            case _:
                assert_never(event)

    def _message(self, handlers: Mapping[str, Callable[[M], None]], message: M) -> None:
        """Hand a message to its handler. A bad or unknown one is counted, and nothing else."""
        kind = message.header.kind
        handler = handlers.get(kind)
        if handler is None:
            self._context.counters["unknown_messages"] += 1
            return
        try:
            handler(message)
        except ProtocolError as error:
            self._context.counters["bad_messages"] += 1
            self._context.log("message.refused", "warning", kind=kind, error=str(error))

    def _tick(self) -> None:
        self._owned.tick()
        if self._context.now < self._next_beat:
            return
        self._next_beat = self._context.now + self._context.settings.beat_s
        if self._state == "registered":
            self._send_heartbeat()
        elif self._state == "starting":
            self._register()
        self._watch_broker()
        self._offered.beat()
        self._owned.grants.beat()
        self._links.beat()
        for name in self._links.long_gone():
            if not self._owned.grants.uses(name) and not self._offered.uses(name):
                self._links.forget(name)

    def _watch_broker(self) -> None:
        """By beats and not by the clock: a process that was stopped has heard nobody either."""
        silent_beats, self._unanswered_beats = self._unanswered_beats, self._unanswered_beats + 1
        if silent_beats % SILENT_AGAIN_BEATS == SILENT_BEATS:
            settings = self._context.settings
            self._context.log(
                "broker.not_heard",
                "warning",
                broker=settings.broker,
                silent_s=silent_beats * settings.beat_s,
                remedy="start llmrt broker there, or give --broker its endpoint for workers",
            )

    def _send_heartbeat(self) -> None:
        self._links.has_news = False
        # A newer one follows with the next beat: none need pile up for a broker that is away.
        heartbeat = m.Heartbeat(load=self._load(), holding=self._holding())
        self._context.send_broker(m.HEARTBEAT, heartbeat, is_skippable=True)

    def _start_step(self, *, has_time: bool) -> None:
        """The next step if none runs; if there is time for it, the one behind the running one."""
        scheduler = self._context.scheduler
        batch = scheduler.schedule()
        if batch is None and has_time:
            batch = scheduler.schedule_ahead()
        if scheduler.step is None:
            self._clock.paused()
        if batch is not None:
            sequence_ids = [row.sequence_id for row in batch.rows]
            self._owned.step_started(sequence_ids)
            self._offered.step_started(sequence_ids)
            self._context.do(RunStep(batch, self._offered.rights(sequence_ids)))

    def _step_done(self, event: ev.StepDone) -> None:
        scheduler = self._context.scheduler
        if event.result is None:
            assert event.failure is not None
            self._clock.paused()
            self._context.log("engine.step_failed", "error", error=event.failure.message)
            sequences = scheduler.abandon_step()
            others = self._offered.step_failed(sequences, event.failure.message)
            error = InternalError(f"a step failed: {event.failure.message}")
            self._owned.step_failed(others, error)
            return
        assert scheduler.step is not None
        self._clock.returned(event.returned_at, event.result.computed_s)
        self._context.costs.step_took(scheduler.step.rows, event.result.computed_s)
        sequence_ids = [row.sequence_id for row in scheduler.step.rows]
        drawn = scheduler.complete(event.result)
        self._offered.step_done(sequence_ids)
        for sequence, token in drawn:
            if sequence.is_removed:
                continue  # withdrawn while the step ran, or ended by another token of this step
            if token.error is not None:
                others = self._offered.step_failed([sequence], token.error.message)
                self._owned.step_failed(others, token.error)
            elif not self._offered.drawn(sequence, token, event.returned_at):
                self._owned.drawn(sequence, token, event.returned_at)

    def _peer_died(self, name: WorkerName) -> None:
        num_blocks = self._owned.grants.peer_died(name)
        self._context.log(
            "peer.died",
            "warning",
            peer=name.worker_id,
            peer_epoch=name.epoch,
            num_blocks=num_blocks,
        )
        self._offered.owner_lost(name)
        self._links.forget(name)
        self._context.costs.forget(name)

    # -- messages of the broker --------------------------------------------------------------

    def _broker_handlers(self) -> "dict[str, Callable[[ev.FromBroker], None]]":
        return {
            m.REGISTERED: self._registered,
            m.REFUSED: self._refused,
            m.FAILED: self._failed,
            m.UNKNOWN_WORKER: self._unknown_worker,
            m.BEAT: lambda message: None,
            m.PEERS: self._peers,
            m.DISPATCH: self._dispatched,
            m.CANCEL: lambda message: self._owned.cancelled(
                RequestId(message.header.request_id), message.header.attempt
            ),
        }

    def _registered(self, message: ev.FromBroker) -> None:
        registered = decode_body(frame_at(message.frames, 0), m.Registered)
        if self._state == "stopping":
            return
        if not self._broker_epoch:
            self._context.do(Ready())
        self._state = "registered"
        self._broker_epoch = registered.broker_epoch
        self._context.log("worker.registered", broker_epoch=registered.broker_epoch)

    def _refused(self, message: ev.FromBroker) -> None:
        failure = decode_body(frame_at(message.frames, 0), m.Failure)
        self._context.do(Exit(failure.code, failure.message))

    def _failed(self, message: ev.FromBroker) -> None:
        failure = decode_body(frame_at(message.frames, 0), m.Failure)
        if self._state == "registered" and failure.code == ProtocolError.code:
            raise ProtocolError(f"the broker could not read a message: {failure.message}")
        self._exit(failure.code, failure.message)

    def _exit(self, code: str, message: str) -> None:
        self._context.do(Exit(code, f"{self._context.settings.broker}: {message}"))

    def _unknown_worker(self, message: ev.FromBroker) -> None:
        """The broker is a new one, or has given us up: say again who we are and what we hold."""
        if self._state != "stopping":
            self._state = "starting"
            self._register()

    def _peers(self, message: ev.FromBroker) -> None:
        peers = decode_body(frame_at(message.frames, 0), m.Peers)
        for name in self._links.listed(peers.peers):
            self._context.log("peer.delisted", peer=name.worker_id, peer_epoch=name.epoch)
            self._owned.grants.peer_delisted(name)

    def _dispatched(self, message: ev.FromBroker) -> None:
        header, frames = message.header, message.frames
        route = decode_body(frame_at(frames, 0), m.Route)
        body: m.Generate | m.Tokenize
        try:
            if route.kind == m.TOKENIZE:
                body = decode_body(frame_at(frames, 1), m.Tokenize)
            else:
                body = decode_body(frame_at(frames, 1), m.Generate)
        except ProtocolError as error:
            # The client's fault, whose body nobody has read yet; other workers cannot either.
            self._context.counters["bad_messages"] += 1
            self._owned.refuse(header, error)
            return
        deadline = self._context.deadline_of(header, message.waited_s)
        self._owned.dispatched(header, route, body, frames[2:], deadline=deadline)

    # -- messages of peers -------------------------------------------------------------------

    def _peer_handlers(self) -> "dict[str, Callable[[ev.FromPeer], None]]":
        grants, offered = self._owned.grants, self._offered

        def with_body(
            kind: type[T], then: Callable[[WorkerName, Header, T], None]
        ) -> "Callable[[ev.FromPeer], None]":
            return lambda message: then(
                message.sender, message.header, decode_body(frame_at(message.frames, 0), kind)
            )

        return {
            m.PEER_HELLO: with_body(m.PeerHello, lambda s, h, b: self._links.greeted(s, b)),
            m.MAP_FAILED: with_body(
                m.Failure, lambda s, h, b: self._links.map_failed(s, b.message)
            ),
            m.LINKED: with_body(m.Linked, lambda s, h, b: self._links.told(s, b)),
            m.OFFER: self._offer,
            m.WITHDRAW: with_body(m.GrantRef, lambda s, h, b: offered.withdrawn(s, h, b.grant_id)),
            m.COMMITTED: with_body(m.GrantRef, lambda s, h, b: offered.committed(s, b.grant_id)),
            m.LEASE_CONFIRM: with_body(m.LeaseRef, offered.lease_confirm),
            m.LEASE_RENEW: with_body(m.LeaseRef, lambda s, h, b: offered.lease_renew(s, b)),
            m.LEASE_RELEASE: with_body(m.LeaseRef, lambda s, h, b: offered.lease_release(s, b)),
            m.OFFER_HELD: with_body(m.OfferHeld, lambda s, h, b: grants.held(s, b)),
            m.STOPPED: with_body(
                m.Stopped, lambda s, h, b: grants.stopped(s, b.grant_id, b.reason)
            ),
            m.COMMIT: lambda message: grants.committed(
                message.sender,
                decode_body(frame_at(message.frames, 0), m.Commit),
                b"".join(message.frames[1:2]),
            ),
            m.CHUNK: lambda message: grants.chunk(
                message.sender,
                decode_body(frame_at(message.frames, 0), m.Chunk),
                frame_at(message.frames, 1),
                b"".join(message.frames[2:3]),
            ),
            m.LEASE_CONFIRMED: with_body(
                m.LeaseState, lambda s, h, b: grants.lease_confirmed(s, b)
            ),
        }

    def _offer(self, message: ev.FromPeer) -> None:
        frames = message.frames
        self._offered.offered(
            message.sender,
            message.header,
            decode_body(frame_at(frames, 0), m.Offer),
            frame_at(frames, 1),
            frame_at(frames, 2),
            deadline=self._context.deadline_of(message.header, message.waited_s),
        )

    # -- what the broker is told -------------------------------------------------------------

    def _register(self) -> None:
        settings = self._context.settings
        register = m.Register(
            worker_id=settings.name.worker_id,
            epoch=settings.name.epoch,
            role=settings.role,
            model=settings.model,
            contract=settings.contract,
            max_context=settings.max_context,
            num_blocks=settings.num_blocks,
            max_running=self._context.scheduler.settings.max_running,
            link=settings.link,
            broker_epoch_seen=self._broker_epoch,
            process=settings.process,
            holding=self._holding(),
        )
        self._context.send_broker(m.REGISTER, register, is_skippable=True)

    def _holding(self) -> tuple[m.Held, ...]:
        return (*self._owned.holding(), *self._offered.holding())

    def _load(self) -> m.Load:
        scheduler, ledger = self._context.scheduler, self._context.ledger
        waiting_since = min(
            (s.order for s in scheduler.waiting.values()), default=self._context.now
        )
        return m.Load(
            num_running=len(scheduler.running) + len(scheduler.parked),
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=sum(s.num_pending for s in scheduler.waiting.values()),
            oldest_waiting_s=self._context.now - waiting_since,
            num_blocks=ledger.num_blocks,
            num_free_blocks=ledger.num_free,
            num_cached_blocks=ledger.num_cached,
            num_quarantined_blocks=ledger.num_quarantined,
            num_steps=scheduler.num_steps,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_drafted=scheduler.drafting.num_drafted,
            num_accepted=scheduler.drafting.num_accepted,
            kv_bytes_read=self._owned.grants.num_blocks_read * self._block_bytes,
            num_checksum_mismatches=self._context.counters["checksum_mismatches"],
            num_handed_over=self._offered.num_handed_over,
            handover_s=self._offered.handover_s,
            num_fenced=self._context.counters["writers_fenced"],
            num_seal_mismatches=ledger.num_bad_seals,
            steps_s=self._clock.steps_s,
            python_s=self._clock.python_s,
            links=self._links.transports(),
            refusals=self._links.refusals(),
            link_rows=self._links.rows(),
        )
