"""Reads a peer's blocks over plain TCP into our arena, without a copy in between.

A read is divided over the connections that are free, each on a thread of its own.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.layout import block_views
from llmrt.kvtransfer.tcp_connection import Part, TcpAddress, TcpConnection
from llmrt.kvtransfer.tcp_frames import REQUEST
from llmrt.kvtransfer.transport import LinkOptions
from llmrt.wire.arrays import pack_u32
from llmrt.wire.ids import BlockId, LeaseId

# Less than this is faster over one connection than divided.
MIN_PART_BYTES = 4 << 20


class TcpReader:
    """A bounded pool of connections to a peer's `TcpExporter`, made as they are needed.

    Raises `ProtocolError` if `address` is none of such an exporter.
    """

    def __init__(self, address: str, arena: Arena, options: LinkOptions) -> None:
        self._address = TcpAddress.parse(address)
        self._arena = arena
        self._connections = [
            TcpConnection(self._address, options) for _ in range(options.connections)
        ]
        # The one that was used last comes first: it is connected already.
        self._free: asyncio.LifoQueue[TcpConnection] = asyncio.LifoQueue()
        for connection in self._connections:
            self._free.put_nowait(connection)
        self._is_closing = False
        self._under_way: dict[Part, TcpConnection] = {}
        self._threads = ThreadPoolExecutor(options.connections, thread_name_prefix="kv-read")

    async def read(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        *,
        timeout_s: float,
    ) -> None:
        """As `BlockReader` says; the lease held until the last byte of each part was sent."""
        arena = self._arena
        assert len(src_blocks) == len(dst_blocks) > 0, (len(src_blocks), len(dst_blocks))
        assert 0 <= min(dst_blocks) <= max(dst_blocks) < arena.num_blocks, dst_blocks
        deadline = time.monotonic() + timeout_s
        taken = await self._take(len(src_blocks), timeout_s)
        parts = {
            self._part(
                lease, generation, src_blocks[share], dst_blocks[share], deadline
            ): connection
            for connection, share in zip(taken, _shares(len(src_blocks), len(taken)), strict=True)
        }
        try:
            await self._read(parts)
        except TimeoutError:
            raise self._address.failed(f"it took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise self._address.failed(error.strerror or str(error)) from None
        finally:
            for connection in taken:
                self._free.put_nowait(connection)

    async def close(self) -> None:
        """Hang up; reads that go on fail. Returns when all threads have ended."""
        self._is_closing = True
        self._give_up(self._under_way)
        await asyncio.to_thread(self._threads.shutdown)
        for connection in self._connections:
            connection.close()

    def _part(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        deadline: float,
    ) -> Part:
        arena = self._arena
        request = REQUEST.pack(generation, lease, arena.block_bytes, len(src_blocks))
        views = block_views(arena.buffer, arena.block_bytes, dst_blocks)
        return Part(request + pack_u32(src_blocks), views, deadline)

    async def _take(self, num_blocks: int, timeout_s: float) -> list[TcpConnection]:
        """Connections for a read: one if need be with patience, more if they are free."""
        try:
            async with asyncio.timeout(timeout_s):
                taken = [await self._free.get()]
        except TimeoutError:
            raise self._address.failed(f"earlier reads took {timeout_s:g} s") from None
        if self._is_closing:
            self._free.put_nowait(taken[0])
            raise self._address.failed("the link is closed")
        most = min(num_blocks, num_blocks * self._arena.block_bytes // MIN_PART_BYTES)
        while len(taken) < most and not self._free.empty():
            taken.append(self._free.get_nowait())
        return taken

    async def _read(self, parts: dict[Part, TcpConnection]) -> None:
        """Read all parts. If one fails, or when cancelled, give up and wait for the others."""
        loop = asyncio.get_running_loop()
        self._under_way.update(parts)
        reads = [
            loop.run_in_executor(self._threads, connection.read, part)
            for part, connection in parts.items()
        ]
        first: BaseException | None = None
        try:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
            first = next((error for read in done if (error := read.exception())), None)
        finally:
            self._give_up(part for part, read in zip(parts, reads, strict=True) if not read.done())
            while not all(read.done() for read in reads):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(reads)
            for part, read in zip(parts, reads, strict=True):
                read.exception()
                del self._under_way[part]
        if first is not None:
            raise first

    def _give_up(self, parts: Iterable[Part]) -> None:
        for part in list(parts):
            self._under_way[part].give_up(part)


def _shares(count: int, num_shares: int) -> list[slice]:
    ends = [i * count // num_shares for i in range(num_shares + 1)]
    return [slice(first, last) for first, last in pairwise(ends)]
