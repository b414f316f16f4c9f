"""Starts child processes, starts them again within bounds, and takes them along when it ends.

The child's side is `llmrt.actor.process.die_with_parent` and `announce_ready`.

A child that exits without being asked is started again after a growing pause, unless its exit
code says that trying again is useless, or it did so too often (Erlang/OTP, restart intensity).
Each child leads a session of its own: Ctrl-C reaches the supervisor alone, which then stops
the children in order, and a kill reaches whatever a child started.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from llmrt.actor.spawning import READY_ENV, Child, Spawned, spawn
from llmrt.wire.errors import ConfigError, InternalError, LlmrtError, RegistrationRefused

MAX_RESTARTS, RESTART_WINDOW_S = 5, 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
STOP_TIMEOUT_S = 10.0
# Usage, refused by a peer, bad configuration: the same command gives the same answer.
FINAL_EXIT_CODES = frozenset({2, 77, 78})


@dataclass(frozen=True, slots=True)
class Started:
    child: Child
    pid: int
    num_restarts: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The child called `announce_ready`."""

    child: Child


@dataclass(frozen=True, slots=True)
class Exited:
    """`exit_code` is negative for a signal. `pause_s` is until the next start, None if none."""

    child: Child
    pid: int
    exit_code: int
    pause_s: float | None


ChildEvent: TypeAlias = Started | Ready | Exited


class RestartBudget:
    """At most `max_restarts` within `window_s`, after pauses that double up to a limit."""

    def __init__(
        self, max_restarts: int = MAX_RESTARTS, window_s: float = RESTART_WINDOW_S
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()

    def pause_s(self, now: float) -> float | None:
        """Seconds to wait before the next start, which this counts; None if it is used up."""
        while self._restarts and self._restarts[0] <= now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** len(self._restarts))
        self._restarts.append(now)
        return pause_s


class Supervisor:
    """Owns its children for as long as `run` runs, which must be on a thread that outlives them."""

    def __init__(
        self,
        children: Sequence[Child],
        on_event: Callable[[ChildEvent], None] = lambda _: None,
        *,
        make_budget: Callable[[], RestartBudget] = RestartBudget,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        spawned: Mapping[str, Spawned] = MappingProxyType({}),
    ) -> None:
        """`spawned` are the children that run already, by name: `run` takes them over."""
        self._spawned = spawned
        self._children = children
        self._on_event = on_event
        self._make_budget = make_budget
        self._stop_timeout_s = stop_timeout_s

    async def run(self) -> None:
        """Run until cancelled, or raise the error that names the child that cannot run.

        Either way all children are gone afterwards: SIGTERM, then SIGKILL after `stop_timeout_s`.
        The first one is stopped when all others have ended: it is whom they say goodbye to.
        """
        lives = [
            _Life(child, self._on_event, self._make_budget(), self._spawned.get(child.name))
            for child in self._children
        ]
        tasks = [asyncio.create_task(life.run()) for life in lives]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            processes = [life.process for life in lives]
            await self._stop(processes[1:])
            await self._stop(processes[:1])

    async def _stop(self, children: "Sequence[_Process | None]") -> None:
        processes = [process for process in children if process is not None]
        for process in processes:
            process.signal(signal.SIGTERM)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        if ends:
            await asyncio.wait(ends, timeout=self._stop_timeout_s)
        for process in processes:
            process.signal(signal.SIGKILL)
        await asyncio.gather(*ends)


class _Life:
    """One child over all its restarts."""

    def __init__(
        self,
        child: Child,
        on_event: Callable[[ChildEvent], None],
        budget: RestartBudget,
        spawned: Spawned | None,
    ) -> None:
        self.process: _Process | None = None
        self._child = child
        self._on_event = on_event
        self._budget = budget
        self._spawned = spawned

    async def run(self) -> None:
        for num_restarts in itertools.count():
            spawned, self._spawned = self._spawned or spawn(self._child), None
            process = _Process(spawned, lambda: self._on_event(Ready(self._child)))
            self.process = process
            self._on_event(Started(self._child, process.pid, num_restarts))
            exit_code = await process.wait()
            self.process = None
            pause_s = None
            if exit_code not in FINAL_EXIT_CODES:
                pause_s = self._budget.pause_s(time.monotonic())
            self._on_event(Exited(self._child, process.pid, exit_code, pause_s))
            if pause_s is None:
                raise _gave_up(self._child, exit_code, num_restarts)
            await asyncio.sleep(pause_s)


class _Process:
    """One started process; owns its pidfd and the pipe on which it says that it is ready."""

    def __init__(self, spawned: Spawned, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_ready = on_ready
        self._popen, self._ready_fd = spawned.process, spawned.ready_fd
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._exited)
        self._loop.add_reader(self._ready_fd, self._announced)

    async def wait(self) -> int:
        """Until it has exited and was reaped; its exit code."""
        return await asyncio.shield(self._exit_code)

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has exited."""
        if not self._exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _announced(self) -> None:
        is_ready = os.read(self._ready_fd, 1) != b""
        self._close_ready_fd()
        if is_ready:
            self._on_ready()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Not reaped yet, so its pid still names its group: take what it started along.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        exit_code = self._popen.wait()
        os.close(self._pidfd)
        self._close_ready_fd()
        self._exit_code.set_result(exit_code)

    def _close_ready_fd(self) -> None:
        if self._ready_fd >= 0:
            self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)
            self._ready_fd = -1


def announce_ready() -> None:
    """Tell the supervisor of this process, if it has one, that it serves now."""
    fd = os.environ.pop(READY_ENV, None)
    if fd is not None:
        os.write(int(fd), b"r")
        os.close(int(fd))


def _gave_up(child: Child, exit_code: int, num_restarts: int) -> LlmrtError:
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    if exit_code in FINAL_EXIT_CODES:
        kind = RegistrationRefused if exit_code == 77 else ConfigError
        return kind(f"{child.name} ended with {how}: its error is above, correct that and restart")
    return InternalError(
        f"{child.name} ended too often ({num_restarts} restarts), last with {how}: "
        "its log lines above say why"
    )
