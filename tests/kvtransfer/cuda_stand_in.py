"""A stand-in for the CUDA runtime between real processes, which behaves as its documentation says.

Memory is a file that every process maps; a handle names it. What is undefined there is an error
here: a mapping whose exporter freed it or died, an event that its exporter destroyed. Streams run
on threads. A thread that did not set its device is refused, since the default is rarely meant.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrt.kvtransfer.cuda_runtime import CudaCallFailed, DeviceFacts

# Of an event: times recorded, the last of them that ended, whether it is destroyed.
_EVENT = struct.Struct("<QQQ")
_HANDLE_BYTES = 64


@dataclass(eq=False)
class _Memory:
    name: str
    path: Path
    map: mmap.mmap
    is_ours: bool
    num_opens: int = 1

    def __post_init__(self) -> None:
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class StandIn:
    """One process with one GPU; those with the same `folder` are on one host."""

    def __init__(
        self, folder: Path, *, uuid: str = "gpu0", is_mig: bool = False, is_vmm: bool = False
    ) -> None:
        """`is_vmm`: memory comes from cuMemCreate, as with expandable segments."""
        self.num_calls = {"open": 0, "close": 0}
        self._folder = folder
        self._facts = DeviceFacts(uuid, "Stand-in", is_mig)
        self._is_vmm = is_vmm
        self._memories: dict[int, _Memory] = {}
        self._events: dict[int, tuple[mmap.mmap, Path, bool]] = {}
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(1)
        self._local = threading.local()
        # The kernel lets go of it when this process dies.
        life = os.open(folder / f"{os.getpid()}.life", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(life, fcntl.LOCK_EX)
        weakref.finalize(self, os.close, life)

    # -- devices and memory --------------------------------------------------------------------

    def num_devices(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        self._local.device = device

    def device_facts(self, device: int) -> DeviceFacts:
        return self._facts

    def can_access_peer(self, device: int, peer: int) -> bool:
        return device != peer

    def malloc(self, size_bytes: int) -> int:
        self._check_thread("cudaMalloc")
        name = f"{os.getpid()}-{next(self._numbers)}"
        path = self._folder / f"{name}.memory"
        path.write_bytes(b"\xa5" * size_bytes)
        return self._map(name, path, is_ours=True)

    def free(self, pointer: int) -> None:
        self._check_thread("cudaFree")
        memory = self._memories.pop(pointer)
        assert memory.is_ours
        memory.path.unlink()

    def fill(self, pointer: int, value: int, size_bytes: int) -> None:
        self._check_thread("cudaMemset")
        ctypes.memset(self._valid("cudaMemset", pointer, size_bytes), value, size_bytes)

    def read(self, pointer: int, size_bytes: int) -> bytes:
        return ctypes.string_at(self._valid("cudaMemcpy", pointer, size_bytes), size_bytes)

    def base_of(self, pointer: int) -> tuple[int, int]:
        memory = self._memory_at(pointer)
        assert memory is not None
        return memory.pointer, len(memory.map)

    def export_memory(self, pointer: int) -> bytes:
        self._check_thread("cudaIpcGetMemHandle")
        memory = self._memory_at(pointer)
        if memory is None or not memory.is_ours or self._is_vmm:
            raise CudaCallFailed("cudaIpcGetMemHandle", "cudaErrorInvalidValue")
        if self._facts.is_mig:
            raise CudaCallFailed("cudaIpcGetMemHandle", "cudaErrorNotSupported")
        return memory.name.encode().ljust(_HANDLE_BYTES, b"\0")

    def open_memory(self, handle: bytes) -> int:
        self._check_thread("cudaIpcOpenMemHandle")
        self.num_calls["open"] += 1
        name = handle.rstrip(b"\0").decode()
        if name.startswith(f"{os.getpid()}-"):
            raise CudaCallFailed("cudaIpcOpenMemHandle", "cudaErrorDeviceUninitialized")
        for memory in self._memories.values():
            if memory.name == name:
                memory.num_opens += 1
                return memory.pointer
        path = self._folder / f"{name}.memory"
        if not path.exists() or not self._is_alive(name):
            raise CudaCallFailed("cudaIpcOpenMemHandle", "cudaErrorInvalidValue")
        return self._map(name, path, is_ours=False)

    def close_memory(self, pointer: int) -> None:
        self._check_thread("cudaIpcCloseMemHandle")
        self.num_calls["close"] += 1
        memory = self._memories.get(pointer)
        if memory is None or memory.is_ours:
            raise CudaCallFailed("cudaIpcCloseMemHandle", "cudaErrorInvalidValue")
        memory.num_opens -= 1
        if not memory.num_opens:
            del self._memories[pointer]

    # -- events --------------------------------------------------------------------------------

    def create_event(self) -> int:
        self._check_thread("cudaEventCreateWithFlags")
        path = self._folder / f"{os.getpid()}-{next(self._numbers)}.event"
        path.write_bytes(bytes(_EVENT.size))
        return self._map_event(path, is_ours=True)

    def destroy_event(self, event: int) -> None:
        self._check_thread("cudaEventDestroy")
        state, _, is_ours = self._events.pop(event)
        if is_ours:
            state[16] = 1

    def export_event(self, event: int) -> bytes:
        return self._events[event][1].stem.encode().ljust(_HANDLE_BYTES, b"\0")

    def open_event(self, handle: bytes) -> int:
        self._check_thread("cudaIpcOpenEventHandle")
        path = self._folder / f"{handle.rstrip(bytes(1)).decode()}.event"
        return self._map_event(path, is_ours=False)

    def record_event(self, event: int, stream: int) -> None:
        state = self._events[event][0]
        recorded = self._state(event)[0] + 1
        state[:8] = struct.pack("<Q", recorded)
        self._streams[stream].put(
            lambda: state.__setitem__(slice(8, 16), struct.pack("<Q", recorded))
        )

    def is_event_done(self, event: int) -> bool:
        self._check_thread("cudaEventQuery")
        recorded, ended = self._state(event)
        return ended >= recorded

    def wait_event(self, stream: int, event: int) -> None:
        recorded = self._state(event)[0]

        def wait() -> None:
            while self._state(event)[1] < recorded:
                time.sleep(1e-4)

        self._streams[stream].put(wait)

    # -- streams -------------------------------------------------------------------------------

    def create_stream(self) -> int:
        self._check_thread("cudaStreamCreateWithFlags")
        stream = next(self._numbers)
        self._streams[stream] = _Stream()
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream).put(None)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._check_thread("cudaMemcpyAsync")

        def copy() -> None:
            to, start = (self._valid("cudaMemcpyAsync", p, size_bytes) for p in (target, source))
            ctypes.memmove(to, start, size_bytes)

        self._streams[stream].put(copy)

    def launch(self, kernel: Callable[[], None], stream: int) -> None:
        """Anything else that runs on a device."""
        self._streams[stream].put(kernel)

    def synchronize(self, stream: int) -> None:
        self._check_thread("cudaStreamSynchronize")
        self._streams[stream].synchronize()

    # -- for tests -----------------------------------------------------------------------------

    @property
    def num_mapped(self) -> int:
        return sum(not memory.is_ours for memory in self._memories.values())

    # -- details -------------------------------------------------------------------------------

    def _check_thread(self, call: str) -> None:
        if not hasattr(self._local, "device"):
            raise CudaCallFailed(call, "no device was set on this thread")

    def _map(self, name: str, path: Path, *, is_ours: bool) -> int:
        with path.open("r+b") as file:
            memory = _Memory(name, path, mmap.mmap(file.fileno(), 0), is_ours)
        self._memories[memory.pointer] = memory
        return memory.pointer

    def _map_event(self, path: Path, *, is_ours: bool) -> int:
        event = next(self._numbers)
        with path.open("r+b") as file:
            self._events[event] = (mmap.mmap(file.fileno(), 0), path, is_ours)
        return event

    def _state(self, event: int) -> tuple[int, int]:
        if event not in self._events:
            raise CudaCallFailed("cudaEventQuery", "cudaErrorInvalidResourceHandle")
        recorded, ended, is_destroyed = _EVENT.unpack(self._events[event][0][:])
        if is_destroyed:
            raise CudaCallFailed("cudaEventQuery", "undefined: the exporter destroyed the event")
        return recorded, ended

    def _memory_at(self, pointer: int) -> _Memory | None:
        for memory in self._memories.values():
            if memory.pointer <= pointer < memory.pointer + len(memory.map):
                return memory
        return None

    def _valid(self, call: str, pointer: int, size_bytes: int) -> int:
        memory = self._memory_at(pointer)
        if memory is None or pointer + size_bytes > memory.pointer + len(memory.map):
            raise CudaCallFailed(call, "cudaErrorIllegalAddress")
        if not memory.path.exists():
            raise CudaCallFailed(call, "undefined: the exporter freed the memory")
        if not memory.is_ours and not self._is_alive(memory.name):
            raise CudaCallFailed(call, "undefined: the exporter is dead")
        return pointer

    def _is_alive(self, name: str) -> bool:
        with (self._folder / f"{name.partition('-')[0]}.life").open() as life:
            try:
                fcntl.flock(life, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class _Stream:
    """Runs what is queued in order, on a thread; the first failure sticks."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failure: CudaCallFailed | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None] | None) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        self._work.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._failure is None:
                    work()
            except CudaCallFailed as failure:
                self._failure = failure
            finally:
                self._work.task_done()
