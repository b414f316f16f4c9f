"""An arena on a GPU, which other processes of the host map by CUDA IPC.

One cudaMalloc, one handle, one event. Blocks are offsets: the caching allocator of a framework
would give pieces of allocations, or memory of which there are no handles.
"""

import msgspec

from llmrt.kvtransfer.cuda_runtime import CudaCallFailed, CudaRuntime
from llmrt.wire.errors import ConfigError, TransferFailed
from llmrt.wire.messages import ProcessName


class CudaArenaExport(msgspec.Struct, frozen=True, kw_only=True):
    """All that a peer needs to map an arena, and to see that it must not."""

    memory_handle: bytes
    event_handle: bytes
    num_blocks: int
    block_bytes: int
    generation: int
    size_bytes: int
    device_uuid: str
    process: ProcessName


class CudaArena:
    """`num_blocks` blocks of `block_bytes` bytes from `pointer` on, on one device.

    `generation` names this arena among those that the same worker had before.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        device: int,
        *,
        num_blocks: int,
        block_bytes: int,
        generation: int,
        process: ProcessName,
    ) -> None:
        """Allocate and touch it. Raises `ConfigError` where it could not be exported.

        A GPU in slices (MIG) has no CUDA IPC, and memory that was not made by cudaMalloc no handle.
        """
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.generation = generation
        self.device = device
        self.size_bytes = num_blocks * block_bytes
        self._runtime = runtime
        self._readers: set[str] = set()
        runtime.set_device(device)
        facts = runtime.device_facts(device)
        if facts.is_mig:
            raise ConfigError(
                f"{facts.name} ({facts.uuid}) is a slice of a GPU (MIG), between which there is no "
                "CUDA IPC: use a whole GPU, or transfer = tcp"
            )
        self.pointer = self._allocate()
        self._event = runtime.create_event()
        self._export = CudaArenaExport(
            memory_handle=self._memory_handle(),
            event_handle=runtime.export_event(self._event),
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            generation=generation,
            size_bytes=self.size_bytes,
            device_uuid=facts.uuid,
            process=process,
        )

    def export_to(self, reader: str) -> CudaArenaExport:
        """For `reader`, which may map the arena from now until `returned`."""
        self._readers.add(reader)
        return self._export

    def returned(self, reader: str) -> None:
        """`reader` has closed its mapping, or its process is confirmed to be dead."""
        self._readers.discard(reader)

    def mark(self, stream: int) -> None:
        """What is queued on `stream` until now is what a reader that hears of it waits for."""
        self._runtime.set_device(self.device)
        self._runtime.record_event(self._event, stream)

    def close(self) -> None:
        """Free it. Raises `TransferFailed`, and frees nothing, while a reader may have it mapped.

        What a mapping means whose memory was freed is undefined.
        """
        if self._readers:
            names = ", ".join(sorted(self._readers))
            raise TransferFailed(f"the arena is not freed: {names} may have it mapped")
        self._runtime.set_device(self.device)
        self._runtime.destroy_event(self._event)
        self._runtime.free(self.pointer)

    def _allocate(self) -> int:
        try:
            pointer = self._runtime.malloc(self.size_bytes)
            self._runtime.fill(pointer, 0, self.size_bytes)
        except CudaCallFailed as error:
            mib = self.size_bytes / 2**20
            raise ConfigError(
                f"the KV arena takes {mib:.0f} MiB of the GPU: {error.message}. Set kv_tokens lower"
            ) from None
        return pointer

    def _memory_handle(self) -> bytes:
        base, size_bytes = self._runtime.base_of(self.pointer)
        try:
            if base != self.pointer or size_bytes < self.size_bytes:
                raise CudaCallFailed("cudaMalloc", f"it gave a piece of {size_bytes} bytes")
            return self._runtime.export_memory(self.pointer)
        except CudaCallFailed as error:
            self._runtime.free(self.pointer)
            raise ConfigError(
                f"the KV arena is memory that other processes cannot map: {error.message}. It must "
                "come from cudaMalloc: no allocator with expandable segments or pools in between "
                "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, LD_PRELOAD)"
            ) from None
