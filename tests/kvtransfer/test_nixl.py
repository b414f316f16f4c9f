"""Reads through NIXL between two real processes, over UCX's shared memory and TCP."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_agent import is_installed
from llmrt.kvtransfer.nixl_exporter import NixlExporter
from llmrt.kvtransfer.nixl_reader import NixlReader
from llmrt.wire.errors import TransferFailed
from llmrt.wire.ids import BlockId, LeaseId

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_installed(), reason="NIXL is not installed (the extra `rdma`)"),
]

NUM_BLOCKS = 64
BLOCK_BYTES = 64 << 10
GENERATION = 5
LEASE = LeaseId(7)
WAIT_S = 60.0

# Serves an arena whose block i is full of i. A line of its input is a command, and it answers each
# with one line; `read` and `moved` come by themselves.
SERVER = f"""
import os, sys
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_exporter import NixlExporter
from llmrt.wire.errors import TransferFailed

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

arena = Arena.create({NUM_BLOCKS}, {BLOCK_BYTES}, generation={GENERATION})
for i in range({NUM_BLOCKS}):
    arena.buffer[i * {BLOCK_BYTES} : (i + 1) * {BLOCK_BYTES}] = bytes([i]) * {BLOCK_BYTES}
exporter = NixlExporter(
    arena,
    on_read=lambda end: say("read", end.peer, end.lease_id, end.transfer_id, end.num_blocks),
    on_moved=lambda: say("moved"),
)
exporter.start()
for line in sys.stdin:
    command, *peer = line.split()
    if command == "address":
        try:
            say(exporter.address_for(*peer))
        except TransferFailed:
            say("starting")
    elif command == "revoke":
        say(exporter.revoke(*peer))
    elif command == "strangers":
        say(exporter.num_strangers)
    elif command == "pid":
        say(exporter._child._process.pid)
exporter.close()
"""


class Server:
    """The serving worker, in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        self._news: list[str] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def news(self, kind: str) -> str:
        """The next line of that kind that comes, or came, by itself."""
        while not (line := self._news.pop(0) if self._news else self.line()).startswith(kind):
            assert line, "the server ended"
        return line

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        while (line := self.line()).startswith(("read ", "moved")):
            self._news.append(line)
        return line

    def nixl_pid(self) -> int:
        return int(self.ask("pid"))


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    with server.process:
        try:
            yield server
        finally:
            assert server.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                server.process.stdin.close()
            try:
                server.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                raise


@contextlib.asynccontextmanager
async def reading(address: str, arena: Arena) -> AsyncIterator[NixlReader]:
    reader = NixlReader(address, arena)
    try:
        yield reader
    finally:
        await reader.close()


@pytest.fixture(params=["shm,tcp", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Over TCP the serving process must lend a hand; over shared memory it need not."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def over_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "shm,tcp")


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NUM_BLOCKS, BLOCK_BYTES)
    clear(arena)
    yield arena
    arena.close()


EMPTY = 255


def clear(arena: Arena) -> None:
    arena.buffer[:] = bytes([EMPTY]) * arena.size_bytes


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(i) for i in numbers]


ALL = blocks(*range(NUM_BLOCKS))


