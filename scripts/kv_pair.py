"""A decode and a prefill worker in one process, whose KV is bytes that decide the next token.

The machines, the ledgers, the arenas, the checksums and the bulk link over TCP are the real ones;
the device is not: a slot of 32 bytes holds the hash of the tokens before it and that behind it, and
the next token follows from the last. Whoever computes from blocks that are partial, stale or
foreign is noticed (`num_broken`), or draws tokens that no one expects.
"""

import asyncio
import contextlib
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from kv_mismatches import CONTRACT

from llmrt.engine.batch import (
    LOCAL_ARENA,
    ArenaId,
    Batch,
    Drawn,
    Row,
    SampleSpec,
    StepResult,
    draw_behind,
    fill,
)
from llmrt.engine.rights import check_rights
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.checksums import block_checksums
from llmrt.kvtransfer.ledger import Ledger
from llmrt.kvtransfer.tcp_reader import BulkReader
from llmrt.kvtransfer.tcp_server import BulkServer, ReadRequest
from llmrt.simulation.content import VOCAB_SIZE, SimVocabulary
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, unpack_u32
from llmrt.wire.envelope import decode_header, encode_body, encode_header
from llmrt.wire.errors import LlmrtError
from llmrt.wire.ids import Attempt, BlockId, LeaseId, RequestId, WorkerId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams
from llmrt.wire.steps import decode_step
from llmrt.workers import effects as do
from llmrt.workers import events as ev
from llmrt.workers.context import CoreSettings
from llmrt.workers.core import WorkerCore
from llmrt.workers.offered import arena_of

NUM_BLOCKS = 64
DIGEST_BYTES = 16
SLOT_BYTES = 2 * DIGEST_BYTES
EMPTY = bytes(DIGEST_BYTES)
assert CONTRACT.block_bytes == BLOCK_TOKENS * SLOT_BYTES


