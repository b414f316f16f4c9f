"""What every transport of bulk links does alike, between two processes."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.transport import PROBE_LEASE, BlockReader, LinkOptions, Transport
from llmrt.kvtransfer.transports import TRANSPORTS
from llmrt.wire.errors import ProtocolError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId

pytestmark = pytest.mark.integration

NUM_BLOCKS, BLOCK_BYTES, GENERATION = 96, 1 << 20, 5
LEASE = LeaseId(7)
WAIT_S = 30.0
UNTOUCHED = 255

# Serves an arena whose block i is full of i to as many peers as argv[2] says.
OWNER = f"""
import sys
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.transport import LinkOptions
from llmrt.kvtransfer.transports import TRANSPORTS

arena = Arena.create({NUM_BLOCKS}, {BLOCK_BYTES}, generation={GENERATION})
for i in range({NUM_BLOCKS}):
    arena.buffer[i * {BLOCK_BYTES} : (i + 1) * {BLOCK_BYTES}] = bytes([i]) * {BLOCK_BYTES}
exporter = TRANSPORTS[sys.argv[1]].exporter(arena, lambda request: None, LinkOptions())
exporter.start()
print(*(exporter.address_for(f"peer-{{i}}") for i in range(int(sys.argv[2]))), flush=True)
sys.stdin.read()
exporter.close()
"""
# Reads everything in a loop, until it is killed.
READER = f"""
import asyncio, sys
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.transport import LinkOptions
from llmrt.kvtransfer.transports import TRANSPORTS

async def main():
    arena = Arena.create({NUM_BLOCKS}, {BLOCK_BYTES})
    reader = TRANSPORTS[sys.argv[1]].reader(sys.argv[2], arena, LinkOptions())
    blocks = range({NUM_BLOCKS})
    while True:
        await reader.read({LEASE}, {GENERATION}, blocks, blocks, timeout_s={WAIT_S})
        print("read", flush=True)

asyncio.run(main())
"""


class Owner:
    """A process that serves an arena."""

    def __init__(self, transport: Transport, num_peers: int = 1) -> None:
        self.process = _start(OWNER, transport.scheme, str(num_peers))
        assert self.process.stdout is not None
        self.addresses = self.process.stdout.readline().split()
        assert len(self.addresses) == num_peers

    def pause(self) -> None:
        """When it returns, no thread of the process runs."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def die(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


def _start(source: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    transport = TRANSPORTS[request.param]
    reason = transport.why_not()
    if reason is not None:
        pytest.skip(reason)
    return transport


@pytest.fixture
def owner(transport: Transport) -> Iterator[Owner]:
    owner = Owner(transport)
    yield owner
    owner.die()
    for stream in (owner.process.stdin, owner.process.stdout):
        assert stream is not None
        stream.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NUM_BLOCKS, BLOCK_BYTES)
    arena.buffer[:] = bytes([UNTOUCHED]) * arena.size_bytes
    yield arena
    arena.close()


@contextlib.asynccontextmanager
async def reading(transport: Transport, address: str, arena: Arena) -> AsyncIterator[BlockReader]:
    reader = transport.reader(address, arena, LinkOptions(connect_timeout_s=2))
    try:
        yield reader
    finally:
        await reader.close()


async def read(
    reader: BlockReader,
    source: list[int],
    target: list[int],
    *,
    lease: LeaseId = LEASE,
    generation: int = GENERATION,
    timeout_s: float = WAIT_S,
) -> None:
    await reader.read(
        lease,
        generation,
        [BlockId(i) for i in source],
        [BlockId(i) for i in target],
        timeout_s=timeout_s,
    )


