"""Processes by names that cannot be mistaken, the watch over their lives, and dying with one's own.

A pid alone names nobody: it is reused, and means another process in another pid namespace.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

from llmrt.actor.spawning import PARENT_ENV
from llmrt.wire.messages import ProcessName

_PR_SET_PDEATHSIG = 1
# Fields of /proc/PID/stat behind the name, which is in parentheses and may hold anything.
_START_TICKS_FIELD = 22 - 3


def this_process() -> ProcessName:
    """The name of the calling process. Raises `OSError` where /proc is not mounted."""
    pid = os.getpid()
    return ProcessName(
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=pid,
        start_ticks=_start_ticks(pid),
    )


class Watch:
    """A running watch. `close` ends it without a call; after the call it is closed."""

    def __init__(self, pidfd: int | None, on_dead: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        if pidfd is None:
            self._soon = self._loop.call_soon(on_dead)
        else:
            self._loop.add_reader(pidfd, self._found_dead)

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _found_dead(self) -> None:
        self.close()
        self._on_dead()


def watch_process(name: ProcessName, on_dead: Callable[[], None]) -> Watch | None:
    """Call `on_dead` once from the running loop when that very process has died.

    Soon, if it is dead already. None if it lives where this process cannot see it.
    """
    if not name.is_on_host_of(this_process()):
        return None
    try:
        pidfd = os.pidfd_open(name.pid)
    except ProcessLookupError:
        return Watch(None, on_dead)
    # Only now: the descriptor holds on to one process, so what /proc says is about that one
    # unless it died in between, and then the descriptor reports it.
    try:
        is_the_one = _start_ticks(name.pid) == name.start_ticks
    except OSError:
        is_the_one = False
    if not is_the_one:
        os.close(pidfd)
        return Watch(None, on_dead)
    return Watch(pidfd, on_dead)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, in whatever way.

    For a child whose parent put its own pid into `LLMRT_PARENT_PID`; without that it does
    nothing. To be called first thing. The kernel means the *thread* that started the child, so
    that thread must live as long as its process (prctl(2), PR_SET_PDEATHSIG).
    """
    parent_pid = os.environ.pop(PARENT_ENV, None)
    if parent_pid is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[_START_TICKS_FIELD])
