"""The shell of a worker: carries out the effects of `WorkerCore`, and nothing else.

Four kinds of thread: the loop (sockets and the machine), one that runs steps, one that tokenizes,
and one that hashes many blocks. A reader per peer copies blocks under leases.
"""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

import msgspec
import structlog

from llmrt.actor import sockets
from llmrt.actor.channel import Channel
from llmrt.actor.driver import Driver
from llmrt.actor.runtime import settle
from llmrt.engine.batch import Device
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.arena_socket import ArenaServer, AttachedPeer, Lifeline, attach_arena
from llmrt.kvtransfer.checksums import block_checksums
from llmrt.kvtransfer.numa import numa_note
from llmrt.kvtransfer.transport import PROBE_LEASE, ReadRequest
from llmrt.wire.envelope import check_frames, decode_body, decode_header, encode_body
from llmrt.wire.errors import LlmrtError, ProtocolError, VersionMismatch, error_from_code
from llmrt.wire.ids import BlockId, LeaseId, WorkerId, WorkerName
from llmrt.wire.messages import Failure, Peer
from llmrt.workers import effects as do
from llmrt.workers import events as ev
from llmrt.workers.bulk_links import BulkLinks, LinkSettings, copy_rate
from llmrt.workers.context import CoreSettings
from llmrt.workers.core import WorkerCore
from llmrt.workers.offered import arena_of
from llmrt.workers.prompts import PromptEncoder
from llmrt.workers.step_thread import StepThread

log = structlog.get_logger(__name__)

# 0.2 ms: a thread takes as long to wake up, and the loop behind it, too.
HASH_AT_ONCE_BYTES = 2 << 20


class ArenaHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself when it maps a peer's arena."""

    worker_id: str
    epoch: int


def _fail(error: BaseException) -> None:
    """A fault of ours on a thread: it ends the process, as one on the loop does."""
    raise error