def content(arena: Arena) -> list[int]:
    """The byte that each block is full of, -1 for a block of several."""
    found = []
    for i in range(NUM_BLOCKS):
        block = bytes(arena.buffer[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
        found.append(block[0] if block == block[:1] * BLOCK_BYTES else -1)
    return found


EVERYTHING = list(range(NUM_BLOCKS))


async def read_and_pause(reader: BlockReader, owner: Owner, arena: Arena) -> "asyncio.Task[None]":
    """A read of everything, whose owner stands still when it is under way.

    A read may have ended before: then it is done, and everything is there.
    """
    task = asyncio.create_task(read(reader, EVERYTHING, EVERYTHING))
    deadline = time.monotonic() + WAIT_S
    firsts = arena.buffer[::BLOCK_BYTES]
    while all(first == UNTOUCHED for first in firsts):
        assert time.monotonic() < deadline, "no byte came"
        await asyncio.sleep(0)
    owner.pause()
    return task


def test_an_address_names_its_transport(transport: Transport, owner: Owner) -> None:
    assert owner.addresses[0].startswith(f"{transport.scheme}://")


def test_what_is_no_address_is_refused(transport: Transport, arena: Arena) -> None:
    for address in ("", "x", f"{transport.scheme}://", f"{transport.scheme}://a:1/zz"):
        with pytest.raises(ProtocolError):
            transport.reader(address, arena, LinkOptions())


def test_random_blocks_go_where_they_belong(
    transport: Transport, owner: Owner, arena: Arena
) -> None:
    rng = random.Random(transport.scheme)

    async def main() -> None:
        expected = [UNTOUCHED] * NUM_BLOCKS
        async with reading(transport, owner.addresses[0], arena) as reader:
            for count in (1, 2, 3, 17, 40, NUM_BLOCKS, 1):
                source = rng.sample(EVERYTHING, count)
                target = rng.sample(EVERYTHING, count)
                await read(reader, source, target)
                for from_block, to_block in zip(source, target, strict=True):
                    expected[to_block] = from_block
                assert content(arena) == expected

    asyncio.run(main())


def test_reads_at_once_do_not_mix(transport: Transport, owner: Owner, arena: Arena) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            reads = [
                read(reader, EVERYTHING[first::8], EVERYTHING[first::8][::-1]) for first in range(8)
            ]
            await asyncio.gather(*reads)

    asyncio.run(main())
    expected = [0] * NUM_BLOCKS
    for first in range(8):
        for from_block, to_block in zip(EVERYTHING[first::8], EVERYTHING[first::8][::-1]):  # noqa: B905
            expected[to_block] = from_block
    assert content(arena) == expected


@pytest.mark.parametrize(
    ("generation", "block"), [(GENERATION + 1, 0), (GENERATION - 1, 0), (GENERATION, NUM_BLOCKS)]
)
def test_a_stale_generation_or_foreign_block_is_refused_and_the_next_read_works(
    transport: Transport, owner: Owner, arena: Arena, generation: int, block: int
) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            with pytest.raises(TransferFailed):
                await read(reader, [1, block], [0, 1], generation=generation)
            assert content(arena) == [UNTOUCHED] * NUM_BLOCKS
            await read(reader, [9], [0])
            assert content(arena)[0] == 9

    asyncio.run(main())


def test_a_probe_needs_no_lease(transport: Transport, owner: Owner, arena: Arena) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            await read(reader, [3], [0], lease=PROBE_LEASE)

    asyncio.run(main())
    assert content(arena)[0] == 3


def test_a_slow_link_fails_the_read_at_its_deadline_and_writes_no_more(
    transport: Transport, owner: Owner, arena: Arena
) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            await read(reader, [1], [0])
            owner.pause()
            start = time.monotonic()
            with pytest.raises(TransferFailed):
                await read(reader, EVERYTHING, EVERYTHING, timeout_s=0.3)
            assert time.monotonic() - start < WAIT_S / 2
            arena.buffer[:] = bytes([UNTOUCHED]) * arena.size_bytes
            owner.go_on()
            await asyncio.sleep(0.3)
            assert content(arena) == [UNTOUCHED] * NUM_BLOCKS
            await read(reader, [2], [0])
            assert content(arena)[0] == 2

    asyncio.run(main())


def test_a_cancelled_read_writes_no_more(transport: Transport, owner: Owner, arena: Arena) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            task = await read_and_pause(reader, owner, arena)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            arena.buffer[:] = bytes([UNTOUCHED]) * arena.size_bytes
            owner.go_on()
            await asyncio.sleep(0.3)
            assert content(arena) == [UNTOUCHED] * NUM_BLOCKS
            await read(reader, [2], [0])

    asyncio.run(main())


def test_closing_fails_reads_that_go_on(transport: Transport, owner: Owner, arena: Arena) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            await read(reader, [1], [0])
            owner.pause()
            task = asyncio.create_task(read(reader, EVERYTHING, EVERYTHING))
            await asyncio.sleep(0.1)
            await reader.close()
            with pytest.raises(TransferFailed):
                await task

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "idle", "under way"])
def test_the_death_of_the_owner_fails_the_read(
    transport: Transport, owner: Owner, arena: Arena, when: str
) -> None:
    async def main() -> None:
        async with reading(transport, owner.addresses[0], arena) as reader:
            if when == "under way":
                task = await read_and_pause(reader, owner, arena)
                owner.die()
                if content(arena) != EVERYTHING:
                    with pytest.raises(TransferFailed):
                        await task
                else:
                    await asyncio.gather(task, return_exceptions=True)
            elif when == "idle":
                await read(reader, [1], [0])
            owner.die()
            for _ in range(2):
                with pytest.raises(TransferFailed):
                    await read(reader, EVERYTHING, EVERYTHING, timeout_s=5)

    asyncio.run(main())


def test_the_death_of_a_reader_harms_no_other(transport: Transport, arena: Arena) -> None:
    owner = Owner(transport, num_peers=2)
    with owner.process:
        with _start(READER, transport.scheme, owner.addresses[1]) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "read\n"
            other.kill()

        async def main() -> None:
            async with reading(transport, owner.addresses[0], arena) as reader:
                await read(reader, EVERYTHING, EVERYTHING[::-1])

        asyncio.run(main())
        owner.die()
    assert content(arena) == EVERYTHING[::-1]
