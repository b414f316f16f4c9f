"""Bulk reads over loopback: between two processes, and with servers that misbehave."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from llmrt.kvtransfer import tcp_frames
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.ledger import Ledger
from llmrt.kvtransfer.tcp_exporter import TcpExporter
from llmrt.kvtransfer.tcp_frames import ANSWER, HELLO, OK, REQUEST
from llmrt.kvtransfer.tcp_reader import TcpReader
from llmrt.kvtransfer.transport import LinkOptions, ReadRequest
from llmrt.wire.errors import AddressInUse, ProtocolError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId, WorkerId, WorkerName

pytestmark = pytest.mark.integration

NUM_BLOCKS = 64
BLOCK_BYTES = 10_000
GENERATION = 5
LEASE = LeaseId(7)
WAIT_S = 20.0
ONE_TRY = LinkOptions(retries=0)

# Serves an arena whose block i is full of i; the check kills the process at its argv[1]-th call.
SERVER = f"""
import os, signal, sys
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.tcp_exporter import TcpExporter
from llmrt.kvtransfer.transport import LinkOptions

arena = Arena.create({NUM_BLOCKS}, {BLOCK_BYTES}, generation={GENERATION})
for i in range({NUM_BLOCKS}):
    arena.buffer[i * {BLOCK_BYTES} : (i + 1) * {BLOCK_BYTES}] = bytes([i]) * {BLOCK_BYTES}
calls_left = int(sys.argv[1])

def check(request):
    global calls_left
    calls_left -= 1
    if calls_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if request.peer != "decode-0" or request.lease_id != {LEASE}:
        return f"lease {{request.lease_id}} of {{request.peer}} has ended"

