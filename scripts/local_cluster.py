"""Start `llmrt up` for a script, wait until it serves, and end it with all that it started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from llmrt.actor.spawning import PARENT_ENV
from llmrt.cli.cluster import are_linked
from llmrt.client import Client

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunningCluster:
    """`bind` is the endpoint for clients; `pids` are those of the workers by name."""

    bind: str
    worker_bind: str
    broker_pid: int
    pids: Mapping[str, int]
    up: "subprocess.Popen[str]"


@contextmanager
def running_cluster(
    *flags: str, env: Mapping[str, str] | None = None, stderr: IO[str] | None = None
) -> Iterator[RunningCluster]:
    """`llmrt up` with these flags, on free ports, until the block ends, whatever happens in it.

    `stderr` takes its log and those of its children. Exits the script if the cluster does not
    start: the reason is on stderr then.
    """
    argv = [
        *(sys.executable, "-m", "llmrt.cli.main", "up", "--json"),
        *("--bind", "tcp://127.0.0.1:*", "--worker-bind", "tcp://127.0.0.1:*"),
        *flags,
    ]
    # A session of its own, so that Ctrl-C reaches it once, by us; and it dies with us.
    full_env = os.environ | {PARENT_ENV: str(os.getpid())} | dict(env or {})
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env=full_env,
    ) as up:
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            if not line:
                sys.exit(up.wait() or 1)
            ready = json.loads(line)
            pids = {row["worker_id"]: row["pid"] for row in ready["workers"]}
            cluster = RunningCluster(
                ready["bind"], ready["worker_bind"], ready["broker_pid"], pids, up
            )
            yield cluster
        finally:
            stop(up)


def stop(up: "subprocess.Popen[str]") -> None:
    """SIGTERM, and SIGKILL to one that does not end; its children die with it."""
    up.send_signal(signal.SIGTERM)
    try:
        up.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        up.kill()


def wait_until_linked(bind: str, within_s: float) -> None:
    """Until every living prefill worker and every owner have met; raises `TimeoutError`."""
    deadline = time.monotonic() + within_s
    with Client(bind) as client:
        while True:
            workers = client.workers().workers
            if are_linked(workers, sum(worker.role == "prefill" for worker in workers)):
                return
            if time.monotonic() > deadline:
                links = {worker.worker_id: worker.links for worker in workers}
                raise TimeoutError(f"workers are not linked after {within_s:g} s: {links}")
            time.sleep(0.05)
