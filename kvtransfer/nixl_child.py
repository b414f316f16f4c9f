"""The worker's end of a process that runs NIXL."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_frames import Open, encode

# UCX logs to stdout, and waits for a debugger when it fails, unless told otherwise.
_ENVIRONMENT = {"NIXL_LOG_LEVEL": "WARN", "UCX_HANDLE_ERRORS": "none"}


# From the end of its socket to that of the process.
_LAST_BREATH_S = 0.5


class NixlChild:
    """A process that maps `arena` and runs NIXL; `sock` is our end of the pair."""

    def __init__(self, order: Open, arena: Arena) -> None:
        """Start it with `order`; its report comes from `sock`. Blocks for some 2 ms."""
        self.sock, theirs = socket.socketpair()
        module = "llmrt.kvtransfer.nixl_process"
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, str(theirs.fileno()), str(arena.fd)],
                pass_fds=(theirs.fileno(), arena.fd),
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_ENVIRONMENT | dict(os.environ),
            )
        self._lock = threading.Lock()
        self._how: str | None = None
        self.sock.sendall(encode(order))

    def end(self) -> str:
        """Kill it; says how it had ended before. When it returns, nothing of it writes any more.

        The kernel has closed its sockets and queue pairs by then. Takes as long as unmapping does.
        Any thread may call it, also twice.
        """
        with self._lock:
            if self._how is None:
                self._how = self._end()
            return self._how

    def _end(self) -> str:
        if self._has_hung_up():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_BREATH_S)
        status = self._process.poll()
        self._process.kill()
        self._process.wait()
        self.sock.close()
        if status is None:
            return "its NIXL process was killed"
        if status < 0:
            return f"its NIXL process died of {signal.Signals(-status).name}"
        return f"its NIXL process exited with {status}"

    def _has_hung_up(self) -> bool:
        poller = select.poll()
        poller.register(self.sock, 0)  # a hang-up is always reported
        return bool(poller.poll(0))
