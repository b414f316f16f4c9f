"""Workers of one host tell each other whether they compute, and divide the cores by that.

A file of slots that all of them map, one slot per process: the time until which its owner computes,
in nanoseconds of the host's monotonic clock. Whoever begins a step takes its share: all cores if
nobody else computes. A slot that is never written again, because its process died or was stopped,
counts for a few seconds at most.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
import weakref
from pathlib import Path

from llmrt.wire.errors import ConfigError

FILE_NAME = "cores"
MAX_WORKERS = 256
_SLOT_BYTES = 8
_SIZE_BYTES = MAX_WORKERS * _SLOT_BYTES
# struct flock: type, whence, start, length, and a pid that locks of open files do not have.
_LOCK = struct.Struct("hhqqi")
# A step that has begun ends within this time, as far as others are concerned.
_STEP_NS = 2_000_000_000
# Between two steps of one stream: a prompt that begins there must not take the cores of both.
_BETWEEN_STEPS_NS = 20_000_000


class CoreShare:
    """One worker's slot, for as long as the object lives; all workers have `num_cores` together."""

    def __init__(self, folder: Path, num_cores: int) -> None:
        """Raises `ConfigError` if the file cannot be used."""
        self.num_cores = num_cores
        try:
            fd = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, _SIZE_BYTES)
            self._slot = _take_slot(fd)
            self._busy_until = memoryview(mmap.mmap(fd, _SIZE_BYTES)).cast("Q")
        except OSError as error:
            raise ConfigError(
                f"{folder / FILE_NAME}, where workers share the cores, cannot be used: "
                f"{error.strerror}; set threads, or choose another runtime_dir"
            ) from None
        self._busy_until[self._slot] = 0

    def begin(self) -> int:
        """A step begins; returns how many threads it should run on, at least 1."""
        now = time.monotonic_ns()
        self._busy_until[self._slot] = now + _STEP_NS
        num_busy = sum(until > now for until in self._busy_until.tolist())
        return max(1, self.num_cores // num_busy)

    def end(self) -> None:
        """The step is over; another one may begin at once."""
        self._busy_until[self._slot] = time.monotonic_ns() + _BETWEEN_STEPS_NS


def _take_slot(fd: int) -> int:
    """Lock the first free slot: until `fd` is closed, by the kernel if its process dies."""
    for slot in range(MAX_WORKERS):
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot * _SLOT_BYTES, _SLOT_BYTES, 0)
        with contextlib.suppress(BlockingIOError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
            return slot
    raise ConfigError(f"{MAX_WORKERS} workers share the cores of this host already")