server = TcpExporter(arena, check, LinkOptions())
server.start()
print(server.address_for("decode-0"), flush=True)
sys.stdin.read()
server.close()
"""


@contextlib.contextmanager
def server_process(die_at_check: int = 0) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(die_at_check)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        if process.poll() is None:
            process.kill()


@contextlib.asynccontextmanager
async def reading(
    url: str, arena: Arena, options: LinkOptions = ONE_TRY
) -> AsyncIterator[TcpReader]:
    reader = TcpReader(url, arena, options)
    try:
        yield reader
    finally:
        await reader.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NUM_BLOCKS, BLOCK_BYTES)
    yield arena
    arena.close()


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(i) for i in numbers]


def content(arena: Arena) -> list[int]:
    """First byte of every block, whose bytes are all equal."""
    raw = [bytes(arena.buffer[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(NUM_BLOCKS)]
    assert all(block == block[:1] * BLOCK_BYTES for block in raw)
    return [block[0] for block in raw]


async def read(
    reader: TcpReader,
    src: Sequence[BlockId],
    dst: Sequence[BlockId],
    *,
    lease: LeaseId = LEASE,
    generation: int = GENERATION,
    timeout_s: float = WAIT_S,
) -> None:
    await reader.read(lease, generation, src, dst, timeout_s=timeout_s)


# Two processes


def test_blocks_arrive_where_they_belong(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            await read(reader, blocks(3, 4, 5, 60, 1), blocks(10, 0, 1, 2, 63))
            expected = [0] * NUM_BLOCKS
            expected[10], expected[0], expected[1], expected[2], expected[63] = 3, 4, 5, 60, 1
            assert content(arena) == expected
            everything = blocks(*range(NUM_BLOCKS))
            await read(reader, everything, everything[::-1])
            assert content(arena) == list(range(NUM_BLOCKS))[::-1]

    with server_process() as (_, url):
        asyncio.run(main(url))


@pytest.mark.parametrize(
    ("lease", "generation", "src", "reason"),
    [
        (LEASE, GENERATION + 1, 0, "generation 5, not 6"),
        (LEASE, GENERATION - 1, 0, "generation 5, not 4"),
        (LeaseId(8), GENERATION, 0, "lease 8 of decode-0 has ended"),
        (LEASE, GENERATION, 64, "no block 64: the arena has 64"),
        (LEASE, GENERATION, 2**32 - 1, "no block 4294967295"),
    ],
)
def test_a_wrong_read_is_answered_and_the_next_one_works(
    arena: Arena, lease: LeaseId, generation: int, src: int, reason: str
) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed, match=reason):
                await read(reader, blocks(1, src), blocks(0, 1), lease=lease, generation=generation)
            assert content(arena) == [0] * NUM_BLOCKS
            await read(reader, blocks(9), blocks(0))
            assert content(arena)[0] == 9

    with server_process() as (_, url):
        asyncio.run(main(url))


def test_a_peer_of_another_block_size_is_refused() -> None:
    async def main(url: str) -> None:
        arena = Arena.create(4, 4096)
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed, match="a block has 10000 bytes, not 4096"):
                await read(reader, blocks(0), blocks(0))
        arena.close()

    with server_process() as (_, url):
        asyncio.run(main(url))


def test_an_unknown_token_is_refused(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url[:-32] + "00" * 16, arena) as reader:
            for _ in range(2):
                with pytest.raises(TransferFailed, match="token is unknown or revoked"):
                    await read(reader, blocks(0), blocks(0))

    with server_process() as (_, url):
        asyncio.run(main(url))


@pytest.mark.parametrize("check_number", [1, 2])
def test_the_death_of_the_server_fails_the_read(arena: Arena, check_number: int) -> None:
    """Before the first byte, or after the last: without the last word nothing is believed."""

    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            for _ in range(2):
                with pytest.raises(TransferFailed):
                    await read(reader, blocks(*range(64)), blocks(*range(64)))

    with server_process(die_at_check=check_number) as (process, url):
        asyncio.run(main(url))
        assert process.wait(WAIT_S) == -signal.SIGKILL


# Servers in this process


@contextlib.contextmanager
def serving(
    check: Callable[[ReadRequest], str | None] = lambda request: None,
    *,
    num_blocks: int = NUM_BLOCKS,
    block_bytes: int = BLOCK_BYTES,
    max_connections: int = 64,
) -> Iterator[TcpExporter]:
    arena = Arena.create(num_blocks, block_bytes, generation=GENERATION)
    server = TcpExporter(arena, check, LinkOptions(max_readers=max_connections))
    server.start()
    try:
        yield server
    finally:
        server.close()
        arena.close()


def test_a_ledger_is_the_check(arena: Arena) -> None:
    """A lease allows its own blocks for as long as it holds."""
    ledger = Ledger(NUM_BLOCKS)
    reader_name = WorkerName(WorkerId("decode-0"), 1)
    leased = ledger.allocate(4)
    assert leased is not None
    lease_id = ledger.lease(reader_name, leased, expires_at=30.0)

    def check(request: ReadRequest) -> str | None:
        allowed = ledger.leased_blocks(request.lease_id)
        if allowed is None or not set(request.blocks) <= set(allowed):
            return "not leased"
        return None

    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            await read(reader, leased, leased, lease=lease_id)
            with pytest.raises(TransferFailed, match="not leased"):
                await read(reader, blocks(4), blocks(4), lease=lease_id)
            ledger.release_lease(lease_id)
            with pytest.raises(TransferFailed, match="not leased"):
                await read(reader, leased, leased, lease=lease_id)

    with serving(check) as server:
        asyncio.run(main(server.address_for("decode-0")))


def test_a_lease_that_ends_while_bytes_flow_fails_the_read(arena: Arena) -> None:
    answers = iter([None, "the lease has ended", None, None])

    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed, match="the lease has ended"):
                await read(reader, blocks(0), blocks(0))
            await read(reader, blocks(0), blocks(0))

    with serving(lambda request: next(answers)) as server:
        asyncio.run(main(server.address_for("p")))


def test_a_new_token_ends_the_old_one_and_its_connection(arena: Arena) -> None:
    async def main(server: TcpExporter) -> None:
        async with (
            reading(server.address_for("p"), arena) as old,
            reading(server.address_for("q"), arena) as other,
        ):
            await read(other, blocks(0), blocks(0))
            async with reading(server.address_for("p"), arena) as new:
                await read(new, blocks(0), blocks(0))
            with pytest.raises(TransferFailed, match="revoked"):
                await read(old, blocks(0), blocks(0))
            server.revoke("q")
            with pytest.raises(TransferFailed):
                await read(other, blocks(0), blocks(0))

    with serving() as server:
        asyncio.run(main(server))


def test_connections_are_bounded_and_return(arena: Arena) -> None:
    async def main(server: TcpExporter) -> None:
        urls = [server.address_for(name) for name in "abc"]
        async with (
            reading(urls[0], arena) as a,
            reading(urls[1], arena) as b,
            reading(urls[2], arena) as c,
        ):
            await read(a, blocks(0), blocks(0))
            await read(b, blocks(0), blocks(0))
            with pytest.raises(TransferFailed):
                await read(c, blocks(0), blocks(0))
            server.revoke("a")
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(TransferFailed):
                        await read(c, blocks(0), blocks(0))
                        break

    with serving(max_connections=2) as server:
        asyncio.run(main(server))


def test_reads_of_one_reader_wait_for_each_other(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            await asyncio.gather(*[read(reader, blocks(i), blocks(i)) for i in range(20)])

    with serving() as server:
        asyncio.run(main(server.address_for("p")))


def test_a_taken_port_is_refused() -> None:
    with serving() as server:
        arena = Arena.create(1, 1)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{server.port}: Address already"):
            TcpExporter(arena, lambda request: None, LinkOptions(port=server.port)).start()
        arena.close()


def test_closing_leaves_no_file_thread_or_mapping(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            await read(reader, blocks(0, 2), blocks(0, 1))

    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with serving() as server:
            asyncio.run(main(server.address_for("p")))
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


def test_large_reads_stream(arena: Arena) -> None:
    """Far more than the socket's buffers hold, in scattered blocks."""
    block_bytes = 1 << 20
    target = Arena.create(40, block_bytes)

    async def main(url: str) -> None:
        async with reading(url, target) as reader:
            await read(reader, blocks(*range(40)), blocks(*range(39, -1, -1)))

    with serving(num_blocks=40, block_bytes=block_bytes) as server:
        source = server._arena.buffer
        source[:] = os.urandom(len(source))
        asyncio.run(main(server.address_for("p")))
        for i in range(40):
            there = target.buffer[(39 - i) * block_bytes : (40 - i) * block_bytes]
            assert there == source[i * block_bytes : (i + 1) * block_bytes]
    target.close()


