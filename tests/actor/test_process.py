"""A process is known by more than its pid, and its death is noticed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from llmrt.actor.process import this_process, watch_process
from llmrt.actor.spawning import PARENT_ENV
from llmrt.wire.messages import ProcessName

pytestmark = pytest.mark.integration


def name_of(pid: int) -> ProcessName:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(this_process(), pid=pid, start_ticks=ticks)


def make_sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


async def is_reported_dead(name: ProcessName) -> bool:
    """Whether the watch calls back; it must be about something that is dead or dying."""
    dead = asyncio.Event()
    watch = watch_process(name, dead.set)
    assert watch is not None
    async with asyncio.timeout(10):
        await dead.wait()
    watch.close()
    return True


def test_this_process_is_the_same_each_time_and_another_in_a_child() -> None:
    assert this_process() == this_process()
    child = subprocess.run(
        [sys.executable, "-c", "from llmrt.actor.process import *; print(this_process().pid)"],
        capture_output=True,
        check=True,
    )
    assert int(child.stdout) != os.getpid()


def test_processes_of_another_boot_or_namespace_are_not_on_the_same_host() -> None:
    me = this_process()
    assert me.is_on_host_of(msgspec.structs.replace(me, pid=1))
    assert not me.is_on_host_of(msgspec.structs.replace(me, boot_id="other"))
    assert not me.is_on_host_of(msgspec.structs.replace(me, pid_namespace="other"))


def test_death_is_reported_once() -> None:
    async def main() -> None:
        calls: list[int] = []
        with make_sleeper() as sleeper:
            watch = watch_process(name_of(sleeper.pid), lambda: calls.append(1))
            assert watch is not None
            other = asyncio.create_task(is_reported_dead(name_of(sleeper.pid)))
            await asyncio.sleep(0)
            assert calls == []
            sleeper.kill()
            assert await other
            await asyncio.sleep(0)
            watch.close()
        assert calls == [1]

    asyncio.run(main())


def test_a_process_that_is_gone_is_reported_soon() -> None:
    with make_sleeper() as sleeper:
        name = name_of(sleeper.pid)
        sleeper.kill()
    assert asyncio.run(is_reported_dead(name))


def test_a_reused_pid_is_not_taken_for_the_process() -> None:
    """The pid lives, but started at another time."""
    with make_sleeper() as sleeper:
        name = name_of(sleeper.pid)
        earlier = msgspec.structs.replace(name, start_ticks=name.start_ticks - 1)
        assert asyncio.run(is_reported_dead(earlier))
        sleeper.kill()


def test_a_process_of_another_host_cannot_be_watched() -> None:
    async def main() -> None:
        elsewhere = msgspec.structs.replace(this_process(), boot_id="other")
        assert watch_process(elsewhere, lambda: None) is None

    asyncio.run(main())


def test_a_closed_watch_does_not_call() -> None:
    async def main() -> None:
        calls: list[int] = []
        num_fds = len(os.listdir("/proc/self/fd"))
        with make_sleeper() as sleeper:
            name = name_of(sleeper.pid)
            watch = watch_process(name, lambda: calls.append(1))
            assert watch is not None
            watch.close()
            watch.close()
            sleeper.kill()
            assert await is_reported_dead(name)
        assert calls == []
        assert len(os.listdir("/proc/self/fd")) == num_fds

    asyncio.run(main())


CHILD = """
import os, sys, time
from llmrt.actor.process import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
env = os.environ | {"LLMRT_PARENT_PID": str(os.getpid())}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=env)
"""


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = name_of(int(parent.stdout.readline()))
        parent.kill()
        assert asyncio.run(is_reported_dead(child))


def test_a_child_whose_parent_died_before_it_could_ask_ends_at_once() -> None:
    env = os.environ | {PARENT_ENV: "1"}  # not the pid that it will find as its parent's
    ended = subprocess.run([sys.executable, "-c", CHILD], env=env, timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL
