"""The bulk links of a worker: an exporter of its arena per transport, and a reader per peer."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.transport import (
    PROBE_LEASE,
    ArenaExporter,
    BlockReader,
    Check,
    LinkOptions,
    Transport,
)
from llmrt.wire.errors import LlmrtError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId, WorkerName
from llmrt.workers.probing import scheme_of

COPY_BYTES = 16 << 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """`transports` are those that can be used in this process. Times in seconds."""

    transports: Mapping[str, Transport]
    options: LinkOptions = field(default_factory=LinkOptions)
    map_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    probe_timeout_s: float = 10.0


def copy_rate(source: memoryview) -> float:
    """Bytes per second of a copy out of `source`, of which some MB are touched."""
    size_bytes = min(len(source), COPY_BYTES)
    scratch = bytearray(size_bytes)
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        scratch[:] = source[:size_bytes]
        durations.append(time.perf_counter() - start)
    return size_bytes / max(min(durations), 1e-9)


class BulkLinks:
    """Moves bytes as the machine says; which transport a link takes, it does not decide."""

    def __init__(self, arena: Arena, check: Check, settings: LinkSettings) -> None:
        self._arena = arena
        self._settings = settings
        self._exporters: dict[str, ArenaExporter] = {
            scheme: transport.exporter(arena, check, settings.options)
            for scheme, transport in settings.transports.items()
        }
        self._readers: dict[tuple[WorkerName, str], BlockReader] = {}

    async def start(self) -> None:
        """Serve the arena. Raises `AddressInUse` if an address that was asked for is taken.

        A transport that fails otherwise is left out, and the log says why.
        """
        for scheme, exporter in list(self._exporters.items()):
            try:
                await asyncio.to_thread(exporter.start)
            except TransferFailed as error:
                del self._exporters[scheme]
                log.warning("transport.failed", transport=scheme, error=error.message)

    def addresses_for(self, peer: WorkerName) -> tuple[str, ...]:
        """Where `peer` may read our arena, best transport first; earlier addresses end."""
        addresses = []
        for scheme, exporter in self._exporters.items():
            try:
                addresses.append(exporter.address_for(peer.full_name))
            except TransferFailed as error:
                log.warning("transport.failed", transport=scheme, error=error.message)
        return tuple(addresses)

    async def read(
        self,
        peer: WorkerName,
        address: str,
        lease: LeaseId,
        generation: int,
        source: Sequence[int],
        target: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        """As `BlockReader.read`. Raises `ProtocolError` for an address that is none."""
        reader = self._readers.get((peer, address))
        if reader is None:
            transport = self._settings.transports.get(scheme_of(address))
            if transport is None:
                raise TransferFailed(f"transport {scheme_of(address)[:16]} is not known here")
            reader = transport.reader(address, self._arena, self._settings.options)
            self._readers[peer, address] = reader
        await reader.read(
            lease,
            generation,
            [BlockId(block) for block in source],
            [BlockId(block) for block in target],
            timeout_s=timeout_s,
        )

    async def probe(
        self,
        peer: WorkerName,
        address: str,
        generation: int,
        target: Sequence[int],
    ) -> tuple[float, float]:
        """Bytes per second of a read of as many blocks as `target`, and seconds of a read of one.

        A link that fails is closed. Raises as `read`.
        """
        deadline = time.monotonic() + self._settings.probe_timeout_s
        source = range(len(target))

        async def read_first(count: int) -> float:
            start = time.monotonic()
            remaining_s = max(deadline - start, 1e-3)
            blocks = (source[:count], target[:count])
            await self.read(peer, address, PROBE_LEASE, generation, *blocks, timeout_s=remaining_s)
            return max(time.monotonic() - start, 1e-9)

        try:
            await read_first(len(source))  # connects, and touches the memory
            latency_s = min([await read_first(1) for _ in range(3)])
            duration_s = await read_first(len(source))
        except LlmrtError:
            reader = self._readers.pop((peer, address), None)
            if reader is not None:
                await reader.close()
            raise
        return len(source) * self._arena.block_bytes / duration_s, latency_s

    def revoke(self, peer: WorkerName) -> None:
        """End the peer's right to read."""
        for exporter in self._exporters.values():
            exporter.revoke(peer.full_name)

    async def stop_reading_of(self, peer: WorkerName) -> None:
        """End our reads of the peer's arena, for good."""
        for key in [key for key in self._readers if key[0] == peer]:
            await self._readers[key].close()
            self._readers.pop(key, None)

    async def stop_reading(self) -> None:
        """When it returns, nothing writes into our arena."""
        for reader in self._readers.values():
            await reader.close()
        self._readers.clear()

    async def close(self) -> None:
        """When it returns, nothing reads our arena."""
        for exporter in self._exporters.values():
            await asyncio.to_thread(exporter.close)
