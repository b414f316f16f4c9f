"""What integration tests look at from outside: `ps`, processes, and the ends of commands."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from local_cluster import RunningCluster

from llmrt.actor.spawning import PARENT_ENV
from llmrt.client import Client, StreamEvent

_POLL_S = 0.02


def wait_until(holds: Callable[[], bool], within_s: float, what: str) -> None:
    """Raises `AssertionError` that says `what` did not come true."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(_POLL_S)


def wait_until_idle(client: Client, within_s: float = 10.0) -> None:
    """Until every worker says, in a heartbeat sent from now on, that nothing is left of any
    request: none runs or waits, and each block is free or cached."""
    started = time.monotonic()

    def is_idle() -> bool:
        reply = client.workers()
        passed_s = time.monotonic() - started
        return not reply.requests and all(
            row.heartbeat_age_s < passed_s
            and row.num_running == row.num_waiting == 0
            and row.num_free_blocks + row.num_cached_blocks == row.num_blocks
            for row in reply.workers
        )

    wait_until(is_idle, within_s, "all workers idle, all blocks free or cached")


def wait_until_linked(client: Client, num_workers: int, within_s: float = 30.0) -> None:
    """Until so many workers are registered, and all owners can reach all prefill workers."""

    def are_linked() -> bool:
        rows = client.workers().workers
        num_prefill = sum(row.role == "prefill" for row in rows)
        return len(rows) == num_workers and all(
            sum(how in ("shm", "tcp") for how in row.links.values()) == num_prefill
            for row in rows
            if row.role != "prefill"
        )

    wait_until(are_linked, within_s, f"{num_workers} workers linked")


def check_stream(events: list[StreamEvent]) -> None:
    """No token is lost or repeated, and every piece of text is text."""
    seq = 0
    for event in events:
        assert event.seq == seq
        seq += len(event.token_ids)
        event.text.encode()


def pid_of(cluster: RunningCluster, name: str) -> int:
    """Of the process that carries this name now: it changes with every restart."""
    for child in psutil.Process(cluster.up.pid).children():
        if name in child.cmdline():
            return int(child.pid)
    raise LookupError(f"no process {name}")


@dataclass(frozen=True)
class Ended:
    """A command that ended by itself. `cpu_s` is what it computed, whatever else runs here."""

    code: int
    out: str
    err: str
    cpu_s: float


def run_llmrt(*arguments: object, timeout_s: float = 60.0) -> Ended:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        _argv(arguments),
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_env(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(done.returncode, done.stdout, done.stderr, cpu_s)


@contextmanager
def running_llmrt(
    *arguments: object, stderr: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command that serves until the block ends."""
    with (
        open(stderr or os.devnull, "wb") as errors,
        subprocess.Popen(_argv(arguments), stdout=errors, stderr=errors, env=_env()) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _argv(arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-m", "llmrt.cli.main", *map(str, arguments)]


def _env() -> dict[str, str]:
    return os.environ | {PARENT_ENV: str(os.getpid())}
