"""Simulated processes: the real machines, each with a shell of a few lines over the `World`."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmrt.broker import effects as broker_do
from llmrt.broker import events as broker_ev
from llmrt.broker.core import BrokerCore
from llmrt.broker.settings import BrokerSettings
from llmrt.client import events as client_ev
from llmrt.client.core import ClientCore
from llmrt.client.session import decode_message
from llmrt.engine.batch import LOCAL_ARENA, Batch, StepResult, fill
from llmrt.engine.rights import check_rights
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.kvtransfer.ledger import Ledger
from llmrt.simulation.content import CONTRACT, VOCAB_SIZE, SimArena, SimDevice, SimVocabulary
from llmrt.simulation.world import World
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_header
from llmrt.wire.ids import ClientId, LeaseId, RequestId, WorkerId, WorkerName
from llmrt.workers import effects as do
from llmrt.workers import events as ev
from llmrt.workers.context import CoreSettings
from llmrt.workers.core import WorkerCore
from llmrt.workers.offered import arena_of

BROKER = "broker"
# A supervisor starts again what was killed.
RESTART_S = 1.0


class Surroundings(Protocol):
    """What a process needs of the cluster that it runs in."""

    world: World
    checks: bool
    max_context: int
    broker: "SimBroker"
    clients: "dict[ClientId, SimClient]"

    def new_pid(self) -> int: ...

    def kill(self, process: "Process") -> None: ...

    def restart(self, worker: "SimWorker", after_s: float) -> None: ...

    def life_of(self, name: WorkerName) -> "SimWorker | None": ...

    def worker_by_routing(self, routing_id: bytes) -> "SimWorker | None": ...

    def report_if_dead(
        self, process: m.ProcessName, tell: Callable[[m.ProcessName], None]
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Process(ABC):
    """One life of a machine. After `kill` nothing reaches it and nothing leaves it.

    While it is stalled (SIGSTOP, or a host that swaps) everything waits, in order.
    """

    cluster: Surroundings
    name: str
    machine: Any
    tick: Any
    pid: int
    is_alive: bool = True
    stalled_until: float = 0.0
    _timer: float | None = None

    @property
    def process_name(self) -> m.ProcessName:
        return m.ProcessName(boot_id="sim", pid_namespace="sim", pid=self.pid, start_ticks=0)

    def handle(self, event: object) -> None:
        if not self.is_alive or self.waits_to(lambda: self.handle(event)):
            return
        world = self.cluster.world
        for effect in self.machine.handle(event, world.now):
            self.perform(effect)
        if self.cluster.checks:
            self.machine.check()
        self._arm()

    def stall(self, seconds: float) -> None:
        self.stalled_until = max(self.stalled_until, self.cluster.world.now + seconds)
        self.cluster.world.record("stalled", self.name, seconds)

    def waits_to(self, action: Callable[[], None]) -> bool:
        """True if the process is stalled: it will do this when it goes on."""
        is_stalled = self.cluster.world.now < self.stalled_until
        if is_stalled:
            self.cluster.world.at(self.stalled_until, action)
        return is_stalled

    @abstractmethod
    def perform(self, effect: Any) -> None:
        """Carry out one effect of the machine."""

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.cluster.world.at(deadline, lambda: self._ring(deadline))

    def _ring(self, due: float) -> None:
        if self._timer != due or self.waits_to(lambda: self._ring(due)):
            return
        self._timer = None
        deadline = self.machine.next_deadline() if self.is_alive else None
        if deadline is None:
            return
        if deadline <= self.cluster.world.now:
            self.handle(self.tick)
        else:
            self._arm()


class SimBroker(Process):
    """The broker: one life per epoch."""

    def __init__(self, cluster: Surroundings, settings: BrokerSettings, epoch: int) -> None:
        core = BrokerCore(settings, epoch)
        super().__init__(cluster, BROKER, core, broker_ev.Tick(), cluster.new_pid())
        self._watched: set[int] = set()

    def perform(self, effect: broker_do.Effect) -> None:
        cluster = self.cluster
        match effect:
            case broker_do.SendClient(client_id, frames):
                client = cluster.clients.get(client_id)
                if client is None or not client.is_alive:
                    event = broker_ev.ClientUnroutable(client_id, frames)
                    cluster.world.after(0, lambda: self.handle(event))
                else:
                    cluster.world.send(BROKER, client.name, lambda: client.received(frames))
            case broker_do.SendWorker(routing_id, frames):
                worker = cluster.worker_by_routing(routing_id)
                if worker is None:
                    gone = broker_ev.WorkerUnroutable(routing_id, frames)
                    cluster.world.after(0, lambda: self.handle(gone))
                else:
                    cluster.world.send(BROKER, worker.name, lambda: worker.from_broker(frames))
            case broker_do.WatchProcess(process):
                self._watched.add(process.pid)
                cluster.report_if_dead(process, self.process_died)
            case broker_do.UnwatchProcess(process):
                self._watched.discard(process.pid)
            case broker_do.Log(event_name, _, fields):
                cluster.world.record("broker", event_name, sorted(fields))

    def process_died(self, process: m.ProcessName) -> None:
        if process.pid in self._watched:
            self._watched.discard(process.pid)
            self.handle(broker_ev.ProcessDied(process))

    def from_client(self, client_id: ClientId, frames: list[bytes]) -> None:
        self.handle(broker_ev.ClientMessage(client_id, decode_header(frames[0]), frames))

    def from_worker(self, routing_id: bytes, frames: list[bytes]) -> None:
        self.handle(broker_ev.WorkerMessage(routing_id, decode_header(frames[0]), frames))


class SimWorker(Process):
    """One life of a worker: the real core, scheduler and ledger over an arena with content."""

    def __init__(
        self,
        cluster: Surroundings,
        name: WorkerName,
        role: str,
        *,
        transfer: str,
        placement: str,
        checksums: str,
        num_blocks: int,
        stream_interval_s: float,
        num_drafts: int,
    ) -> None:
        pid = cluster.new_pid()
        self.worker = name
        self.role = role
        self.routing_id = name.routing_id
        self.ledger = Ledger(num_blocks)
        self.arena = SimArena(name.full_name, 1, self.ledger)
        self.device = SimDevice(self.arena.name)
        self.device.arenas[LOCAL_ARENA] = self.arena
        self.scheduler = Scheduler(
            self.ledger,
            SchedulerSettings(
                max_running=8, step_tokens=128, chunk_tokens=64, num_drafts=num_drafts
            ),
        )
        settings = CoreSettings(
            name=name,
            role=role,
            model="sim",
            contract=CONTRACT,
            process=m.ProcessName(boot_id="sim", pid_namespace="sim", pid=pid, start_ticks=0),
            vocab_size=VOCAB_SIZE,
            max_context=cluster.max_context,
            num_blocks=num_blocks,
            arena_generation=1,
            link=self.arena.name,
            arena_socket=self.arena.name,
            broker="sim",
            transfer=transfer,
            placement=placement,
            checksums=checksums,
            stream_interval_s=stream_interval_s,
        )
        core = WorkerCore(settings, self.scheduler, SimVocabulary())
        super().__init__(cluster, self.arena.name, core, ev.Tick(), pid)
        self.running: Batch | None = None
        self.next_step: Batch | None = None
        self.last_result: StepResult | None = None
        self.told_at = 0.0
        self.attached: set[WorkerName] = set()

    # -- what arrives ------------------------------------------------------------------------

    def from_broker(self, frames: list[bytes]) -> None:
        self.handle(ev.FromBroker(decode_header(frames[0]), tuple(frames[1:])))

    def from_peer(self, sender: WorkerName, frames: list[bytes]) -> None:
        self.handle(ev.FromPeer(sender, decode_header(frames[0]), tuple(frames[1:])))

    # -- what it does ------------------------------------------------------------------------

    def perform(self, effect: do.Effect) -> None:
        cluster, world = self.cluster, self.cluster.world
        match effect:
            case do.RunStep(batch, rights):
                check_rights(batch.rows, rights)
                if self.running is None:
                    self._run_step(batch)
                else:
                    assert batch.follows, "a step was started while one runs"
                    assert self.next_step is None, "two steps wait for one that runs"
                    self.next_step = batch
            case do.SendBroker(frames):
                broker = cluster.broker
                if broker.is_alive:
                    routing_id = self.routing_id
                    world.send(self.name, BROKER, lambda: broker.from_worker(routing_id, frames))
            case do.SendPeer(peer, frames):
                target = cluster.life_of(peer)
                if target is not None:
                    sender = self.worker
                    world.send(self.name, target.name, lambda: target.from_peer(sender, frames))
            case do.Tokenize(request_id, attempt, _, prompt):
                ids = array("I", (3 + byte for byte in prompt))
                answer = ev.Tokenized(request_id, attempt, ids)
                world.after(world.rng.uniform(0, 0.005), lambda: self.handle(answer))
            case do.AttachArena(owner):
                world.after(0.001, lambda: self._attach(owner))
            case do.FenceWriter(peer):
                writer = cluster.life_of(peer)
                if writer is not None:
                    cluster.kill(writer)
                    cluster.restart(writer, RESTART_S)
            case do.DetachArena(owner):
                self.attached.discard(owner)
                world.after(0.0, lambda: self._detach(owner))
            case do.ReadBlocks():
                world.after(world.rng.uniform(0, 0.01), lambda: self._read(effect))
            case do.HashBlocks():
                world.after(world.rng.uniform(0, 0.002), lambda: self._hash(effect))
            case do.Log(event_name, _, fields):
                world.record(self.name, event_name, sorted(fields))
            case do.Exit(code, message):
                world.record(self.name, "exit", code, message)
                cluster.kill(self)
            case do.ConnectPeer(peer):
                name = WorkerName(WorkerId(peer.worker_id), peer.epoch)
                connected = ev.PeerConnected(name, self.arena.name)
                world.after(0.001, lambda: self.handle(connected))
            case do.ForgetPeer() | do.Ready():
                pass

    def die_in_step(self, num_slots: int) -> None:
        """What the running step wrote before its process died."""
        if self.running is not None:
            self.device.run(self.running, num_slots=num_slots)

    def _run_step(self, batch: Batch) -> None:
        world = self.cluster.world
        if batch.follows:
            assert self.last_result is not None
            fill(batch, self.last_result)
        self.running = batch
        self._tell(ev.StepTaken())
        world.after(world.rng.uniform(*world.faults.step_s), lambda: self._step_done(batch))

    def _step_done(self, batch: Batch) -> None:
        if not self.is_alive or self.waits_to(lambda: self._step_done(batch)):
            return
        self.last_result = result = self.device.run(batch)
        self.running, next_step, self.next_step = None, self.next_step, None
        self._tell(ev.StepDone(result, self.cluster.world.now))
        if next_step is not None:
            self._run_step(next_step)

    def _tell(self, event: ev.StepTaken | ev.StepDone) -> None:
        """What the step thread says reaches the machine in order, and late now and then."""
        world = self.cluster.world
        late_s = world.rng.choice((0.0, 0.0, 0.0005, 0.02)) * world.rng.random()
        self.told_at = max(self.told_at + 1e-9, world.now + late_s)
        world.at(self.told_at, lambda: self.handle(event))

    def _attach(self, owner: WorkerName) -> None:
        target = self.cluster.life_of(owner)
        if target is None:
            self.handle(ev.ArenaRefused(owner, "gone"))
            return
        self.device.arenas[arena_of(owner)] = target.arena
        self.attached.add(owner)
        reader = self.worker
        self.cluster.world.after(0.001, lambda: target.handle(ev.ArenaMapped(reader)))
        arena = target.arena
        shape = ev.ArenaShape(len(arena.slots), CONTRACT.block_bytes, arena.generation)
        self.handle(ev.ArenaAttached(owner, shape))

    def _detach(self, owner: WorkerName) -> None:
        if self.running is not None:  # the step thread takes it after the running step
            self.cluster.world.after(0.001, lambda: self._detach(owner))
        else:
            self.device.arenas.pop(arena_of(owner), None)

    def _read(self, effect: do.ReadBlocks) -> None:
        if not self.is_alive:
            return
        owner = self.cluster.life_of(effect.owner)
        failure = None
        if owner is None or not owner.ledger.is_leased(LeaseId(effect.lease_id)):
            failure = m.Failure(code="transfer_failed", message="no such lease")
        else:
            for source, target in zip(effect.source, effect.target, strict=True):
                self.arena.copy_in(target, owner.arena.slots[source])
        self.handle(ev.BlocksRead(effect.read_id, failure))

    def _hash(self, effect: do.HashBlocks) -> None:
        owner = effect.owner
        arena = self.arena if owner is None else self.device.arenas.get(arena_of(owner))
        checksums = [] if arena is None else [arena.checksum(block) for block in effect.blocks]
        self.handle(ev.BlocksHashed(effect.hash_id, array("Q", checksums)))


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request."""

    prompt: "array[int]"
    params: Any
    deadline: float
    submitted_at: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[object] = field(default_factory=list)
    ended_at: float | None = None
    was_cancelled: bool = False