def content(arena: Arena) -> list[int]:
    """First byte of every block, whose bytes are all equal."""
    raw = [bytes(arena.buffer[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(NUM_BLOCKS)]
    assert all(block == block[:1] * BLOCK_BYTES for block in raw)
    return [block[0] for block in raw]


async def read(
    reader: NixlReader,
    src: Sequence[BlockId],
    dst: Sequence[BlockId],
    *,
    generation: int = GENERATION,
    timeout_s: float = WAIT_S,
) -> None:
    await reader.read(LEASE, generation, src, dst, timeout_s=timeout_s)


def nixl_pid(reader: NixlReader) -> int:
    assert reader._child is not None
    return reader._child._process.pid


def is_running(pid: int) -> bool:
    """False for a zombie, too: it has let go of everything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_running(pid):
        assert time.monotonic() < deadline, pid
        time.sleep(0.005)


def test_random_blocks_go_where_they_belong(arena: Arena, transports: str) -> None:
    """Also sets with neighbours, which NIXL merges, and one block to several places."""
    rng = random.Random(transports)

    async def main(address: str) -> None:
        async with reading(address, arena) as reader:
            for _ in range(20):
                count = rng.randint(1, NUM_BLOCKS)
                src = [rng.choice(ALL) for _ in range(count)]
                dst = rng.sample(ALL, count)
                if rng.random() < 0.5:
                    src.sort()
                    dst.sort()
                clear(arena)
                await read(reader, src, dst)
                expected = [EMPTY] * NUM_BLOCKS
                for source, target in zip(src, dst, strict=True):
                    expected[target] = source
                assert content(arena) == expected

    with serving() as server:
        asyncio.run(main(server.ask("address decode-0")))


def test_reads_of_two_peers_at_once(arena: Arena, transports: str) -> None:
    """Each reader queues its own reads; those of two go on side by side."""

    async def main(first: str, second: str) -> None:
        async with reading(first, arena) as a, reading(second, arena) as b:
            await asyncio.gather(
                *[read(reader, blocks(i), blocks(i)) for i, reader in enumerate([a, b] * 32)]
            )
            assert content(arena) == ALL

    with serving() as server:
        asyncio.run(main(server.ask("address decode-0"), server.ask("address decode-1")))


def test_the_server_learns_the_end_of_each_read_and_whose_it_was(
    arena: Arena, over_shm: None
) -> None:
    async def main(server: Server) -> None:
        ours, other = server.ask("address decode-0"), server.ask("address decode-1")
        async with reading(ours, arena) as reader, reading(other, arena) as stranger:
            await read(reader, blocks(1, 2), blocks(1, 2))
            assert await asyncio.to_thread(server.news, "read") == "read decode-0 7 1 2"
            await read(reader, blocks(3), blocks(3))
            assert await asyncio.to_thread(server.news, "read") == "read decode-0 7 2 1"
            server.ask("revoke decode-1")
            await read(stranger, blocks(4), blocks(4))
            deadline = time.monotonic() + WAIT_S
            while server.ask("strangers") == "0":
                assert time.monotonic() < deadline
            assert server.ask("strangers") == "1"

    with serving() as server:
        asyncio.run(main(server))


@pytest.mark.parametrize(
    ("generation", "src", "reason"),
    [
        (GENERATION + 1, 0, "generation 5, not 6"),
        (GENERATION - 1, 0, "generation 5, not 4"),
        (GENERATION, NUM_BLOCKS, "no block 64: the arena has 64"),
        (GENERATION, 2**32 - 1, "no block 4294967295"),
    ],
)
def test_a_wrong_read_never_reaches_nixl(
    arena: Arena, over_tcp: None, generation: int, src: int, reason: str
) -> None:
    async def main(address: str) -> None:
        async with reading(address, arena) as reader:
            with pytest.raises(TransferFailed, match=reason):
                await read(reader, blocks(1, src), blocks(0, 1), generation=generation)
            assert reader._child is None

    with serving() as server:
        asyncio.run(main(server.ask("address decode-0")))


def test_a_peer_of_another_block_size_is_refused(over_tcp: None) -> None:
    async def main(address: str) -> None:
        arena = Arena.create(4, 4096)
        async with reading(address, arena) as reader:
            with pytest.raises(TransferFailed, match="a block has 65536 bytes, not 4096"):
                await read(reader, blocks(0), blocks(0))
        arena.close()

    with serving() as server:
        asyncio.run(main(server.ask("address decode-0")))


def test_the_death_of_the_server_fails_reads_and_its_successor_is_read(
    arena: Arena, transports: str
) -> None:
    """Between two reads, and before the first: the address of an earlier life leads nowhere."""

    async def main(server: Server, successor: Server) -> None:
        address = server.ask("address decode-0")
        pid = server.nixl_pid()
        async with reading(address, arena) as reader:
            await read(reader, ALL, ALL)
            server.process.kill()
            wait_for_end(pid)
            for _ in range(2):
                with pytest.raises(TransferFailed):
                    await read(reader, ALL, ALL)
            assert reader._child is None
        async with reading(address, arena) as stale:
            with pytest.raises(TransferFailed):
                await read(stale, ALL, ALL)
        clear(arena)
        async with reading(successor.ask("address decode-0"), arena) as reader:
            await read(reader, ALL, ALL)
            assert content(arena) == ALL

    with serving() as server, serving() as successor:
        asyncio.run(main(server, successor))


def test_the_death_of_the_server_ends_a_read_that_goes_on(arena: Arena, over_tcp: None) -> None:
    async def main(server: Server) -> None:
        async with reading(server.ask("address decode-0"), arena) as reader:
            await read(reader, blocks(0), blocks(0))
            pid = server.nixl_pid()
            os.kill(pid, signal.SIGSTOP)
            task = asyncio.create_task(read(reader, ALL, ALL))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(TransferFailed):
                await task

    with serving() as server:
        asyncio.run(main(server))


def test_a_server_whose_nixl_process_died_has_new_addresses(arena: Arena, transports: str) -> None:
    async def main(server: Server) -> None:
        old = server.ask("address decode-0")
        os.kill(server.nixl_pid(), signal.SIGKILL)
        await asyncio.to_thread(server.news, "moved")
        async with reading(old, arena) as reader:
            with pytest.raises(TransferFailed):
                await read(reader, ALL, ALL)
        clear(arena)
        async with reading(server.ask("address decode-0"), arena) as reader:
            await read(reader, ALL, ALL)
            assert content(arena) == ALL

    with serving() as server:
        asyncio.run(main(server))


async def read_all_at_last(server: Server, arena: Arena) -> None:
    """The server's NIXL process does what was left to do, or dies of it and is started again."""
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline
        address = server.ask("address decode-0")
        if address == "starting":
            server.news("moved")
            continue
        async with reading(address, arena) as reader:
            with contextlib.suppress(TransferFailed):
                await read(reader, ALL, ALL[::-1])
                break
    assert content(arena) == ALL[::-1]


@pytest.mark.parametrize("end", ["timeout", "cancel", "close"])
def test_a_read_that_is_given_up_writes_no_more(arena: Arena, over_tcp: None, end: str) -> None:
    """The peer stands still in mid-read and goes on later: then nobody is there to write."""

    async def main(server: Server) -> None:
        async with reading(server.ask("address decode-0"), arena) as reader:
            await read(reader, blocks(0), blocks(0))
            clear(arena)
            pid, ours = server.nixl_pid(), nixl_pid(reader)
            os.kill(pid, signal.SIGSTOP)
            try:
                task = asyncio.create_task(
                    read(reader, ALL, ALL, timeout_s=0.5 if end == "timeout" else WAIT_S)
                )
                assert not (await asyncio.wait([task], timeout=0.1))[0]
                if end == "cancel":
                    task.cancel()
                elif end == "close":
                    await reader.close()
                with pytest.raises(asyncio.CancelledError if end == "cancel" else TransferFailed):
                    await task
                assert not is_running(ours)
                assert content(arena) == [EMPTY] * NUM_BLOCKS
            finally:
                os.kill(pid, signal.SIGCONT)

    with serving() as server:
        asyncio.run(main(server))
        assert content(arena) == [EMPTY] * NUM_BLOCKS
        asyncio.run(read_all_at_last(server, arena))


def test_a_cancelled_read_of_a_healthy_peer_costs_no_new_process(
    arena: Arena, transports: str
) -> None:
    async def main(server: Server) -> None:
        async with reading(server.ask("address decode-0"), arena) as reader:
            await read(reader, blocks(0), blocks(0))
            ours = nixl_pid(reader)
            task = asyncio.create_task(read(reader, ALL, ALL))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            clear(arena)
            await read(reader, blocks(9), blocks(1))
            assert nixl_pid(reader) == ours
            assert content(arena) == [EMPTY, 9] + [EMPTY] * (NUM_BLOCKS - 2)

    with serving() as server:
        asyncio.run(main(server))


def test_the_death_of_our_nixl_process_fails_the_read_and_the_next_one_works(
    arena: Arena, over_tcp: None
) -> None:
    async def main(server: Server) -> None:
        async with reading(server.ask("address decode-0"), arena) as reader:
            await read(reader, blocks(0), blocks(0))
            os.kill(nixl_pid(reader), signal.SIGKILL)
            with pytest.raises(TransferFailed, match="its NIXL process died of SIGKILL"):
                await read(reader, blocks(1), blocks(1))
            await read(reader, blocks(1), blocks(1))
            assert content(arena)[1] == 1

    with serving() as server:
        asyncio.run(main(server))


# A worker that reads a block, says the pid of its NIXL process and, told so, reads all blocks.
READER = f"""
import asyncio, sys
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_reader import NixlReader

ALL = list(range({NUM_BLOCKS}))

async def main():
    reader = NixlReader(sys.argv[1], Arena.create({NUM_BLOCKS}, {BLOCK_BYTES}))
    await reader.read({LEASE}, {GENERATION}, [0], [0], timeout_s={WAIT_S})
    print(reader._child._process.pid, flush=True)
    sys.stdin.readline()
    task = asyncio.create_task(reader.read({LEASE}, {GENERATION}, ALL, ALL, timeout_s={WAIT_S}))
    await asyncio.wait([task], timeout=0.1)
    print("reads" if not task.done() else "has read", flush=True)
    await task

asyncio.run(main())
"""


@contextlib.contextmanager
def reading_process(address: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [sys.executable, "-c", READER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        yield worker
        worker.kill()


def test_no_process_outlives_its_worker(arena: Arena, transports: str) -> None:
    with serving() as server, reading_process(server.ask("address decode-0")) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.kill()
        wait_for_end(pid)
        pid = server.nixl_pid()
        server.process.kill()
        wait_for_end(pid)


def test_a_reader_that_dies_in_mid_read_leaves_a_server_that_serves(
    arena: Arena, over_tcp: None
) -> None:
    with serving() as server, reading_process(server.ask("address decode-0")) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        theirs, pid = int(worker.stdout.readline()), server.nixl_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "reads\n"
            worker.kill()
            wait_for_end(theirs)
        finally:
            os.kill(pid, signal.SIGCONT)
        asyncio.run(read_all_at_last(server, arena))


@pytest.mark.parametrize("moment", ["serving", "lost", "starting"])
def test_an_exporter_closes_at_any_time(arena: Arena, over_tcp: None, moment: str) -> None:
    """Also when its process has died, and while the next one starts."""
    exporter = NixlExporter(arena)
    exporter.start()
    first = exporter._child
    assert first is not None
    if moment != "serving":
        os.kill(first._process.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while moment == "starting" and exporter._child in (None, first):
        assert time.monotonic() < deadline
    exporter.close()
    assert time.monotonic() < deadline - WAIT_S / 2
    assert not exporter._watcher.is_alive()
    for child in (first, exporter._child):
        assert child is None or not is_running(child._process.pid)


def test_closing_leaves_no_file_and_no_process(arena: Arena, over_tcp: None) -> None:
    async def main(server: Server) -> None:
        address = server.ask("address decode-0")
        async with reading(address, arena) as reader:  # the first opens what stays open
            await read(reader, blocks(0), blocks(0))
        num_files = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            async with reading(address, arena) as reader:
                await read(reader, blocks(0), blocks(0))
                pid = nixl_pid(reader)
            assert not is_running(pid)
        assert len(os.listdir("/proc/self/fd")) == num_files

    with serving() as server:
        asyncio.run(main(server))


def test_without_a_device_the_start_fails_and_says_so(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be TCP otherwise, a hundred times slower and without a word."""
    monkeypatch.setenv("UCX_TLS", "shm")
    exporter = NixlExporter(arena)
    with pytest.raises(TransferFailed, match="KV cannot be read by NIXL: nixl"):
        exporter.start()
    exporter.close()