def fold(digest: bytes, token_id: int) -> bytes:
    return blake2b(digest + token_id.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()


def token_behind(digest: bytes) -> int:
    """No token that ends a text."""
    return 3 + int.from_bytes(digest[:4], "little") % (VOCAB_SIZE - 3)


def expected_tokens(prompt: "array[int]", num_tokens: int) -> list[int]:
    digest, tokens = EMPTY, list(prompt)
    for token_id in prompt:
        digest = fold(digest, token_id)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(token_behind(digest))
        digest = fold(digest, tokens[-1])
    return tokens[len(prompt) :]


class ByteDevice:
    """Runs steps over arenas of slots."""

    numerics_id = CONTRACT.numerics_id

    def __init__(self) -> None:
        self.num_broken = 0
        self._arenas: dict[ArenaId, memoryview] = {}

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None:
        self._arenas[arena] = buffer

    def remove_arena(self, arena: ArenaId) -> None:
        del self._arenas[arena]

    def run(self, batch: Batch) -> StepResult:
        drawn: list[Drawn] = []
        for row in batch.rows:
            digest = self._compute(row)

            def draw(place: int, spec: SampleSpec, digest: bytes = digest) -> tuple[int, None]:
                return token_behind(digest), None

            if row.sample is not None:
                drawn.append(draw_behind(row, row.sample, draw))
        return StepResult(batch.step_id, tuple(drawn), 0.0, 0.0)

    def _compute(self, row: Row) -> bytes:
        """Read all slots before the row's tokens, as attention does, and write theirs."""
        buffer, digest = self._arenas[row.arena], EMPTY
        for position in range(row.start):
            at = _slot(row.blocks, position)
            if bytes(buffer[at : at + DIGEST_BYTES]) != digest:
                self.num_broken += 1
            digest = bytes(buffer[at + DIGEST_BYTES : at + SLOT_BYTES])
        for i, token_id in enumerate(row.token_ids):
            at = _slot(row.blocks, row.start + i)
            before, digest = digest, fold(digest, token_id)
            buffer[at : at + SLOT_BYTES] = before + digest
        return digest


def _slot(blocks: "array[int]", position: int) -> int:
    block, offset = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
    return block * CONTRACT.block_bytes + offset * SLOT_BYTES


@dataclass(eq=False)
class Side:
    """One worker: its machine, its memory, and the steps that wait for its device."""

    name: WorkerName
    core: WorkerCore
    scheduler: Scheduler
    arena: Arena
    device: ByteDevice
    steps: deque[tuple[Batch, do.RunStep]] = field(default_factory=deque)
    before: StepResult | None = None

    @property
    def ledger(self) -> Ledger:
        return self.scheduler.ledger

    def flip(self, block: int, bit: int) -> None:
        at = block * self.arena.block_bytes + bit // 8
        self.arena.buffer[at] ^= 1 << bit % 8


class FaultyLine:
    """Passes bytes between readers and the server at `port`; breaks one of those that come back.

    `flip_at` and `cut_at` count the bytes from the moment that they are set.
    """

    def __init__(self, port: int) -> None:
        self.flip_at: int | None = None
        self.cut_at: int | None = None
        self._target_port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        ways = (
            self._pass(reader, up_writer, is_answer=False),
            self._pass(up_reader, writer, is_answer=True),
        )
        # A reader hangs up in the middle behind a fault, and this is cancelled at the end.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(*ways)
        for end in (writer, up_writer):
            end.close()

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while data := await source.read(1 << 16):
            target.write(self._broken(bytearray(data)) if is_answer else data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()

    def _broken(self, data: bytearray) -> bytearray:
        if self.flip_at is not None:
            if self.flip_at < 8 * len(data):
                data[self.flip_at // 8] ^= 1 << self.flip_at % 8
                self.flip_at = None
            else:
                self.flip_at -= 8 * len(data)
        if self.cut_at is not None:
            if self.cut_at < len(data):
                self.cut_at = None
                raise ConnectionResetError("cut")
            self.cut_at -= len(data)
        return data


Frames = list[bytes]


class Pair:
    """Drives both machines until nothing is left to do; time passes only when they wait.

    What breaks something sets a hook: `tap(sender, kind, frames)` gives what is delivered of a
    message, `on_read` and `on_step` what becomes of a read or a step, `was_read` and `on_hash` are
    called behind a read and before blocks are hashed. `address` is where D reads.
    """

    def __init__(self, *, transfer: str, checksums: str, validate: bool = False) -> None:
        self.now = 100.0
        self.num_waits = 0
        self.logs: Counter[str] = Counter()
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, str] = {}
        self.owner = _make_side("decode", transfer, checksums, validate=validate)
        self.prefill = _make_side("prefill", transfer, checksums, validate=validate)
        self._queue: deque[tuple[Side, ev.Event | Callable[[], None]]] = deque()
        self._server = BulkServer(self.prefill.arena, self._check_read)
        self._server.start()
        self.line = FaultyLine(self._server.port)
        self.address = ""
        self._reader: BulkReader | None = None
        self._is_mapped = transfer == "auto"
        self.restore()

    def restore(self) -> None:
        """Break nothing any more."""
        self.tap: Callable[[Side, str, Frames], list[Frames]] = lambda side, kind, frames: [frames]
        self.on_read: Callable[[do.ReadBlocks], do.ReadBlocks] = lambda read: read
        self.was_read: Callable[[do.ReadBlocks], None] = lambda read: None
        self.on_hash: Callable[[Side, do.HashBlocks], None] = lambda side, hashing: None
        self.on_step: Callable[[Side, Batch], Batch] = lambda side, batch: batch
        self.line.flip_at = self.line.cut_at = None

    async def start(self) -> None:
        port = await self.line.start()
        url = self._server.url_for(self.owner.name.full_name)
        self.address = url.replace(f":{self._server.port}/", f":{port}/")
        registered = encode_body(m.Registered(broker_epoch=1, beat_s=1.0))
        rows = tuple(_peer_row(side) for side in (self.owner, self.prefill))
        for side, other in self._sides():
            self._queue.append((side, ev.Tick()))
            for kind, body in (
                (m.REGISTERED, registered),
                (m.PEERS, encode_body(m.Peers(peers=rows))),
            ):
                header = decode_header(encode_header(kind))
                self._queue.append((side, ev.FromBroker(header, (body,))))
            bulk = self.address if side is self.prefill else "tcp://nobody"
            self._queue.append((side, ev.PeerConnected(other.name, bulk)))
        await self.settle()
        if self._is_mapped:
            arena = self.owner.arena
            shape = ev.ArenaShape(arena.num_blocks, arena.block_bytes, arena.generation)
            self.prefill.device.add_arena(arena_of(self.owner.name), arena.buffer)
            self._queue.append((self.prefill, ev.ArenaAttached(self.owner.name, shape)))
            self._queue.append((self.owner, ev.ArenaMapped(self.prefill.name)))
            await self.settle()

    async def close(self) -> None:
        await self.hang_up()
        await self.line.close()
        await asyncio.to_thread(self._server.close)
        for side, other in self._sides():
            for arena in (LOCAL_ARENA, arena_of(other.name)):
                side.device._arenas.pop(arena, None)
        for side, _ in self._sides():
            side.arena.close()

    async def hang_up(self) -> None:
        if self._reader is not None:
            await self._reader.close()
            self._reader = None

    # -- requests ----------------------------------------------------------------------------

    async def generate(self, request_id: RequestId, prompt: "array[int]", num_tokens: int) -> None:
        """A request that P is to prefill, until it ends; raises `TimeoutError` if it does not."""
        name = self.prefill.name
        route = m.Route(prefill_worker=name.worker_id, prefill_epoch=name.epoch)
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        body = m.Generate(prompt_kind="tokens", sampling=sampling)
        header = encode_header(m.DISPATCH, request_id, attempt=Attempt(1, 1))
        frames = (encode_body(route), encode_body(body), pack_u32(prompt))
        self.tokens[request_id] = []
        self._queue.append((self.owner, ev.FromBroker(decode_header(header), frames)))
        await self.settle()
        for _ in range(60):
            if request_id in self.ends:
                break
            self.num_waits += 1
            await self.wait()
        else:
            raise TimeoutError(f"request {request_id.hex()} did not end")
        self.restore()
        for _ in range(3):  # what was said in vain is said again
            await self.wait()

    def deliver(self, side: Side, event: ev.Event) -> None:
        self._queue.append((side, event))

    async def wait(self) -> None:
        self.now += 1.0
        for side, _ in self._sides():
            self._queue.append((side, ev.Tick()))
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        while self._queue:
            side, event = self._queue.popleft()
            if callable(event):
                event()
                continue
            effects = side.core.handle(event, self.now)
            side.core.check()
            for effect in effects:
                await self._perform(side, effect)

    # -- effects -----------------------------------------------------------------------------

    async def _perform(self, side: Side, effect: do.Effect) -> None:
        match effect:
            case do.RunStep(batch):
                side.steps.append((batch, effect))
                if len(side.steps) == 1:
                    self._begin_step(side)
            case do.SendPeer(_, frames):
                target = self.prefill if side is self.owner else self.owner
                for header, *rest in self.tap(side, decode_header(frames[0]).kind, frames):
                    event = ev.FromPeer(side.name, decode_header(header), tuple(rest))
                    self._queue.append((target, event))
            case do.SendBroker(frames):
                self._note(frames)
            case do.ReadBlocks():
                self._queue.append((side, await self._read(effect)))
            case do.HashBlocks(hash_id, owner, blocks):
                self.on_hash(side, effect)
                arena = side.arena if owner is None else self.owner.arena
                checksums = block_checksums(arena.buffer, arena.block_bytes, blocks)
                self._queue.append((side, ev.BlocksHashed(hash_id, checksums)))
            case do.Log(event, _, _):
                self.logs[event] += 1
            case _:
                pass

    def _begin_step(self, side: Side) -> None:
        self._queue.append((side, ev.StepTaken()))
        self._queue.append((side, lambda: self._end_step(side)))

    def _end_step(self, side: Side) -> None:
        batch, effect = side.steps.popleft()
        if batch.follows:
            assert side.before is not None
            fill(batch, side.before)
        batch = self.on_step(side, batch)
        try:
            check_rights(batch.rows, effect.rights)
            side.before = side.device.run(batch)
            done = ev.StepDone(side.before, self.now)
        except ValueError as error:
            failure = m.Failure(code="internal_error", message=str(error))
            done = ev.StepDone(None, self.now, failure)
        self._queue.append((side, done))
        if side.steps:
            self._begin_step(side)

    def _note(self, frames: Frames) -> None:
        header = decode_header(frames[0])
        if header.kind == m.STEP:
            for row in decode_step(frames):
                self.tokens[row.request_id] += unpack_u32(row.token_ids)
        elif header.kind in (m.FINISHED, m.FAILED):
            self.ends[RequestId(header.request_id)] = header.kind

    async def _read(self, read: do.ReadBlocks) -> ev.BlocksRead:
        read = self.on_read(read)
        try:
            if self._reader is None:
                self._reader = BulkReader(self.address)
            await self._reader.read(
                LeaseId(read.lease_id),
                read.generation,
                [BlockId(block) for block in read.source],
                self.owner.arena,
                [BlockId(block) for block in read.target],
                timeout_s=10.0,
            )
        except LlmrtError as error:
            failure = m.Failure(code=error.error_code, message=error.message)
            return ev.BlocksRead(read.read_id, failure)
        self.was_read(read)
        return ev.BlocksRead(read.read_id)

    def _check_read(self, request: ReadRequest) -> str | None:
        blocks = self.prefill.ledger.leased_blocks(request.lease_id)
        if blocks is None:
            return "the lease has ended"
        return None if set(request.blocks) <= set(blocks) else "the lease does not cover that"

    def _sides(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        return (self.owner, self.prefill), (self.prefill, self.owner)


def _make_side(role: str, transfer: str, checksums: str, *, validate: bool) -> Side:
    name = WorkerName(WorkerId(f"{role}-0"), 7)
    arena = Arena.create(NUM_BLOCKS, CONTRACT.block_bytes, generation=3)

    def checksum(block: BlockId) -> int:
        return block_checksums(arena.buffer, arena.block_bytes, (block,))[0]

    ledger = Ledger(NUM_BLOCKS, generation=3, checksum=checksum if validate else None)
    scheduler = Scheduler(ledger, SchedulerSettings(step_tokens=128, chunk_tokens=64))
    settings = CoreSettings(
        name=name,
        role=role,
        model="bytes",
        contract=CONTRACT,
        process=m.ProcessName(boot_id="b", pid_namespace="n", pid=1, start_ticks=1),
        vocab_size=VOCAB_SIZE,
        max_context=1024,
        num_blocks=NUM_BLOCKS,
        arena_generation=3,
        link="ipc://link",
        arena_socket="/arena",
        broker="tcp://broker",
        transfer=transfer,
        placement="remote",
        checksums=checksums,
    )
    device = ByteDevice()
    device.add_arena(LOCAL_ARENA, arena.buffer)
    return Side(name, WorkerCore(settings, scheduler, SimVocabulary()), scheduler, arena, device)


def _peer_row(side: Side) -> m.Peer:
    return m.Peer(
        worker_id=side.name.worker_id,
        epoch=side.name.epoch,
        role=side.name.worker_id.partition("-")[0],
        link="ipc://link",
        contract=CONTRACT,
        process=m.ProcessName(boot_id="b", pid_namespace="n", pid=1, start_ticks=1),
    )