# A peer that misbehaves


class OddServer:
    """Does the hello as it should, then sends `answer` and waits for the reader to hang up."""

    def __init__(self, answer: bytes, *, hangs_up: bool) -> None:
        self.answer = answer
        self.hangs_up = hangs_up
        self.has_answered = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}/{'11' * 16}"
        self.thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "OddServer":
        self.thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.listener.close()

    def _serve(self) -> None:
        sock, _ = self.listener.accept()
        with sock, contextlib.suppress(ConnectionResetError):
            sock.settimeout(WAIT_S)
            assert len(sock.recv(HELLO.size, socket.MSG_WAITALL)) == HELLO.size
            sock.sendall(ANSWER.pack(OK, 0))
            assert len(sock.recv(REQUEST.size + 8, socket.MSG_WAITALL)) == REQUEST.size + 8
            sock.sendall(self.answer)
            self.has_answered.set()
            if not self.hangs_up:
                assert sock.recv(1) == b""


async def read_two(reader: TcpReader, timeout_s: float = WAIT_S) -> None:
    await read(reader, blocks(0, 1), blocks(0, 1), timeout_s=timeout_s)


HALF = ANSWER.pack(OK, 2 * BLOCK_BYTES) + bytes(BLOCK_BYTES)


def test_a_peer_that_dies_halfway_fails_the_read(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed, match="the peer hung up"):
                await read_two(reader)

    with OddServer(HALF, hangs_up=True) as server:
        asyncio.run(main(server.url))


def test_a_peer_that_stalls_fails_the_read_at_its_deadline(arena: Arena) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed, match=r"longer than 0\.05 s"):
                await read_two(reader, timeout_s=0.05)

    with OddServer(HALF, hangs_up=False) as server:
        asyncio.run(main(server.url))


