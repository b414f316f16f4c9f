"""Children are started, started again within bounds, and never left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from llmrt.actor.spawning import Child, spawn
from llmrt.actor.supervisor import (
    ChildEvent,
    Exited,
    Ready,
    RestartBudget,
    Started,
    Supervisor,
)
from llmrt.wire.errors import ConfigError, InternalError, LlmrtError, RegistrationRefused

pytestmark = pytest.mark.integration

DEADLINE_S = 20.0


class Events:
    """What a supervisor reported, and waiting for it."""

    def __init__(self) -> None:
        self.all: list[ChildEvent] = []
        self._changed = asyncio.Event()

    def take(self, event: ChildEvent) -> None:
        self.all.append(event)
        self._changed.set()

    def of(self, kind: type[Started | Ready | Exited]) -> list[Any]:
        return [event for event in self.all if isinstance(event, kind)]

    async def until(self, kind: type[Started | Ready | Exited], count: int = 1) -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)


class Eager(RestartBudget):
    """Counts as the real one, and does not wait."""

    def pause_s(self, now: float) -> float | None:
        return None if super().pause_s(now) is None else 0.0


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def supervise(
    children: list[Child],
    body: Callable[[Events, "asyncio.Task[None]"], Awaitable[None]],
    *,
    stop_timeout_s: float = 10.0,
) -> Events:
    """Run `body` beside a supervisor, then stop that; nothing may be left behind."""
    events: list[Events] = []

    async def main() -> None:
        events.append(Events())
        supervisor = Supervisor(
            children, events[0].take, make_budget=Eager, stop_timeout_s=stop_timeout_s
        )
        task = asyncio.create_task(supervisor.run())
        try:
            await body(events[0], task)
        finally:
            task.cancel()
            await asyncio.wait([task])

    run(asyncio.sleep(0))  # the first loop of a process opens descriptors that stay
    num_fds = len(os.listdir("/proc/self/fd"))
    run(main())
    assert len(os.listdir("/proc/self/fd")) == num_fds
    for started in events[0].of(Started):
        assert not psutil.pid_exists(started.pid)
    return events[0]


def shell(name: str, script: str) -> Child:
    return Child(name, ["sh", "-c", script])


def test_restarts_pause_longer_and_are_bounded_within_the_window() -> None:
    budget = RestartBudget(max_restarts=5, window_s=60.0)
    assert [budget.pause_s(float(n)) for n in range(6)] == [0.2, 0.4, 0.8, 1.6, 3.2, None]
    assert budget.pause_s(60.0) == 3.2  # the restart at 0 is out of the window
    assert budget.pause_s(1000.0) == 0.2


def test_a_child_that_dies_is_started_again() -> None:
    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        (first,) = await events.until(Started)
        os.kill(first.pid, signal.SIGKILL)
        _, second = await events.until(Started, 2)
        assert second.pid != first.pid
        assert second.num_restarts == 1
        assert events.of(Exited) == [Exited(child, first.pid, -signal.SIGKILL, 0.0)]

    child = shell("worker-0", "exec sleep 60")
    supervise([child], body)


def test_a_child_that_ends_too_often_ends_all_and_is_named() -> None:
    async def body(events: Events, task: "asyncio.Task[None]") -> None:
        await events.until(Exited, 6)
        with pytest.raises(InternalError, match=r"worker-0 ended too often .* exit code 3"):
            await task

    events = supervise([shell("broker", "exec sleep 60"), shell("worker-0", "exit 3")], body)
    assert [event.num_restarts for event in events.of(Started) if event.child.name != "broker"] == [
        *range(6)
    ]


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(2, ConfigError), (77, RegistrationRefused), (78, ConfigError)]
)
def test_exit_codes_that_will_not_change_are_not_tried_again(
    exit_code: int, kind: type[LlmrtError]
) -> None:
    async def body(events: Events, task: "asyncio.Task[None]") -> None:
        with pytest.raises(kind, match=f"broker ended with exit code {exit_code}"):
            await task
        assert len(events.of(Started)) == 1

    supervise([shell("broker", f"exit {exit_code}")], body)


READY = "echo > /proc/self/fd/$LLMRT_READY_FD"
FOREVER = "while :; do sleep 0.01; done"


def test_stop_asks_first(tmp_path: Path) -> None:
    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        await events.until(Ready)

    note = tmp_path / "note"
    script = f"trap 'echo ended > {note}; exit 0' TERM; {READY}; {FOREVER}"
    supervise([shell("worker-0", script)], body)
    assert note.read_text() == "ended\n"


def test_the_first_child_is_stopped_last(tmp_path: Path) -> None:
    """A broker outlives its workers, else their last messages are lost."""

    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        await events.until(Ready, 3)

    note = tmp_path / "note"
    children = [
        shell(name, f"trap 'echo {name} >> {note}; exit 0' TERM; {READY}; {FOREVER}")
        for name in ("broker", "worker-0", "worker-1")
    ]
    supervise(children, body)
    *first, last = note.read_text().split()
    assert sorted(first) == ["worker-0", "worker-1"]
    assert last == "broker"


def test_stop_kills_what_does_not_listen_and_its_children() -> None:
    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        await events.until(Ready)
        (started,) = events.of(Started)
        grandchildren.extend(psutil.Process(started.pid).children())
        assert grandchildren

    grandchildren: list[psutil.Process] = []
    script = f"trap '' TERM; sleep 60 & {READY}; wait; sleep 60"
    supervise([shell("worker-0", script)], body, stop_timeout_s=0.1)
    _, alive = psutil.wait_procs(grandchildren, timeout=DEADLINE_S)
    assert not alive


def test_ctrl_c_of_the_terminal_reaches_the_supervisor_alone() -> None:
    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        (started,) = await events.until(Started)
        assert os.getpgid(started.pid) == started.pid != os.getpgid(0)

    supervise([shell("worker-0", "exec sleep 60")], body)


def test_ready_is_reported_when_the_child_says_so() -> None:
    async def body(events: Events, _: "asyncio.Task[None]") -> None:
        assert await events.until(Ready) == [Ready(child)]

    script = (
        "import time; from llmrt.actor.supervisor import announce_ready;"
        "announce_ready(); announce_ready(); time.sleep(60)"
    )
    child = Child("broker", [sys.executable, "-c", script])
    supervise([child], body)


def test_a_child_that_runs_already_is_taken_over_and_started_again_like_any() -> None:
    """Also if it was ready before anyone looked."""
    script = (
        "import time; from llmrt.actor.supervisor import announce_ready;"
        "announce_ready(); time.sleep(60)"
    )
    child = Child("worker-0", [sys.executable, "-c", script])
    spawned = spawn(child)
    readable, _, _ = select.select([spawned.ready_fd], [], [], DEADLINE_S)
    assert readable
    events = Events()

    async def main() -> None:
        supervisor = Supervisor(
            [child], events.take, make_budget=Eager, spawned={child.name: spawned}
        )
        running = asyncio.create_task(supervisor.run())
        await events.until(Ready)
        spawned.process.kill()
        await events.until(Ready, 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    first, second = (event.pid for event in events.of(Started))
    assert first == spawned.process.pid != second
    assert events.of(Exited)[0].exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(second)


def test_a_child_that_ended_before_anyone_looked_is_started_again() -> None:
    child = shell("worker-0", "exit 3")
    spawned = spawn(child)
    os.waitid(os.P_PID, spawned.process.pid, os.WEXITED | os.WNOWAIT)
    events = Events()
    supervisor = Supervisor(
        [child],
        events.take,
        make_budget=lambda: Eager(max_restarts=1),
        spawned={child.name: spawned},
    )
    with pytest.raises(InternalError):
        asyncio.run(asyncio.wait_for(supervisor.run(), DEADLINE_S))
    assert [event.exit_code for event in events.of(Exited)] == [3, 3]


CHILD = """
import time
from llmrt.actor.process import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(60)
"""
SUPERVISOR = """
import asyncio, sys
from llmrt.actor.spawning import Child
from llmrt.actor.supervisor import Supervisor
child = Child("a", [sys.executable, "-c", sys.argv[1]])
asyncio.run(Supervisor([child], lambda event: print(event.pid, flush=True)).run())
"""


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, CHILD], stdout=subprocess.PIPE)
    with supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        assert supervisor.stdout.readline() == b"up\n"
        supervisor.kill()
        assert child.wait(DEADLINE_S) is None
