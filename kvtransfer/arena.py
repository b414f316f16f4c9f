"""An arena: the memory of one worker's KV blocks, which peers on the host map, too.

It is a sealed memfd. The kernel frees it with its last user, also after `kill -9`, and nobody can
shrink it under another's feet, which would turn an access into SIGBUS.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource

from llmrt.kvtransfer.host_memory import available_bytes
from llmrt.wire.errors import ConfigError, TransferFailed

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """`num_blocks` blocks of `block_bytes` bytes, one after the other, in shared memory.

    `buffer` is the memory. `generation` names this arena among those that the same worker had
    before. `fd` belongs to the arena.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int, generation: int) -> None:
        """Map the memfd `fd`, which the arena owns from now on; `create` and `attach` call it."""
        self.fd = fd
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.generation = generation
        self._map = mmap.mmap(fd, num_blocks * block_bytes, flags=mmap.MAP_SHARED)
        # The owner waits for the death of this process, so no child may live on with the mapping.
        self._map.madvise(mmap.MADV_DONTFORK)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(
        cls, num_blocks: int, block_bytes: int, *, name: str = "llmrt-kv", generation: int = 0
    ) -> "Arena":
        """Make an arena and touch all of it: some 0.8 s/GB.

        Raises `ConfigError` if it does not fit into memory. `name` shows up in /proc/PID/maps.
        """
        size_bytes = num_blocks * block_bytes
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"an arena of {num_blocks} blocks of {block_bytes} bytes is empty")
        free_bytes = available_bytes()
        if size_bytes > free_bytes:
            raise _does_not_fit(size_bytes, f"{_mib(free_bytes)} are available")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(fd, num_blocks, block_bytes, generation)
        except OSError as error:
            os.close(fd)
            raise _does_not_fit(size_bytes, f"{error.strerror}{_limits()}") from None
        arena.prefault()
        return arena

    @classmethod
    def attach(cls, fd: int, num_blocks: int, block_bytes: int, *, generation: int) -> "Arena":
        """Map a peer's arena, at once; `prefault` is up to the caller. A failure closes `fd`.

        Raises `TransferFailed` unless `fd` is a memfd of exactly that size whose size is sealed.
        """
        try:
            _check_memfd(fd, num_blocks * block_bytes)
            return cls(fd, num_blocks, block_bytes, generation)
        except OSError as error:
            os.close(fd)
            raise TransferFailed(
                f"the peer's arena of {_mib(num_blocks * block_bytes)} cannot be mapped: "
                f"{error.strerror}{_limits()}"
            ) from None
        except TransferFailed:
            os.close(fd)
            raise

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def prefault(self) -> None:
        """Enter every page into this process's page table, so that no step waits for that.

        Blocks for 0.2 s/GB, without the interpreter lock: call it on a thread. Without it the first
        write to a block takes four times as long.
        """
        memory = ctypes.c_char.from_buffer(self._map)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # An older kernel refuses, and pages come as they are touched.
        madvise(ctypes.addressof(memory), self.size_bytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Let the memory go. While arrays made from `buffer` live, so does the mapping."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self.buffer.release()
        self.buffer = memoryview(b"")
        del self._map


def _check_memfd(fd: int, size_bytes: int) -> None:
    actual_bytes = os.fstat(fd).st_size
    if actual_bytes != size_bytes or not size_bytes:
        raise TransferFailed(
            f"the peer's arena has {actual_bytes} bytes; {size_bytes} were announced"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise TransferFailed(
            f"the peer's arena has seals {seals:#x}; {_SEALS:#x} are needed, "
            "or the peer could shrink it while it is read here"
        )


def _does_not_fit(size_bytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"the KV arena takes {_mib(size_bytes)}: {reason}. Set kv_tokens lower, or free memory"
    )


def _limits() -> str:
    """Names the limits of the process that forbid an arena, if there are any."""
    limits = [
        f"{name} is {_mib(soft)}"
        for name in ("RLIMIT_AS", "RLIMIT_FSIZE")
        if (soft := resource.getrlimit(getattr(resource, name))[0]) != resource.RLIM_INFINITY
    ]
    return f" ({', '.join(limits)})" if limits else ""


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