def test_a_cancelled_read_has_let_go_of_the_blocks(arena: Arena) -> None:
    """Cancelling hangs up and waits for the thread: the blocks can be given to another."""

    async def main(server: OddServer) -> None:
        async with reading(server.url, arena) as reader:
            task = asyncio.create_task(read_two(reader))
            assert await asyncio.to_thread(server.has_answered.wait, WAIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert reader._under_way == {}
            assert reader._free.qsize() == len(reader._connections)

    with OddServer(HALF, hangs_up=False) as server:
        asyncio.run(main(server))


def test_closing_a_reader_fails_the_read_that_goes_on(arena: Arena) -> None:
    async def main(server: OddServer) -> None:
        async with reading(server.url, arena) as reader:
            task = asyncio.create_task(read_two(reader))
            assert await asyncio.to_thread(server.has_answered.wait, WAIT_S)
            await reader.close()
            with pytest.raises(TransferFailed):
                await task

    with OddServer(HALF, hangs_up=False) as server:
        asyncio.run(main(server))


@pytest.mark.parametrize(
    "answer", [ANSWER.pack(OK, 5), ANSWER.pack(9, 5), ANSWER.pack(1, 2**60)], ids=str
)
def test_an_answer_that_makes_no_sense_fails_the_read(arena: Arena, answer: bytes) -> None:
    async def main(url: str) -> None:
        async with reading(url, arena) as reader:
            with pytest.raises(TransferFailed):
                await read_two(reader)

    with OddServer(answer + bytes(5), hangs_up=False) as server:
        asyncio.run(main(server.url))


def test_nobody_at_the_address_fails_the_read(arena: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def main() -> None:
        async with reading(f"tcp://127.0.0.1:{port}/{'11' * 16}", arena) as reader:
            with pytest.raises(TransferFailed, match=f"127.0.0.1:{port}: Connection refused"):
                await read(reader, blocks(0), blocks(0))

    asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "tcp://127.0.0.1/" + "11" * 16,
        "tcp://127.0.0.1:70000/" + "11" * 16,
        "tcp://127.0.0.1:7000/11",
        "tcp://127.0.0.1:7000/" + "xy" * 16,
        "ipc://127.0.0.1:7000/" + "11" * 16,
        "tcp://[::1:7000/" + "11" * 16,
    ],
)
def test_what_is_no_bulk_address_is_refused(url: str, arena: Arena) -> None:
    with pytest.raises(ProtocolError, match="no tcp://HOST:PORT/TOKEN"):
        TcpReader(url, arena, LinkOptions())


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n......",
        bytes(HELLO.size),
        HELLO.pack(tcp_frames.MAGIC, bytes(16)),
    ],
    ids=["http", "zeros", "token"],
)
def test_strangers_get_no_bytes(greeting: bytes) -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        server.address_for("p")
        sock.settimeout(WAIT_S)
        sock.sendall(greeting)
        answer = sock.recv(1000)
        assert answer[:1] != bytes([OK])
        assert len(answer) < 200


@pytest.mark.parametrize("num_blocks", [0, NUM_BLOCKS + 1, 2**32 - 1])
def test_a_request_for_no_or_too_many_blocks_is_refused(num_blocks: int) -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(WAIT_S)
        token = bytes.fromhex(server.address_for("p")[-32:])
        sock.sendall(HELLO.pack(tcp_frames.MAGIC, token))
        assert ANSWER.unpack(sock.recv(ANSWER.size)) == (OK, 0)
        sock.sendall(REQUEST.pack(GENERATION, LEASE, BLOCK_BYTES, num_blocks))
        assert b"1 to 64 exist" in sock.recv(1000)
        assert sock.recv(1) == b""


# The pool


def test_a_large_read_is_divided_and_a_small_one_is_not() -> None:
    block_bytes = 1 << 20
    target = Arena.create(40, block_bytes)
    sizes: list[int] = []

    def check(request: ReadRequest) -> None:
        sizes.append(len(request.blocks))

    async def main(url: str) -> None:
        async with reading(url, target, LinkOptions(connections=3)) as reader:
            await read(reader, blocks(*range(4)), blocks(*range(4)))
            assert sizes == [4, 4]  # asked before the first byte and behind the last
            sizes.clear()
            await read(reader, blocks(*range(40)), blocks(*range(40)))
            assert sorted(sizes) == [13, 13, 13, 13, 14, 14]

    with serving(check, num_blocks=40, block_bytes=block_bytes) as server:
        asyncio.run(main(server.address_for("p")))
    target.close()


@pytest.mark.parametrize(("retries", "is_read"), [(0, False), (1, True)])
def test_a_connection_that_broke_is_made_again(arena: Arena, retries: int, is_read: bool) -> None:
    async def main(server: TcpExporter) -> None:
        url = server.address_for("p")
        async with reading(url, arena, LinkOptions(retries=retries)) as reader:
            await read(reader, blocks(0), blocks(0))
            for sock in list(server._connections):
                sock.shutdown(socket.SHUT_RDWR)
            if is_read:
                await read(reader, blocks(0), blocks(0))
            else:
                with pytest.raises(TransferFailed):
                    await read(reader, blocks(0), blocks(0))

    with serving() as server:
        asyncio.run(main(server))


def test_a_part_that_is_refused_ends_the_whole_read() -> None:
    block_bytes = 1 << 20
    target = Arena.create(40, block_bytes)

    def check(request: ReadRequest) -> str | None:
        return "not leased" if 39 in request.blocks else None

    async def main(url: str) -> None:
        async with reading(url, target, LinkOptions(connections=4)) as reader:
            with pytest.raises(TransferFailed, match="not leased"):
                await read(reader, blocks(*range(40)), blocks(*range(40)))
            assert reader._under_way == {}
            await read(reader, blocks(*range(8)), blocks(*range(8)))

    with serving(check, num_blocks=40, block_bytes=block_bytes) as server:
        asyncio.run(main(server.address_for("p")))
    target.close()
