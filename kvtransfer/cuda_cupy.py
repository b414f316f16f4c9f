"""`CudaRuntime` by cupy (the extra `cuda`), and by libcuda where cupy has no call.

Not for MIG: a slice has no CUDA IPC, and `DeviceFacts.is_mig` says so.
"""

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from llmrt.kvtransfer.cuda_runtime import CudaCallFailed, DeviceFacts

_DISABLE_TIMING, _INTERPROCESS = 2, 4
_NON_BLOCKING = 1
_MEMCPY_TO_HOST = 2
_MEMCPY_DEFAULT = 4  # the driver sees by the addresses which devices they are of
_UUID_BYTES = 16


def why_not() -> str | None:
    """Why there is no CUDA here; None if there is."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed (the extra `cuda`)"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    try:
        count = CupyRuntime().num_devices()
    except ImportError as error:
        return f"cupy cannot be imported: {error}"
    except CudaCallFailed as error:
        return error.message
    return None if count else "the CUDA driver sees no GPU"


class CupyRuntime:
    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cupy").cuda.runtime
        self._driver = ctypes.CDLL("libcuda.so.1")

    def num_devices(self) -> int:
        return int(self._call(self._cuda.getDeviceCount))

    def set_device(self, device: int) -> None:
        self._call(self._cuda.setDevice, device)

    def device_facts(self, device: int) -> DeviceFacts:
        handle = ctypes.c_int()
        self._drive("cuInit", 0)
        self._drive("cuDeviceGet", ctypes.byref(handle), device)
        # The second version tells the slice, the first one the GPU that it is of.
        whole, slice_ = (ctypes.create_string_buffer(_UUID_BYTES) for _ in range(2))
        self._drive("cuDeviceGetUuid", whole, handle)
        self._drive("cuDeviceGetUuid_v2", slice_, handle)
        name = ctypes.create_string_buffer(256)
        self._drive("cuDeviceGetName", name, len(name), handle)
        text = name.value.decode(errors="replace")
        return DeviceFacts(slice_.raw.hex(), text, whole.raw != slice_.raw or " MIG " in text)

    def can_access_peer(self, device: int, peer: int) -> bool:
        return bool(self._call(self._cuda.deviceCanAccessPeer, device, peer))

    def malloc(self, size_bytes: int) -> int:
        return int(self._call(self._cuda.malloc, size_bytes))

    def free(self, pointer: int) -> None:
        self._call(self._cuda.free, pointer)

    def fill(self, pointer: int, value: int, size_bytes: int) -> None:
        self._call(self._cuda.memset, pointer, value, size_bytes)
        self._call(self._cuda.deviceSynchronize)

    def read(self, pointer: int, size_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(size_bytes)
        address = ctypes.addressof(target)
        self._call(self._cuda.memcpy, address, pointer, size_bytes, _MEMCPY_TO_HOST)
        return target.raw

    def base_of(self, pointer: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._drive(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(pointer),
        )
        return base.value, size.value

    def export_memory(self, pointer: int) -> bytes:
        return bytes(self._call(self._cuda.ipcGetMemHandle, pointer))

    def open_memory(self, handle: bytes) -> int:
        return int(self._call(self._cuda.ipcOpenMemHandle, handle))

    def close_memory(self, pointer: int) -> None:
        self._call(self._cuda.ipcCloseMemHandle, pointer)

    def create_event(self) -> int:
        flags = _DISABLE_TIMING | _INTERPROCESS
        return int(self._call(self._cuda.eventCreateWithFlags, flags))

    def destroy_event(self, event: int) -> None:
        self._call(self._cuda.eventDestroy, event)

    def export_event(self, event: int) -> bytes:
        return bytes(self._call(self._cuda.ipcGetEventHandle, event))

    def open_event(self, handle: bytes) -> int:
        return int(self._call(self._cuda.ipcOpenEventHandle, handle))

    def record_event(self, event: int, stream: int) -> None:
        self._call(self._cuda.eventRecord, event, stream)

    def is_event_done(self, event: int) -> bool:
        try:
            # cupy answers either with a status or, not done, by raising.
            return not self._call(self._cuda.eventQuery, event)
        except CudaCallFailed as error:
            if error.error.startswith("cudaErrorNotReady"):
                return False
            raise

    def create_stream(self) -> int:
        return int(self._call(self._cuda.streamCreateWithFlags, _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call(self._cuda.streamDestroy, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call(self._cuda.streamWaitEvent, stream, event)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._call(self._cuda.memcpyAsync, target, source, size_bytes, _MEMCPY_DEFAULT, stream)

    def synchronize(self, stream: int) -> None:
        self._call(self._cuda.streamSynchronize, stream)

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except self._cuda.CUDARuntimeError as error:
            name = function.__name__
            raise CudaCallFailed(f"cuda{name[:1].upper()}{name[1:]}", str(error)) from None

    def _drive(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise CudaCallFailed(name, f"CUresult {status}")
