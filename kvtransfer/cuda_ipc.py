"""Arenas of peers, mapped by CUDA IPC: whether they may be, each one once, each closed in time.

opened     the first use maps the memory and opens the event; further ones count
released   the last one closes both
dropped    the peer is dead: nobody gets the mapping any more; it goes with its last use
"""

from dataclasses import dataclass

from llmrt.kvtransfer.cuda_arena import CudaArenaExport
from llmrt.kvtransfer.cuda_runtime import CudaRuntime
from llmrt.wire.errors import TransferFailed
from llmrt.wire.messages import ProcessName


def import_refusal(export: CudaArenaExport, process: ProcessName) -> str | None:
    """Why `process` must not open that arena, with both values and the remedy; None if it may."""
    theirs = export.process
    if theirs == process:
        return f"the arena is of this process (pid {process.pid}): use its pointer, not its handle"
    if theirs.boot_id != process.boot_id:
        return f"boot id is {process.boot_id} here and {theirs.boot_id} there: another host"
    if theirs.pid_namespace != process.pid_namespace:
        return (
            f"pid namespace is {process.pid_namespace} here and {theirs.pid_namespace} there, "
            "between which CUDA maps nothing: give both containers one (--pid=host, or "
            "shareProcessNamespace), or set transfer = tcp"
        )
    if export.size_bytes != export.num_blocks * export.block_bytes:
        return (
            f"the arena has {export.size_bytes} bytes, and {export.num_blocks} blocks of "
            f"{export.block_bytes}"
        )
    return None


def in_place_refusal(export: CudaArenaExport, device_uuid: str) -> str | None:
    """Why steps on that device must not write into the arena; None if they may."""
    if export.device_uuid != device_uuid:
        return f"GPU is {device_uuid} here and {export.device_uuid} there: blocks are copied"
    return None


@dataclass(slots=True, eq=False)
class ImportedArena:
    """A peer's arena from `pointer` on, on `device`; `event` orders its writes before our reads."""

    owner: str
    export: CudaArenaExport
    device: int
    pointer: int
    event: int
    num_uses: int = 0
    is_dropped: bool = False


class ImportedArenas:
    """The arenas of peers that this process has mapped on `device`. Not thread-safe.

    `owner` names one life of a peer, so that a handle of an earlier one is never taken for its own.
    """

    def __init__(self, runtime: CudaRuntime, device: int, process: ProcessName) -> None:
        self._runtime = runtime
        self._device = device
        self._process = process
        self._arenas: dict[tuple[str, int, bytes], ImportedArena] = {}

    def open(self, owner: str, export: CudaArenaExport) -> ImportedArena:
        """Map it, or count one use more. Raises `TransferFailed`, loudly and with a remedy."""
        refusal = import_refusal(export, self._process)
        if refusal is not None:
            raise TransferFailed(f"the arena of {owner} cannot be mapped: {refusal}")
        key = (owner, export.generation, export.memory_handle)
        arena = self._arenas.get(key)
        if arena is None:
            arena = self._arenas[key] = self._map(owner, export)
        arena.num_uses += 1
        return arena

    def release(self, arena: ImportedArena) -> None:
        """One use less. All that was queued with its pointer must have ended."""
        assert arena.num_uses > 0
        arena.num_uses -= 1
        if arena.num_uses:
            return
        if not arena.is_dropped:
            del self._arenas[arena.owner, arena.export.generation, arena.export.memory_handle]
        self._runtime.set_device(arena.device)
        self._runtime.destroy_event(arena.event)
        self._runtime.close_memory(arena.pointer)

    def drop(self, owner: str) -> None:
        """`owner` is dead. Its memory stays with the driver until the last use is released."""
        for key in [key for key in self._arenas if key[0] == owner]:
            self._arenas.pop(key).is_dropped = True

    def __len__(self) -> int:
        return len(self._arenas)

    def _map(self, owner: str, export: CudaArenaExport) -> ImportedArena:
        runtime = self._runtime
        # On our own device, whatever the peer calls its own: its ordinals are not ours.
        runtime.set_device(self._device)
        pointer = runtime.open_memory(export.memory_handle)
        try:
            event = runtime.open_event(export.event_handle)
        except TransferFailed:
            runtime.close_memory(pointer)
            raise
        return ImportedArena(owner, export, self._device, pointer, event)
