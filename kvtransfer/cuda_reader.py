"""Copies blocks of a peer's arena on a GPU into ours, on a stream of its own."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llmrt.kvtransfer.cuda_arena import CudaArena, CudaArenaExport
from llmrt.kvtransfer.cuda_ipc import ImportedArena, ImportedArenas
from llmrt.kvtransfer.cuda_runtime import CudaRuntime
from llmrt.wire.errors import TransferFailed
from llmrt.wire.ids import BlockId, LeaseId

# Between two looks at an event that is almost always done when the chunk is announced.
_POLL_S = 50e-6


class CudaReader:
    """A `BlockReader` of the arena that `owner` exports; one read at a time.

    Nothing at the owner sees or refuses a read: whoever reads asks afterwards whether the lease
    still held.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        arena: CudaArena,
        owner: str,
        export: CudaArenaExport,
        imports: ImportedArenas,
    ) -> None:
        """Raises `TransferFailed` if the arena must not or cannot be mapped."""
        self._runtime = runtime
        self._arena = arena
        self._imports = imports
        self._is_closing = threading.Event()
        if export.block_bytes != arena.block_bytes:
            raise TransferFailed(
                f"blocks have {arena.block_bytes} bytes here and {export.block_bytes} there"
            )
        self._source: ImportedArena | None = imports.open(owner, export)
        runtime.set_device(arena.device)
        self._stream = runtime.create_stream()
        self._thread = ThreadPoolExecutor(1, "kv-cuda", runtime.set_device, (arena.device,))

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

        Raises `TransferFailed`. Either way, and when cancelled, nothing writes afterwards: a copy
        that was queued ends first.
        """
        source = self._checked(generation, src_blocks, dst_blocks)
        deadline = time.monotonic() + timeout_s
        given_up = threading.Event()
        copying = self._thread.submit(
            self._copy, source, list(src_blocks), list(dst_blocks), deadline, given_up
        )
        work = asyncio.wrap_future(copying)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            given_up.set()
            while not work.done():
                try:
                    await asyncio.wait((work,))
                except asyncio.CancelledError:
                    continue  # once more: the copy still writes
            raise

    async def close(self) -> None:
        """End the reads, then the mapping, in that order. Nothing writes when it returns."""
        self._is_closing.set()
        await asyncio.to_thread(self._thread.shutdown)
        source, self._source = self._source, None
        if source is not None:
            self._imports.release(source)
            self._runtime.destroy_stream(self._stream)

    def _checked(
        self, generation: int, src_blocks: Sequence[int], dst_blocks: Sequence[int]
    ) -> ImportedArena:
        source = self._source
        if source is None or self._is_closing.is_set():
            raise TransferFailed("KV cannot be read: the reader is closed")
        if generation != source.export.generation:
            raise TransferFailed(
                f"arena generation {generation} is asked for, {source.export.generation} is mapped"
            )
        if len(src_blocks) != len(dst_blocks):
            raise TransferFailed(f"{len(src_blocks)} blocks go into {len(dst_blocks)}")
        for blocks, limit in (
            (src_blocks, source.export.num_blocks),
            (dst_blocks, self._arena.num_blocks),
        ):
            if any(not 0 <= block < limit for block in blocks):
                raise TransferFailed(f"a block is not in an arena of {limit}")
        return source

    # On the thread

    def _copy(
        self,
        source: ImportedArena,
        src_blocks: list[BlockId],
        dst_blocks: list[BlockId],
        deadline: float,
        given_up: threading.Event,
    ) -> None:
        # Asked for by the host: a stream that waits for an event of a peer that hangs waits on.
        while not self._runtime.is_event_done(source.event):
            if given_up.is_set() or self._is_closing.is_set() or time.monotonic() > deadline:
                raise TransferFailed(f"{source.owner} has not written the blocks in time")
            time.sleep(_POLL_S)
        size = self._arena.block_bytes
        try:
            for first, target, count in _runs(src_blocks, dst_blocks):
                self._runtime.copy(
                    self._arena.pointer + target * size,
                    source.pointer + first * size,
                    count * size,
                    self._stream,
                )
        finally:
            self._runtime.synchronize(self._stream)


def _runs(src_blocks: list[BlockId], dst_blocks: list[BlockId]) -> list[tuple[int, int, int]]:
    """(source, target, count) of blocks that are neighbours in both."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in zip(src_blocks, dst_blocks, strict=True):
        first, target, count = runs[-1] if runs else (-1, -1, 0)
        if count and (src, dst) == (first + count, target + count):
            runs[-1] = (first, target, count + 1)
        else:
            runs.append((src, dst, 1))
    return runs
