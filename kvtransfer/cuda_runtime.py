"""The calls of the CUDA runtime that an arena on a GPU needs, and no others.

A call acts on the device that its thread has set; a thread that has set none gets device 0, which
may be a neighbour's. So whatever calls from a thread of its own calls `set_device` first.
"""

from dataclasses import dataclass
from typing import Protocol

from llmrt.wire.errors import TransferFailed


class CudaCallFailed(TransferFailed):
    """`error` is CUDA's name for it, `cudaErrorInvalidValue` say."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call} failed: {error}")
        self.error = error


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`uuid` in hex: ordinals depend on CUDA_VISIBLE_DEVICES. `is_mig`: a slice of a GPU."""

    uuid: str
    name: str
    is_mig: bool


class CudaRuntime(Protocol):
    """Pointers, streams and events are addresses. Every call may raise `CudaCallFailed`."""

    def num_devices(self) -> int: ...

    def set_device(self, device: int) -> None: ...

    def device_facts(self, device: int) -> DeviceFacts: ...

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether the two reach each other's memory without the host (NVLink, or one PCIe root)."""
        ...

    def malloc(self, size_bytes: int) -> int:
        """A cudaMalloc of its own, outside any caching allocator."""
        ...

    def free(self, pointer: int) -> None: ...

    def fill(self, pointer: int, value: int, size_bytes: int) -> None:
        """Returns when it is done."""
        ...

    def read(self, pointer: int, size_bytes: int) -> bytes:
        """Copy to the host, behind nothing that a stream of ours still does."""
        ...

    def base_of(self, pointer: int) -> tuple[int, int]:
        """Where the allocation around `pointer` begins, and its bytes."""
        ...

    def export_memory(self, pointer: int) -> bytes:
        """A handle of the allocation around `pointer`, for other processes."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map a peer's allocation on the device that is set; a second time counts only."""
        ...

    def close_memory(self, pointer: int) -> None: ...

    def create_event(self) -> int:
        """For other processes, without time."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def export_event(self, event: int) -> bytes: ...

    def open_event(self, handle: bytes) -> int: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def is_event_done(self, event: int) -> bool:
        """Whether all work before its last record has ended; true if there was none."""
        ...

    def create_stream(self) -> int:
        """One that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def wait_event(self, stream: int, event: int) -> None:
        """What is queued on `stream` from now on waits for the last record of `event`."""
        ...

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy, on one device or between two whose memory is mapped here."""
        ...

    def synchronize(self, stream: int) -> None:
        """Block, without the interpreter lock, until all that is queued has ended."""
        ...
