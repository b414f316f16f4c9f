"""The links of one worker to its peers. Pure.

A peer is *listed* (the broker names it), *greeted* (its hello came over the link and its contract
is ours) and, between the two ends of a hand-over on one host, *mapped* (the prefill side has the
decode side's arena in its memory). Who sends what:

    broker  PEERS        -> both: connect to new peers, send PEER_HELLO
    peer    PEER_HELLO   -> compare contracts; a prefill worker maps the arena of the other
    kernel  no mapping   -> the owner probes how it can read the arena of the prefill worker
    kernel  arena mapped -> the owner may grant
    kernel  mapper died  -> the owner ends its grants: no one else can write

A peer that the broker no longer lists gets no new offers. What it holds ends by its own answer or
by its confirmed death, never by the list: a restarted broker lists nobody at first.
"""

from dataclasses import dataclass, field
from itertools import islice

from llmrt.wire import messages as m
from llmrt.wire.ids import WorkerId, WorkerName
from llmrt.wire.kv import contract_fault, contract_mismatch
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import AttachArena, ConnectPeer, DetachArena, ForgetPeer
from llmrt.workers.events import ArenaShape, LinkProbed
from llmrt.workers.probing import SHM, LinkProbes, LinkState

GRANT, LEASE = "grant", "lease"
AVOID_S = 10.0
FORGET_S = 60.0
# Of all peers that are refused, most have one reason.
MAX_REFUSALS, MAX_REASON_CHARS = 4, 200
MAX_ROWS = 64


@dataclass(slots=True)
class PeerLink:
    """What is known of one life of a peer."""

    peer: m.Peer
    is_listed: bool = True
    bulk: tuple[str, ...] | None = None
    delisted_at: float = 0.0
    avoided_until: float = 0.0
    hello: m.PeerHello | None = None
    refusal: str | None = None
    maps_ours: bool = False
    cannot_map: str | None = None
    has_arena: bool = False
    state: LinkState = field(default_factory=LinkState)

    @property
    def name(self) -> WorkerName:
        return WorkerName(WorkerId(self.peer.worker_id), self.peer.epoch)


