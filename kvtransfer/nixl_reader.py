"""Reads a peer's blocks through NIXL (RDMA) into our arena, which must be a memfd in host memory.

NIXL runs in a process of its own per reader, started by the first read (0.7 s, and the time to
register our arena). NIXL cannot end a transfer, but the end of a process does: whatever goes wrong,
that process is killed before a read returns, and the next read starts another.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Coroutine, Sequence

import msgspec

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_address import Notice, parse_url
from llmrt.kvtransfer.nixl_child import NixlChild
from llmrt.kvtransfer.nixl_frames import (
    LENGTH,
    Done,
    Failed,
    Open,
    Opened,
    Read,
    Report,
    decode_report,
    encode,
)
from llmrt.wire.arrays import pack_u32
from llmrt.wire.errors import TransferFailed
from llmrt.wire.ids import BlockId, LeaseId

# A cancelled read of a peer that is well ends by itself in that time, and costs no new process.
CANCEL_GRACE_S = 0.5


class NixlReader:
    """The end of a link to one peer that reads. `address` is what its exporter told us.

    One read at a time. Raises `ProtocolError` if `address` is no address of NIXL's.
    """

    def __init__(self, address: str, arena: Arena) -> None:
        self._peer, self._token = parse_url(address)
        self._arena = arena
        self._num_transfers = 0
        self._lock = asyncio.Lock()
        self._child: NixlChild | None = None
        self._limit: asyncio.Timeout | None = None

    async def read(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        *,
        timeout_s: float,
    ) -> None:
        """Copy `src_blocks` of the peer's arena into `dst_blocks` of ours, in that order.

        Returns when all bytes are there; whether the lease held meanwhile, only the peer can say.
        Raises `TransferFailed` if the peer dies, or it takes longer than `timeout_s`. Either way,
        and when cancelled, nothing writes to `dst_blocks` afterwards.
        """
        assert len(src_blocks) == len(dst_blocks) > 0, (len(src_blocks), len(dst_blocks))
        assert 0 <= min(dst_blocks) <= max(dst_blocks) < self._arena.num_blocks, dst_blocks
        reason = self._refuse(generation, src_blocks)
        if reason is not None:
            raise self._failed(reason)
        deadline = asyncio.get_running_loop().time() + timeout_s
        too_slow = f"it took longer than {timeout_s:g} s"
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise self._failed(f"earlier reads took {timeout_s:g} s") from None
        try:
            self._num_transfers += 1
            notice = Notice(self._token, lease, self._num_transfers, len(src_blocks)).pack()
            order = Read(pack_u32(src_blocks), pack_u32(dst_blocks), notice)
            await self._run(self._transfer(order, deadline, too_slow))
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End the process; a read that goes on fails."""
        self._hurry(0)
        async with self._lock:
            await self._end_child()

    async def _run(self, transfer: Coroutine[None, None, None]) -> None:
        """Run `transfer`; when cancelled, wait until it has let go of the blocks."""
        task = asyncio.create_task(transfer)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._hurry(CANCEL_GRACE_S)
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            task.exception()
            raise

    async def _transfer(self, order: Read, deadline: float, too_slow: str) -> None:
        try:
            async with asyncio.timeout_at(deadline) as self._limit:
                report = await self._ask(order)
            if isinstance(report, Done):
                return
            reason = report.reason if isinstance(report, Failed) else f"it answered {report}"
        except TimeoutError:
            reason = too_slow
        except (OSError, msgspec.MsgspecError):
            reason = ""
        finally:
            self._limit = None
        how = await self._end_child()
        raise self._failed(reason or how)

    async def _ask(self, order: Read) -> Report:
        """The answer to `order`, or why there is no process to give one."""
        if self._child is None:
            arena = self._arena
            start = Open(
                agent=f"reader-{secrets.token_hex(8)}",
                num_blocks=arena.num_blocks,
                block_bytes=arena.block_bytes,
                generation=arena.generation,
                peer=self._peer,
            )
            self._child = NixlChild(start, arena)
            self._child.sock.setblocking(False)
            report = await _next_report(self._child.sock)
            if not isinstance(report, Opened):
                return report
        sock = self._child.sock
        await asyncio.get_running_loop().sock_sendall(sock, encode(order))
        return await _next_report(sock)

    async def _end_child(self) -> str:
        """End the process, if there is one; says how it ended."""
        child, self._child = self._child, None
        return (
            "its NIXL process did not start"
            if child is None
            else await asyncio.to_thread(child.end)
        )

    def _hurry(self, grace_s: float) -> None:
        """Give a transfer that goes on no more time than that."""
        limit = self._limit
        if limit is not None and (when := limit.when()) is not None:
            limit.reschedule(min(when, asyncio.get_running_loop().time() + grace_s))

    def _refuse(self, generation: int, src_blocks: Sequence[BlockId]) -> str | None:
        """Why a read cannot be right; NIXL itself knows neither generations nor blocks."""
        peer = self._peer
        if generation != peer.generation:
            return f"the arena has generation {peer.generation}, not {generation}"
        if self._arena.block_bytes != peer.block_bytes:
            return f"a block has {peer.block_bytes} bytes, not {self._arena.block_bytes}"
        highest = max(src_blocks)
        if not 0 <= min(src_blocks) <= highest < peer.num_blocks:
            return f"there is no block {highest}: the arena has {peer.num_blocks}"
        return None

    def _failed(self, reason: str) -> TransferFailed:
        return TransferFailed(f"KV could not be read from {self._peer.agent} by NIXL: {reason}")


async def _next_report(sock: socket.socket) -> Report:
    (length,) = LENGTH.unpack(await _receive(sock, LENGTH.size))
    return decode_report(await _receive(sock, length))


async def _receive(sock: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    raw = b""
    while len(raw) < size_bytes:
        piece = await loop.sock_recv(sock, size_bytes - len(raw))
        if not piece:
            raise ConnectionResetError("the NIXL process ended")
        raw += piece
    return raw