class SimClient(Process):
    """A session of the SDK that records what it is given."""

    def __init__(self, cluster: Surroundings, client_id: ClientId) -> None:
        self.client_id = client_id
        pid = cluster.new_pid()
        process = m.ProcessName(boot_id="sim", pid_namespace="sim", pid=pid, start_ticks=0)
        core = ClientCore(m.Hello(process=process), BROKER, connect_timeout_s=5.0)
        super().__init__(cluster, f"client-{client_id.hex()[:6]}", core, client_ev.Tick(), pid)
        self.outcomes: dict[RequestId, Outcome] = {}

    def received(self, frames: list[bytes]) -> None:
        self.handle(decode_message(frames))

    def submit(self, request_id: RequestId, outcome: Outcome, frames: tuple[bytes, ...]) -> None:
        self.outcomes[request_id] = outcome
        deadline_s = outcome.deadline - outcome.submitted_at
        self.handle(client_ev.Submit(request_id, m.GENERATE, deadline_s, frames))

    def cancel(self, request_id: RequestId) -> None:
        self.outcomes[request_id].was_cancelled = True
        self.handle(client_ev.CancelWanted(request_id))

    def perform(self, effect: client_ev.Effect) -> None:
        cluster, world = self.cluster, self.cluster.world
        match effect:
            case client_ev.Send(frames):
                broker, client_id = cluster.broker, self.client_id
                if broker.is_alive:
                    world.send(self.name, BROKER, lambda: broker.from_client(client_id, frames))
            case client_ev.Deliver(request_id, event):
                outcome = self.outcomes[request_id]
                assert event.seq == len(outcome.tokens), "a stream skipped or repeated a token"
                outcome.tokens += event.token_ids
                outcome.text += event.text
                world.record(self.name, request_id, event.seq, event.token_ids)
                read = client_ev.ReadTo(request_id, len(outcome.tokens))
                world.after(0.0, lambda: self.handle(read))
            case client_ev.End(request_id, end):
                outcome = self.outcomes[request_id]
                outcome.ends.append(end)
                outcome.ended_at = world.now
                world.record(self.name, request_id, "end", type(end).__name__)