class WorkerShell:
    """Owns sockets, threads and mappings of one worker. `run` returns when the worker ends."""

    def __init__(
        self,
        core: WorkerCore,
        settings: CoreSettings,
        *,
        device: Device,
        arena: Arena,
        encoder: PromptEncoder,
        broker: sockets.Socket,
        link: sockets.Socket,
        arena_socket: Path | None,
        context: sockets.Context,
        leased_blocks: Callable[[LeaseId], tuple[BlockId, ...] | None],
        on_ready: Callable[[], None],
        links: LinkSettings,
        validate: bool = False,
    ) -> None:
        self._settings = settings
        self._device = device
        self._arena = arena
        self._encoder = encoder
        self._context = context
        self._leased_blocks = leased_blocks
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._hash_thread = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: dict[WorkerName, Channel] = {}
        self._mapped: dict[WorkerName, tuple[Arena, Lifeline]] = {}
        self._mappers: dict[AttachedPeer, WorkerName] = {}
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._num_bad_messages = 0
        self._is_served = False
        self._early_peers: list[Peer] = []
        self._driver: Driver[ev.Event, do.Effect] = Driver(
            core, self._perform, ev.Tick(), validate=validate
        )
        self._step_thread = StepThread(device, self._loop, self._driver.handle)
        self._broker = Channel(broker, self._from_broker, self._unsent)
        self._link = Channel(link, self._from_link, self._unsent)
        self._links = links
        self._bulk = BulkLinks(arena, self._check_read, links)
        self._arena_server = None
        if arena_socket is not None:
            self._arena_server = ArenaServer(
                arena_socket,
                arena,
                on_attached=self._arena_mapped,
                on_dead=self._mapper_died,
            )

    async def start(self) -> None:
        """Serve the arena. Raises `ConfigError` or `AddressInUse`; `close` is due even then."""
        if self._arena_server is not None:
            await self._arena_server.start()
        await self._bulk.start()
        # No peer has heard of us before: all that it is told of is there.
        self._is_served = True
        for peer in self._early_peers:
            self._connect(peer)
        self._early_peers.clear()

    async def run(self) -> None:
        """Serve until cancelled. Raises what ended the worker otherwise."""
        await self._ended

    async def close(self) -> None:
        """Say goodbye, let the running step return, and let go of everything."""
        self._driver.handle(ev.StopWanted())
        self._driver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bulk.stop_reading()
        await asyncio.to_thread(self._step_thread.close)
        self._text_thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._hash_thread.shutdown, cancel_futures=True)
        for owner in list(self._mapped):
            self._unmap(owner)
        await self._bulk.close()
        if self._arena_server is not None:
            self._arena_server.close()
        for channel in (*self._peers.values(), self._link, self._broker):
            channel.close()

    # -- effects -----------------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.RunStep(batch, rights):
                self._step_thread.run(batch, rights)
            case do.SendBroker(frames, is_skippable):
                if not (is_skippable and self._broker.waiting_bytes()):
                    self._broker.send(frames)
            case do.SendPeer(peer, frames):
                channel = self._peers.get(peer)
                if channel is not None:
                    channel.send(frames)
            case do.Tokenize():
                self._text_thread.submit(self._tokenize, effect).add_done_callback(self._post)
            case do.ConnectPeer(peer_row):
                if self._is_served:
                    self._connect(peer_row)
                else:
                    self._early_peers.append(peer_row)
            case do.ForgetPeer(peer):
                self._forget(peer)
            case do.AttachArena():
                self._spawn(self._attach(effect))
            case do.FenceWriter(peer):
                self._fence(peer)
            case do.DetachArena(owner):
                # Behind the running step and the last hash, which may still name it.
                detached = self._step_thread.call(self._detach, owner)
                detached.add_done_callback(
                    lambda _: self._hash_thread.submit(self._call_soon, self._unmap, owner)
                )
            case do.ReadBlocks():
                self._spawn(self._read(effect))
            case do.ProbeLink():
                self._spawn(self._probe(effect))
            case do.HashBlocks():
                if len(effect.blocks) * self._arena.block_bytes <= HASH_AT_ONCE_BYTES:
                    self._driver.handle(self._hash(effect))
                else:
                    self._hash_thread.submit(self._hash, effect).add_done_callback(self._post)
            case do.Log(event, level, fields):
                getattr(log, level)(event, **fields)
            case do.Ready():
                settle()
                self._on_ready()
            case do.Exit(code, message):
                if not self._ended.done():
                    self._ended.set_exception(error_from_code(code, message))
            case _:
                assert_never(effect)

    # -- texts, on their thread --------------------------------------------------------------

    def _tokenize(self, effect: do.Tokenize) -> ev.Tokenized:
        try:
            token_ids = self._encoder.encode(
                effect.generate,
                effect.prompt,
                now=effect.admitted_unix_s,
                add_special=effect.add_special,
            )
        except LlmrtError as error:
            failure = Failure(code=error.error_code, message=error.message)
            return ev.Tokenized(effect.request_id, effect.attempt, None, failure)
        return ev.Tokenized(effect.request_id, effect.attempt, token_ids)

    # -- checksums, on their thread ----------------------------------------------------------

    def _hash(self, effect: do.HashBlocks) -> ev.BlocksHashed:
        arena = self._arena
        if effect.owner is not None:
            mapped = self._mapped.get(effect.owner)
            if mapped is None:
                return ev.BlocksHashed(effect.hash_id, array("Q"))
            arena = mapped[0]
        checksums = block_checksums(arena.buffer, arena.block_bytes, effect.blocks)
        return ev.BlocksHashed(effect.hash_id, checksums)

    def _post(self, done: "Future[ev.Tokenized] | Future[ev.BlocksHashed]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._call_soon(_fail, error)
        else:
            self._call_soon(self._driver.handle, done.result())

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the worker with it
            self._loop.call_soon_threadsafe(call, *arguments)

    # -- sockets -----------------------------------------------------------------------------

    def _from_broker(self, frames: list[bytes]) -> None:
        try:
            check_frames(frames)
            header = decode_header(frames[0])
            waited_s = self._driver.stalled_s()
            event = ev.FromBroker(header, tuple(frames[1:]), waited_s)
        except VersionMismatch as error:
            self._driver.handle(ev.BrokerMismatch(error.message))
        except ProtocolError as error:
            self._refuse(error)
        else:
            self._driver.handle(event)

    def _from_link(self, frames: list[bytes]) -> None:
        try:
            check_frames(frames[1:])
            header = decode_header(frames[1])
            waited_s = self._driver.stalled_s()
            sender = WorkerName.from_routing_id(frames[0])
            event = ev.FromPeer(sender, header, tuple(frames[2:]), waited_s)
        except ProtocolError as error:
            self._refuse(error)
        else:
            self._driver.handle(event)

    def _refuse(self, error: ProtocolError) -> None:
        self._num_bad_messages += 1
        if self._num_bad_messages.bit_count() == 1:  # the 1st, 2nd, 4th, ...
            log.warning("message.refused", error=error.message, count=self._num_bad_messages)

    def _unsent(self, frames: list[bytes], reason: str) -> None:
        log.warning("message.unsent", reason=reason, size_bytes=sum(map(len, frames)))

    def _connect(self, peer: Peer) -> None:
        name = WorkerName(WorkerId(peer.worker_id), peer.epoch)
        socket = sockets.dealer(self._context, self._settings.name.routing_id)
        try:
            sockets.connect(socket, peer.link)
        except LlmrtError as error:
            socket.close()
            log.warning("peer.unreachable", peer=peer.worker_id, error=error.message)
            return

        def unsent(frames: list[bytes], reason: str) -> None:
            self._unsent(frames, reason)
            self._driver.handle(ev.PeerUnreachable(name))

        self._peers[name] = Channel(socket, lambda frames: None, unsent)
        self._driver.handle(ev.PeerConnected(name, self._bulk.addresses_for(name)))

    def _forget(self, peer: WorkerName) -> None:
        self._bulk.revoke(peer)
        self._spawn(self._bulk.stop_reading_of(peer))
        channel = self._peers.pop(peer, None)
        if channel is not None:
            channel.close()

    # -- arenas ------------------------------------------------------------------------------

    async def _attach(self, effect: do.AttachArena) -> None:
        """Map a peer's arena and make it known to the device; whether it is the right one, the
        machine says.
        """
        owner, name = effect.owner, self._settings.name
        hello = encode_body(ArenaHello(worker_id=name.worker_id, epoch=name.epoch))
        try:
            arena, lifeline = await attach_arena(
                Path(effect.socket),
                hello,
                timeout_s=self._links.map_timeout_s,
                on_lost=lambda: self._driver.handle(ev.ArenaLost(owner)),
            )
        except LlmrtError as error:
            self._driver.handle(ev.ArenaRefused(owner, error.message))
            return
        self._mapped[owner] = (arena, lifeline)
        shape = ev.ArenaShape(arena.num_blocks, arena.block_bytes, arena.generation)
        adding = self._step_thread.call(self._device.add_arena, arena_of(owner), arena.buffer)
        try:
            await asyncio.wrap_future(adding)
        except ValueError as error:  # no memory that a step could use
            self._unmap(owner)
            self._driver.handle(ev.ArenaRefused(owner, str(error)))
        else:
            self._driver.handle(ev.ArenaAttached(owner, shape))

    def _detach(self, owner: WorkerName) -> None:
        self._device.remove_arena(arena_of(owner))

    def _unmap(self, owner: WorkerName) -> None:
        mapped = self._mapped.pop(owner, None)
        if mapped is not None:
            arena, lifeline = mapped
            arena.close()
            lifeline.close()

    def _arena_mapped(self, peer: AttachedPeer) -> str | None:
        try:
            hello = decode_body(peer.hello, ArenaHello)
        except ProtocolError as error:
            return error.message
        name = WorkerName(WorkerId(hello.worker_id), hello.epoch)
        self._mappers[peer] = name
        self._loop.call_soon(self._driver.handle, ev.ArenaMapped(name))
        return None

    def _fence(self, name: WorkerName) -> None:
        assert self._arena_server is not None
        for peer in [peer for peer, mapper in self._mappers.items() if mapper == name]:
            if not self._arena_server.kill(peer):
                log.error(
                    "peer.fence_failed",
                    peer=name.worker_id,
                    pid=peer.pid,
                    remedy="run all workers of this host as one user, or end that process by hand",
                )

    def _mapper_died(self, peer: AttachedPeer) -> None:
        name = self._mappers.pop(peer, None)
        if name is not None:
            self._driver.handle(ev.MapperDied(name))

    # -- reading under a lease ---------------------------------------------------------------

    async def _read(self, effect: do.ReadBlocks) -> None:
        failure = None
        try:
            await self._bulk.read(
                effect.owner,
                effect.address,
                LeaseId(effect.lease_id),
                effect.generation,
                effect.source,
                effect.target,
                timeout_s=self._links.read_timeout_s,
            )
        except LlmrtError as error:
            failure = Failure(code=error.error_code, message=error.message)
        self._driver.handle(ev.BlocksRead(effect.read_id, failure))

    async def _probe(self, effect: do.ProbeLink) -> None:
        """Measure a link; whatever happens, the machine hears of it."""
        probed = ev.LinkProbed(effect.probe_id, failure="the worker ends")
        try:
            if effect.target:
                rate, latency_s = await self._bulk.probe(
                    effect.owner, effect.address, effect.generation, effect.target
                )
                fd = self._arena.fd
            else:
                arena, _ = self._mapped[effect.owner]
                loop, latency_s, fd = self._loop, 0.0, arena.fd
                rate = await loop.run_in_executor(self._hash_thread, copy_rate, arena.buffer)
            note = await asyncio.to_thread(numa_note, fd)
            probed = ev.LinkProbed(effect.probe_id, rate, latency_s, note)
        except LlmrtError as error:
            probed = ev.LinkProbed(effect.probe_id, failure=error.message)
        except (KeyError, OSError):
            probed = ev.LinkProbed(effect.probe_id, failure="its arena is mapped no more")
        finally:
            self._driver.handle(probed)

    def _check_read(self, request: ReadRequest) -> str | None:
        """Called on a reader's connection thread."""
        if request.lease_id == PROBE_LEASE:
            return None
        blocks = self._leased_blocks(request.lease_id)
        if blocks is None:
            return f"lease {request.lease_id} has ended"
        if not set(request.blocks) <= set(blocks):
            return f"lease {request.lease_id} does not cover all {len(request.blocks)} blocks"
        return None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
