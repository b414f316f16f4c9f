"""The process that runs NIXL for a worker: `python -m llmrt.kvtransfer.nixl_process SOCKET ARENA`.

Both arguments are descriptors. It reads from one peer, or serves reads of the arena; it ends when
the worker hangs up, and at the first error. It says everything to the worker and decides nothing.
"""

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_agent import NixlAgent
from llmrt.kvtransfer.nixl_frames import (
    ArenaAddress,
    Done,
    Failed,
    Noticed,
    Open,
    Opened,
    Read,
    encode,
    read_order,
)

# What is waited for is looked at again after a 16th of the time waited, so it is noticed that much
# late and keeps no core busy; `MAX` bounds it for those who wait at the other end. Serving at rest
# takes 3 % of a core.
PAUSE_SHARE, MAX_READ_PAUSE_S, MAX_SERVE_PAUSE_S = 1 / 16, 0.0005, 0.005


class WorkerGone(Exception):
    """The worker hung up, or died."""


class NixlProcess:
    """One agent, and the socket to the worker."""

    def __init__(self, sock: socket.socket, arena_fd: int) -> None:
        self._sock = sock
        self._orders = sock.makefile("rb")
        self._arena_fd = arena_fd
        self._waits_since: float | None = None

    def run(self) -> None:
        order = read_order(self._orders)
        if order is None:
            return
        assert isinstance(order, Open), order
        arena = Arena.attach(
            self._arena_fd, order.num_blocks, order.block_bytes, generation=order.generation
        )
        agent = NixlAgent(order.agent, arena.buffer, order.block_bytes)
        if order.peer is not None:
            agent.connect(order.peer)
        self._say(Opened(_address(order, agent)))
        if order.peer is not None:
            self._read(agent)
        else:
            self._serve(agent)

    def _read(self, agent: NixlAgent) -> None:
        while order := read_order(self._orders):
            assert isinstance(order, Read), order
            source, target = (
                np.frombuffer(raw, "<u4").astype(np.int32) for raw in (order.source, order.target)
            )
            self._waits_since = None
            if not agent.read(source, target, order.notice, self._pause):
                raise OSError("NIXL reports an error")
            self._say(Done())

    def _serve(self, agent: NixlAgent) -> None:
        while True:
            for notice in agent.notices():
                self._say(Noticed(notice))
                self._waits_since = None
            self._pause(MAX_SERVE_PAUSE_S)

    def _pause(self, max_s: float = MAX_READ_PAUSE_S) -> None:
        """The worker says nothing while we work: a readable socket is its end."""
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        seconds = min((now - self._waits_since) * PAUSE_SHARE, max_s)
        if select.select([self._sock], [], [], seconds)[0]:
            raise WorkerGone

    def _say(self, report: Opened | Done | Failed | Noticed) -> None:
        self._sock.sendall(encode(report))


def _address(order: Open, agent: NixlAgent) -> ArenaAddress:
    return ArenaAddress(
        agent=order.agent,
        metadata=agent.metadata(),
        base=agent.base,
        num_blocks=order.num_blocks,
        block_bytes=order.block_bytes,
        generation=order.generation,
    )


def _end_of(sock: socket.socket, run: Callable[[], None]) -> int:
    try:
        run()
    except (WorkerGone, BrokenPipeError, ConnectionResetError):
        pass
    # The top of the process: what NIXL raises has no common class, and its state is unknown now.
    except Exception as error:
        sock.sendall(encode(Failed(f"{type(error).__name__}: {error}{_limit()}")))
        return 1
    return 0


def _limit() -> str:
    """Names the limit that keeps RDMA from registering memory; NIXL's error does not."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (RLIMIT_MEMLOCK is {limit >> 20} MiB)"


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    # A signal to all processes of the service is for the worker: it may need us until its end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Not by way of the library's destructors, which wait for peers.
    os._exit(_end_of(sock, NixlProcess(sock, int(sys.argv[2])).run))


if __name__ == "__main__":
    main()
