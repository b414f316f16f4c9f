"""A whole cluster in one thread under virtual time, with faults, and the promises it must keep."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrt.broker.settings import BrokerSettings
from llmrt.simulation.content import expected_tokens, text_of
from llmrt.simulation.processes import Outcome, Process, SimBroker, SimClient, SimWorker
from llmrt.simulation.world import Faults, World
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32
from llmrt.wire.envelope import encode_body
from llmrt.wire.errors import LlmrtError
from llmrt.wire.ids import ClientId, RequestId, WorkerId, WorkerName
from llmrt.wire.sampling import SamplingParams
from llmrt.workers.events import ArenaLost, MapperDied

# How fast the kernel's word of a death reaches those who wait for it.
DEATH_NOTICE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many workers of which role, and how blocks travel between them.

    `placement` is that of the workers; remote hands over every prompt. With `num_drafts` requests
    want texts that repeat themselves, some with penalties or a stop.
    """

    num_both: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    transfer: str = "auto"
    placement: str = "remote"
    checksums: str = "auto"
    num_blocks: int = 48
    max_context: int = 512
    stream_interval_s: float = 0.0
    num_drafts: int = 0


SPLIT = Layout(num_prefill=2, num_decode=2)
COLOCATED = Layout(num_both=2)


class Cluster:
    """Broker, workers and clients. `checks` asserts every machine's invariants at every event."""

    def __init__(
        self, seed: int, layout: Layout, faults: Faults | None = None, *, checks: bool = True
    ) -> None:
        self.world: World = World(seed, faults or Faults())
        self.layout = layout
        self.max_context = layout.max_context
        self.checks = checks
        self.clients: dict[ClientId, SimClient] = {}
        self.workers: dict[str, SimWorker] = {}
        self.graveyard: list[SimWorker] = []
        self._num_pids = 0
        self._dead_pids: set[int] = set()
        self._num_epochs = 0
        self.broker = SimBroker(self, BrokerSettings(), self._epoch())
        roles = {
            "both": layout.num_both,
            "prefill": layout.num_prefill,
            "decode": layout.num_decode,
        }
        for role, count in roles.items():
            for i in range(count):
                self.start_worker(f"{role}-{i}", role)
        for _ in range(2):
            self.add_client()

    # -- processes ---------------------------------------------------------------------------

    def new_pid(self) -> int:
        self._num_pids += 1
        return self._num_pids

    def start_worker(self, worker_id: str, role: str) -> SimWorker:
        name = WorkerName(WorkerId(worker_id), self._epoch())
        worker = SimWorker(
            self,
            name,
            role,
            transfer=self.layout.transfer,
            placement=self.layout.placement,
            checksums=self.layout.checksums,
            num_blocks=self.layout.num_blocks,
            stream_interval_s=self.layout.stream_interval_s,
            num_drafts=self.layout.num_drafts,
        )
        self.workers[worker_id] = worker
        self.world.after(0, lambda: worker.handle(worker.tick))
        return worker

    def add_client(self) -> SimClient:
        client = SimClient(self, ClientId(self.world.rng.randbytes(16)))
        self.clients[client.client_id] = client
        return client

    def kill(self, process: Process) -> None:
        """kill -9: the kernel tells those who watch; a step in progress is torn."""
        if not process.is_alive:
            return
        process.is_alive = False
        self.world.record("killed", process.name)
        self._dead_pids.add(process.pid)
        if isinstance(process, SimWorker):
            process.die_in_step(self.world.rng.randrange(200))
            self.graveyard.append(process)
            self.world.after(DEATH_NOTICE_S, lambda: self._tell_peers(process))
        name = process.process_name
        self.world.after(DEATH_NOTICE_S, lambda: self.broker.process_died(name))

    def restart(self, worker: SimWorker, after_s: float) -> None:
        def start() -> None:
            self.start_worker(worker.worker.worker_id, worker.role)

        self.world.after(after_s, start)

    def report_if_dead(self, process: m.ProcessName, tell: Callable[[m.ProcessName], None]) -> None:
        if process.pid in self._dead_pids:
            self.world.after(DEATH_NOTICE_S, lambda: tell(process))

    def worker_by_routing(self, routing_id: bytes) -> SimWorker | None:
        return self.life_of(WorkerName.from_routing_id(routing_id))

    def life_of(self, name: WorkerName) -> SimWorker | None:
        worker = self.workers.get(name.worker_id)
        return worker if worker and worker.is_alive and worker.worker == name else None

    # -- load --------------------------------------------------------------------------------

    def submit(
        self,
        client: SimClient,
        prompt: "array[int]",
        params: SamplingParams,
        *,
        deadline_s: float = 60.0,
    ) -> RequestId:
        now = self.world.now
        request_id = RequestId(self.world.rng.randbytes(16))
        body = m.Generate(prompt_kind="tokens", sampling=params)
        outcome = Outcome(prompt, params, now + deadline_s, now)
        client.submit(request_id, outcome, (encode_body(body), pack_u32(prompt)))
        return request_id

    def submit_random(self, *, longest: int = 250, deadline_s: float = 60.0) -> None:
        """One request of a random client: lengths vary, and prompts share prefixes."""
        rng = self.world.rng
        client = rng.choice(list(self.clients.values()))
        if not client.is_alive:
            return
        shared = array("I", range(10, 10 + rng.choice([0, 0, 31, 32, 64, 100])))
        own = array("I", (rng.randrange(3, 500) for _ in range(rng.randrange(1, longest))))
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 8, 40, 120]),
            min_tokens=rng.choice([0, 0, 1]),
            seed=rng.randrange(1 << 32),
            temperature=1.0,
            **(self._repeating() if self.layout.num_drafts else {}),
        )
        request_id = self.submit(client, shared + own, params, deadline_s=deadline_s)
        if rng.random() < 0.1:
            self.world.after(rng.uniform(0, 1.0), lambda: client.cancel(request_id))

    def _repeating(self) -> dict[str, Any]:
        """What of a request makes its text repeat itself, and end anywhere in it."""
        rng = self.world.rng
        return {
            "top_k": rng.choice([1, 2, 3]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
            "stop": rng.choice([(), (), ("de df",), ("e dd de d",)]),
        }

    # -- promises ----------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        return [o for client in self.clients.values() for o in client.outcomes.values()]

    def assert_promises(self) -> Counter[str]:
        """Every promise about the requests that have been submitted; counts them by their end."""
        counts: Counter[str] = Counter()
        for client in self.clients.values():
            if client.is_alive:
                for outcome in client.outcomes.values():
                    counts[self._assert_outcome(outcome)] += 1
        for worker in [*self.workers.values(), *self.graveyard]:
            assert not worker.arena.violations, worker.arena.violations
            assert not worker.arena.num_broken, f"{worker.name} holds or held broken chains"
        return counts

    def _assert_outcome(self, outcome: Outcome) -> str:
        assert len(outcome.ends) == 1, f"{len(outcome.ends)} ends"
        assert outcome.ended_at is not None
        assert outcome.ended_at <= outcome.deadline + 2.0, "ended after its deadline"
        expected = expected_tokens(outcome.prompt, outcome.params, self.max_context)
        assert outcome.tokens == expected[: len(outcome.tokens)], "wrong tokens"
        end = outcome.ends[0]
        if isinstance(end, LlmrtError):
            return end.error_code
        assert isinstance(end, m.Finished)
        assert outcome.tokens == expected, "a stream finished before its end"
        text = text_of(expected, *outcome.params.stop)
        assert outcome.text == text, "the text is not that of the tokens"
        assert end.usage.completion_tokens == len(expected)
        assert end.usage.prompt_tokens == len(outcome.prompt)
        return end.finish_reason

    def assert_nothing_left(self) -> None:
        """Long after the last request: every block is free or cached, every table empty."""
        for worker in self.workers.values():
            if worker.is_alive:
                counts = worker.ledger.counts()
                assert counts.num_held == counts.num_granted == counts.num_quarantined == 0, counts
                assert counts.num_grants == counts.num_leases == 0, counts
                assert counts.num_evictable == counts.num_cached, counts
                scheduler = worker.scheduler
                tables = (scheduler.waiting, scheduler.running, scheduler.parked)
                assert not any(tables), tables

    def _epoch(self) -> int:
        self._num_epochs += 1
        return self._num_epochs

    def _tell_peers(self, dead: SimWorker) -> None:
        for worker in list(self.workers.values()):
            if worker.is_alive and worker is not dead:
                if worker.worker in dead.attached:
                    worker.handle(MapperDied(dead.worker))
                if dead.worker in worker.attached:
                    worker.handle(ArenaLost(dead.worker))
