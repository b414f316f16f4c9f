"""Probes of links: which transport works, and how fast it is. Pure.

A peer's arena that we have mapped is only measured. One that we read under leases is read by the
best transport that both ends have and that a probe finds to work; what fails is noted with its
reason. A probe reads into blocks that the ledger gives for that time.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from llmrt.wire import messages as m
from llmrt.wire.ids import BlockId, WorkerName
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import ProbeLink
from llmrt.workers.events import LinkProbed

SHM = "shm"
# A probe takes so many bytes, and no more than that share of our blocks.
PROBE_BYTES, ARENA_SHARE = 16 << 20, 8
PROBE_AGAIN_S = 30.0
MAX_REASON_CHARS = 120
# Reads of less say more of latency than of rate.
MIN_TIMED_BYTES = 1 << 20
# So many large reads in a row, each so much slower than the probe, are worth a warning.
SLOW_FACTOR, SLOW_READS = 4.0, 8


@dataclass(slots=True)
class LinkState:
    """What probes have found of one link.

    `untried` are addresses of the peer, best first. `transport` and `address` are what is used,
    empty until a probe has found it to work; `why_not` has those that are not used. With
    `has_failed` no transport works, until they are all tried again.
    """

    untried: list[str] = field(default_factory=list)
    transport: str = ""
    address: str = ""
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    recent_bytes_per_s: float = 0.0
    numa: str = ""
    why_not: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False
    probe_id: int = 0
    probe_at: float = 0.0
    asked_at: float = 0.0
    num_slow: int = 0
    num_warnings: int = 0

    def note(self, transport: str, reason: str) -> None:
        self.why_not[transport] = reason[:MAX_REASON_CHARS]

    def row(self, transport: str) -> m.LinkRow:
        return m.LinkRow(
            transport=transport,
            bytes_per_s=self.bytes_per_s,
            latency_s=self.latency_s,
            recent_bytes_per_s=self.recent_bytes_per_s,
            numa=self.numa,
            why_not=dict(self.why_not),
        )


def scheme_of(address: str) -> str:
    """The transport that an address of a peer is for, which may be one that we do not know."""
    return address.partition("://")[0]


class LinkProbes:
    """The probes under way, and what follows from their results."""

    def __init__(
        self, context: WorkerContext, state_of: Callable[[WorkerName], LinkState | None]
    ) -> None:
        self._context = context
        self._state_of = state_of
        self._last_probe_id = 0
        self._under_way: dict[int, tuple[WorkerName, str, list[BlockId]]] = {}

    def choose(self, name: WorkerName, hello: m.PeerHello) -> None:
        """Find out how to read the peer's arena, from its best address on."""
        state = self._state_of(name)
        assert state is not None
        settings = self._context.settings
        offered = {scheme_of(address): address for address in hello.bulk}
        state.transport = state.address = ""
        state.untried = []
        for scheme in settings.transports:
            if settings.transfer not in ("auto", scheme):
                state.note(scheme, f"transfer is {settings.transfer}")
            elif scheme in settings.why_no_transport:
                state.note(scheme, settings.why_no_transport[scheme])
            elif scheme not in offered:
                state.note(scheme, "the peer does not offer it")
            else:
                state.untried.append(offered[scheme])
        state.has_failed = not state.untried
        if state.has_failed:
            state.probe_at = self._context.now + PROBE_AGAIN_S
        self.go_on(name, hello)

    def go_on(self, name: WorkerName, hello: m.PeerHello) -> None:
        """Probe the next address, if there is one and there are blocks to read into."""
        state, ledger = self._state_of(name), self._context.ledger
        if state is None or state.probe_id or not state.untried:
            return
        wanted = PROBE_BYTES // self._context.settings.contract.block_bytes
        most = min(wanted, hello.num_blocks, ledger.num_blocks // ARENA_SHARE)
        count = min(max(1, most), ledger.num_free)
        blocks = ledger.allocate(count) if count else None
        if blocks is not None:
            self._probe(name, state, state.untried[0], hello.arena_generation, blocks)

    def measure_mapping(self, name: WorkerName, hello: m.PeerHello) -> None:
        """Find out how fast the peer's arena, which is mapped here, can be read."""
        state = self._state_of(name)
        if state is not None and not state.probe_id:
            self._probe(name, state, SHM, hello.arena_generation, [])

    def beat(self, name: WorkerName, hello: m.PeerHello) -> None:
        """Go on with what had no blocks, and try again what failed a while ago."""
        state = self._state_of(name)
        assert state is not None
        if state.has_failed and self._context.now >= state.probe_at:
            self.choose(name, hello)
        else:
            self.go_on(name, hello)

    def done(self, event: LinkProbed) -> WorkerName | None:
        """Take a result; returns the peer if the link to it still is."""
        name, address, blocks = self._under_way.pop(event.probe_id)
        self._context.ledger.release(blocks)
        state = self._state_of(name)
        if state is None:
            return None
        state.probe_id = 0
        if address != SHM and address not in state.untried:
            return name  # the peer has told other addresses since
        if event.failure is not None:
            self._failed(name, state, address, event.failure)
            return name
        if address != SHM:
            state.untried, state.address = [], address
        state.transport = scheme_of(address)
        state.bytes_per_s, state.latency_s = event.bytes_per_s, event.latency_s
        state.numa = event.numa
        self._log(name, state)
        self._tell(name, state)
        return name

    def told(self, sender: WorkerName, linked: m.Linked) -> None:
        """The peer has measured the link, or answers that it heard that we did."""
        state = self._state_of(sender)
        if state is None:
            return
        if linked.is_answer:
            if state.asked_at and not state.latency_s:
                state.latency_s = self._context.now - state.asked_at
                self._tell(sender, state)
            return
        state.transport = linked.transport
        state.bytes_per_s, state.latency_s = linked.bytes_per_s, linked.latency_s
        if not linked.latency_s:
            answer = m.Linked(transport=linked.transport, is_answer=True)
            self._context.send_peer(sender, m.LINKED, answer)

    def read_took(self, peer: WorkerName, size_bytes: int, duration_s: float) -> None:
        """A read under a lease; many that are much slower than the probe are warned about."""
        state = self._state_of(peer)
        if state is None or size_bytes < MIN_TIMED_BYTES or not state.bytes_per_s:
            return
        rate = size_bytes / max(duration_s, 1e-9)
        previous = state.recent_bytes_per_s or rate
        state.recent_bytes_per_s = previous + (rate - previous) / 4
        state.num_slow = state.num_slow + 1 if rate * SLOW_FACTOR < state.bytes_per_s else 0
        if state.num_slow == SLOW_READS:
            state.num_slow = 0
            state.num_warnings += 1
            self._context.counters["links_slow"] += 1
            if state.num_warnings.bit_count() == 1:  # the 1st, 2nd, 4th, ...
                self._context.log(
                    "peer.slow",
                    "warning",
                    peer=peer.worker_id,
                    transport=state.transport,
                    gb_per_s=round(rate / 1e9, 3),
                    probed_gb_per_s=round(state.bytes_per_s / 1e9, 3),
                )

    def _probe(
        self,
        name: WorkerName,
        state: LinkState,
        address: str,
        generation: int,
        blocks: list[BlockId],
    ) -> None:
        self._last_probe_id += 1
        state.probe_id = self._last_probe_id
        self._under_way[state.probe_id] = (name, address, blocks)
        target = array("I", blocks)
        self._context.do(ProbeLink(state.probe_id, name, address, generation, target))

    def _failed(self, name: WorkerName, state: LinkState, address: str, reason: str) -> None:
        transport = scheme_of(address)
        state.note(transport, reason)
        state.untried = [other for other in state.untried if other != address]
        state.has_failed = not state.untried and address != SHM
        state.probe_at = self._context.now + PROBE_AGAIN_S
        self._context.log(
            "peer.probe_failed",
            "warning",
            peer=name.worker_id,
            transport=transport,
            error=reason,
        )

    def _log(self, name: WorkerName, state: LinkState) -> None:
        self._context.log(
            "peer.linked",
            peer=name.worker_id,
            transport=state.transport,
            gb_per_s=round(state.bytes_per_s / 1e9, 3),
            latency_us=round(state.latency_s * 1e6, 1) or None,
            numa=state.numa,
            why_not=state.why_not or None,
        )

    def _tell(self, name: WorkerName, state: LinkState) -> None:
        state.asked_at = self._context.now
        linked = m.Linked(
            transport=state.transport,
            bytes_per_s=state.bytes_per_s,
            latency_s=state.latency_s,
        )
        self._context.send_peer(name, m.LINKED, linked)