class PeerLinks:
    """Table of peers by name and epoch."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._links: dict[WorkerName, PeerLink] = {}
        # Hellos that came before the broker's list; bounded by the number of workers.
        self._early: dict[WorkerName, m.PeerHello] = {}
        self._probes = LinkProbes(context, self._state_of)
        self.has_news = False

    def listed(self, peers: tuple[m.Peer, ...]) -> list[WorkerName]:
        """Take the broker's list; returns the peers that have just fallen off it."""
        settings = self._context.settings
        names = set()
        for peer in peers:
            name = WorkerName(WorkerId(peer.worker_id), peer.epoch)
            if name == settings.name or not self._is_partner(peer.role):
                continue
            names.add(name)
            link = self._links.get(name)
            if link is not None:
                link.is_listed = True
            else:
                self._links[name] = PeerLink(peer)
                self._context.do(ConnectPeer(peer))
                if name in self._early:
                    self.greeted(name, self._early.pop(name))
        lost = [name for name, link in self._links.items() if link.is_listed and name not in names]
        for name in lost:
            self._links[name].is_listed = False
            self._links[name].delisted_at = self._context.now
        return lost

    def connected(self, name: WorkerName, bulk: tuple[str, ...]) -> None:
        """Messages to `name` can go out; it may read our arena at `bulk`."""
        if link := self._links.get(name):
            link.bulk = bulk
            self._greet(name, bulk)

    def greeted(self, sender: WorkerName, hello: m.PeerHello) -> None:
        """A peer introduced itself; the same hello may come again."""
        link = self._links.get(sender)
        if link is None:
            if len(self._early) < 1024:
                self._early[sender] = hello
            return
        if not hello.is_answer and link.bulk is not None:
            self._greet(sender, link.bulk, is_answer=True)
        if link.hello is not None:
            self._greeted_again(sender, link, hello)
            return
        link.hello = hello
        self.has_news = True
        context = self._context
        ours, theirs = context.settings.contract, hello.contract
        mismatch = contract_fault(theirs) or contract_mismatch(ours, theirs)
        if mismatch is not None:
            link.refusal = f"KV contract differs: {mismatch}"
            context.log(
                "peer.refused",
                "warning",
                peer=sender.worker_id,
                peer_epoch=sender.epoch,
                error=link.refusal,
            )
        else:
            link.cannot_map = self._why_not_shm(hello)
            if link.cannot_map is not None:
                self._cannot_map(sender, link, link.cannot_map)
                if context.settings.does_prefill_for_others:
                    self._send_map_failed(sender, link.cannot_map)
            elif context.settings.does_prefill_for_others:
                context.do(AttachArena(sender, hello.arena_socket))

    def arena_attached(self, owner: WorkerName, arena: ArenaShape) -> None:
        link = self._links.get(owner)
        if link is None or link.hello is None:
            self._context.do(DetachArena(owner))  # it died while its arena was being mapped
            return
        if arena != self.arena_of(owner):
            self._context.do(DetachArena(owner))
            self.arena_refused(owner, f"the arena served there is another one: {arena}")
            return
        self.has_news = True
        link.has_arena = True
        self._probes.measure_mapping(owner, link.hello)

    def arena_refused(self, owner: WorkerName, reason: str) -> None:
        if link := self._links.get(owner):
            self._cannot_map(owner, link, reason)
        self._context.log("peer.map_failed", "warning", peer=owner.worker_id, error=reason)
        self._send_map_failed(owner, reason)

    def mapped(self, reader: WorkerName) -> None:
        if link := self._links.get(reader):
            self.has_news = True
            link.maps_ours = True
            self._context.log("peer.linked", peer=reader.worker_id, transport=SHM)

    def map_failed(self, sender: WorkerName, reason: str) -> None:
        if link := self._links.get(sender):
            link.maps_ours = False
            if link.cannot_map is not None:
                return  # we said so first
            self._context.log("peer.map_failed", "warning", peer=sender.worker_id, error=reason)
            self._cannot_map(sender, link, reason)

    # -- probes ------------------------------------------------------------------------------

    def probed(self, event: LinkProbed) -> None:
        if name := self._probes.done(event):
            self.has_news = True
            link = self._links[name]
            if link.hello is not None:
                self._probes.go_on(name, link.hello)

    def told(self, sender: WorkerName, linked: m.Linked) -> None:
        self.has_news = True
        self._probes.told(sender, linked)

    def read_took(self, peer: WorkerName, size_bytes: int, duration_s: float) -> None:
        self._probes.read_took(peer, size_bytes, duration_s)

    def forget(self, name: WorkerName) -> None:
        """The peer is dead: drop the link, and unmap its arena. Idempotent."""
        link = self._links.pop(name, None)
        if link is not None:
            if link.has_arena:
                self._context.do(DetachArena(name))
            self._context.do(ForgetPeer(name))

    def avoid(self, name: WorkerName) -> None:
        """The link fails though the broker hears of the peer: no offers for a while."""
        if link := self._links.get(name):
            link.avoided_until = self._context.now + AVOID_S
            self._context.log("peer.avoided", "warning", peer=name.worker_id, seconds=AVOID_S)

    def long_gone(self) -> list[WorkerName]:
        """Peers that the broker has not named for so long that they will not come back."""
        now = self._context.now
        return [
            name
            for name, link in self._links.items()
            if not link.is_listed and now - link.delisted_at >= FORGET_S
        ]

    def beat(self) -> None:
        """Greet again whoever has not answered, and probe again what did not work."""
        for name, link in self._links.items():
            if not link.is_listed:
                continue
            if link.hello is None:
                if link.bulk is not None:
                    self._greet(name, link.bulk)
            elif self._must_read(link) and not link.state.address:
                self._probes.beat(name, link.hello)

    def mode_to(self, name: WorkerName) -> str | None:
        """How `name` may prefill for us now: by grant, by lease, or not."""
        link = self._links.get(name)
        if link is None or not link.is_listed or link.hello is None or link.refusal is not None:
            return None
        if self._context.now < link.avoided_until:
            return None
        if link.maps_ours and link.cannot_map is None:
            return GRANT
        return LEASE if link.state.address else None

    def is_mapped(self, owner: WorkerName, generation: int) -> bool:
        """True if steps may write into that generation of `owner`'s arena."""
        link = self._links.get(owner)
        return (
            link is not None
            and link.has_arena
            and link.hello is not None
            and link.hello.arena_generation == generation
        )

    def arena_of(self, name: WorkerName) -> ArenaShape | None:
        """The arena of a peer as its hello tells; None if it is no partner."""
        link = self._links.get(name)
        if link is None or link.hello is None or link.refusal is not None:
            return None
        block_bytes = self._context.settings.contract.block_bytes
        return ArenaShape(link.hello.num_blocks, block_bytes, link.hello.arena_generation)

    def bulk_address(self, name: WorkerName) -> str:
        link = self._links.get(name)
        return "" if link is None else link.state.address

    def transport(self, name: WorkerName) -> str:
        """`shm`, a transport of bulk links, `pending` or `refused`."""
        link = self._links.get(name)
        if link is None or link.hello is None:
            return "pending"
        if link.refusal is not None:
            return "refused"
        if link.cannot_map is None:
            return SHM if link.maps_ours or link.has_arena else "pending"
        is_refused = self._context.settings.transfer == SHM or link.state.has_failed
        return "refused" if is_refused else link.state.transport or "pending"

    def rows(self) -> dict[str, m.LinkRow]:
        """What is known of the first few listed peers, by worker id."""
        listed = ((name, link) for name, link in self._links.items() if link.is_listed)
        return {
            name.worker_id: link.state.row(self.transport(name))
            for name, link in islice(listed, MAX_ROWS)
        }

    def transports(self) -> dict[str, str]:
        """Transport by worker id, of the listed peers."""
        return {
            name.worker_id: self.transport(name)
            for name, link in self._links.items()
            if link.is_listed
        }

    def refusals(self) -> dict[str, str]:
        """Reasons by worker id, of the first few listed peers with a transport of `refused`."""
        refused = (
            (name.worker_id, (link.refusal or _reasons(link))[:MAX_REASON_CHARS])
            for name, link in self._links.items()
            if link.is_listed and self.transport(name) == "refused"
        )
        return dict(islice(refused, MAX_REFUSALS))

    def __contains__(self, name: WorkerName) -> bool:
        return name in self._links

    def _send_map_failed(self, owner: WorkerName, reason: str) -> None:
        failure = m.Failure(code="transfer_failed", message=reason)
        self._context.send_peer(owner, m.MAP_FAILED, failure)

    def _state_of(self, name: WorkerName) -> LinkState | None:
        link = self._links.get(name)
        return None if link is None else link.state

    def _greeted_again(self, name: WorkerName, link: PeerLink, hello: m.PeerHello) -> None:
        """A peer whose arena is read at other addresses than before says so."""
        assert link.hello is not None
        if hello.bulk != link.hello.bulk and link.refusal is None:
            link.hello = hello
            if self._must_read(link):
                self._probes.choose(name, hello)

    def _cannot_map(self, name: WorkerName, link: PeerLink, reason: str) -> None:
        link.cannot_map = reason
        link.state.note(SHM, reason)
        self.has_news = True
        if link.hello is not None and self._must_read(link):
            self._probes.choose(name, link.hello)

    def _must_read(self, link: PeerLink) -> bool:
        """Whether the peer can only prefill for us if we read its arena."""
        settings = self._context.settings
        return (
            link.cannot_map is not None
            and link.refusal is None
            and settings.transfer != SHM
            and not settings.does_prefill_for_others
        )

    def _greet(self, name: WorkerName, bulk: tuple[str, ...], *, is_answer: bool = False) -> None:
        settings = self._context.settings
        hello = m.PeerHello(
            worker_id=settings.name.worker_id,
            epoch=settings.name.epoch,
            arena_generation=settings.arena_generation,
            num_blocks=settings.num_blocks,
            arena_socket=settings.arena_socket,
            bulk=bulk,
            contract=settings.contract,
            process=settings.process,
            is_answer=is_answer,
        )
        self._context.send_peer(name, m.PEER_HELLO, hello)

    def _is_partner(self, role: str) -> bool:
        """A hand-over needs a prefill worker at one end and an owner at the other."""
        if self._context.settings.does_prefill_for_others:
            return role in ("both", "decode")
        return role == "prefill"

    def _why_not_shm(self, hello: m.PeerHello) -> str | None:
        settings = self._context.settings
        ours, theirs = settings.process, hello.process
        if settings.transfer not in ("auto", SHM):
            return f"transfer is {settings.transfer}"
        if ours.boot_id != theirs.boot_id:
            return "the peer is on another host"
        if not ours.is_on_host_of(theirs):
            return "the peer is in another pid namespace: neither could see the other die"
        return None


def _reasons(link: PeerLink) -> str:
    if set(link.state.why_not) <= {SHM}:
        return link.cannot_map or ""
    return "; ".join(f"{transport}: {reason}" for transport, reason in link.state.why_not.items())
