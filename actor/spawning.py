"""Starts a child process; loads nothing but the standard library, and of that little.

A command can so start its children first thing, and load what it needs itself while they load.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PARENT_ENV = "LLMRT_PARENT_PID"
READY_ENV = "LLMRT_READY_FD"


@dataclass(frozen=True, slots=True)
class Child:
    """What to run. `name` is for people."""

    name: str
    argv: Sequence[str]


@dataclass(frozen=True, slots=True)
class Spawned:
    """A running child, and the pipe on which it says that it is ready; whoever takes it owns both.

    It dies with the thread that started it (`die_with_parent`), also before a supervisor has it.
    """

    process: subprocess.Popen[bytes]
    ready_fd: int


@contextmanager
def spawned(children: Sequence[Child]) -> Iterator[Mapping[str, Spawned]]:
    """Start all of them; those that nobody has reaped when the block ends are killed then."""
    running: dict[str, Spawned] = {}
    try:
        for child in children:
            running[child.name] = spawn(child)
        yield running
    finally:
        for one in running.values():
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()


def spawn(child: Child) -> Spawned:
    """Start `child` in a session of its own, without stdin. Raises `OSError`."""
    ready_fd, child_fd = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603
            child.argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(child_fd,),
            env=os.environ | {PARENT_ENV: str(os.getpid()), READY_ENV: str(child_fd)},
        )
    except OSError:
        os.close(ready_fd)
        raise
    finally:
        os.close(child_fd)
    return Spawned(process, ready_fd)
