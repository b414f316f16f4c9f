"""Passes an arena to peers on the same host, and tells each side when the other is gone.

The owner listens on a Unix socket. A peer connects and sends a hello; the owner answers with the
geometry and the memfd. Nothing is sent after that: the connection stays open, and its end is the
news. Owner and peer are one trust domain, of one user.

    peer                 owner
    connect, hello  -->  on_attached: a reason refuses
                    <--  geometry + memfd, or the reason
       ... the peer has the arena mapped ...
    hangs up        -->  nothing: it may still write
    is dead         -->  on_dead: it writes no more (by its pidfd, whatever the connection does)
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llmrt.kvtransfer.arena import Arena
from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.errors import (
    AddressInUse,
    ConfigError,
    ProtocolError,
    RegistrationRefused,
    TransferFailed,
)

# sun_path has 108 bytes, the last of which is 0.
MAX_PATH_BYTES = 107
# A hello is a few hundred bytes; a packet is never split.
MAX_PACKET_BYTES = 64 << 10
HELLO_TIMEOUT_S = 5.0
# Living processes that ever attached, however often; far above the workers of one host.
MAX_PEERS = 256
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it


class _Passed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The owner's answer; the memfd comes along unless it refuses."""

    refused: str = ""
    num_blocks: int = 0
    block_bytes: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class AttachedPeer:
    """A process that has the arena mapped; `hello` is what it said of itself."""

    pid: int
    hello: bytes


class ArenaServer:
    """Hands `arena` to every process of this user that connects to `path`.

    `on_attached` is called before the peer gets the arena; a text that it returns refuses the peer.
    `on_dead` is called once: the proof that the process which has the arena mapped is gone.
    """

    def __init__(
        self,
        path: Path,
        arena: Arena,
        *,
        on_attached: Callable[[AttachedPeer], str | None],
        on_dead: Callable[[AttachedPeer], None],
    ) -> None:
        self.path = path
        self._arena = arena
        self._on_attached = on_attached
        self._on_dead = on_dead
        self._listener: socket.socket | None = None
        self._inode = 0
        self._greetings: set[asyncio.Task[None]] = set()
        self._lifelines: dict[AttachedPeer, socket.socket] = {}
        self._pidfds: dict[AttachedPeer, int] = {}

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if the path cannot be, `AddressInUse` if it is taken."""
        self._listener = _listen(self.path)
        self._inode = self.path.stat().st_ino
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def kill(self, peer: AttachedPeer) -> bool:
        """End that very process by SIGKILL, which `on_dead` confirms; False if it is forbidden."""
        pidfd = self._pidfds.get(peer)
        if pidfd is None:
            return True
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return True  # dead, and `on_dead` comes next
        except PermissionError:
            return False
        return True

    def close(self) -> None:
        """Stop listening and hang up on all peers, without further calls."""
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for task in self._greetings:
            task.cancel()
        for peer in list(self._lifelines):
            self._hang_up(peer)
        for peer in list(self._pidfds):
            self._forget_process(peer)
        with contextlib.suppress(FileNotFoundError):
            # A successor may have taken the path already.
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if len(self._greetings) + len(self._pidfds) >= MAX_PEERS:
                sock.close()
                return
            task = asyncio.get_running_loop().create_task(self._greet(sock))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket) -> None:
        pidfd = -1
        is_attached = False
        # A peer that dies or says nothing has no arena, and nobody has heard of it.
        with contextlib.suppress(OSError):
            try:
                pid, pidfd = _peer_process(sock)
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await _readable(sock)
                if hello := sock.recv(MAX_PACKET_BYTES):
                    is_attached = self._pass_arena(sock, AttachedPeer(pid, hello), pidfd)
            finally:
                if not is_attached:
                    sock.close()
                    if pidfd >= 0:
                        os.close(pidfd)

    def _pass_arena(self, sock: socket.socket, peer: AttachedPeer, pidfd: int) -> bool:
        refused = self._on_attached(peer)
        if refused is not None:
            sock.send(encode_body(_Passed(refused=refused)))
            return False
        loop = asyncio.get_running_loop()
        self._lifelines[peer], self._pidfds[peer] = sock, pidfd
        # End of file, or a peer that talks out of turn: either way this is no lifeline any more.
        loop.add_reader(sock.fileno(), self._hang_up, peer)
        loop.add_reader(pidfd, self._died, peer)
        passed = _Passed(
            num_blocks=self._arena.num_blocks,
            block_bytes=self._arena.block_bytes,
            generation=self._arena.generation,
        )
        # If the peer is gone already, its lifeline and its pidfd say so next.
        with contextlib.suppress(OSError):
            socket.send_fds(sock, [encode_body(passed)], [self._arena.fd])
        return True

    def _died(self, peer: AttachedPeer) -> None:
        if peer in self._lifelines:
            self._hang_up(peer)
        self._forget_process(peer)
        self._on_dead(peer)

    def _hang_up(self, peer: AttachedPeer) -> None:
        sock = self._lifelines.pop(peer)
        asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()

    def _forget_process(self, peer: AttachedPeer) -> None:
        pidfd = self._pidfds.pop(peer)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


class Lifeline:
    """The peer's end: `on_lost` is called once if the owner hangs up or dies, not on `close`."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None] | None) -> None:
        self.is_open = True
        self._sock = sock
        self._on_lost = on_lost
        asyncio.get_running_loop().add_reader(sock.fileno(), self._lost)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()

    def _lost(self) -> None:
        self.close()
        if self._on_lost is not None:
            self._on_lost()


async def attach_arena(
    path: Path,
    hello: bytes,
    *,
    timeout_s: float,
    on_lost: Callable[[], None] | None = None,
) -> tuple[Arena, Lifeline]:
    """Map the arena that is served at `path`, all its pages entered.

    Raises `TransferFailed` if nobody answers within `timeout_s` or the arena cannot be mapped, and
    `RegistrationRefused` with the owner's reason. The caller closes both: first the arena.
    """
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(timeout_s):
            sock.connect(str(path))
            sock.send(hello)
            await _readable(sock)
            arena = _receive_arena(sock)
            try:
                await asyncio.to_thread(arena.prefault)
            except BaseException:
                arena.close()
                raise
    except TimeoutError:
        sock.close()
        raise TransferFailed(f"{path} did not pass its arena within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        raise TransferFailed(f"no arena is served at {path}: {error.strerror}") from None
    except BaseException:
        sock.close()
        raise
    return arena, Lifeline(sock, on_lost)


def _receive_arena(sock: socket.socket) -> Arena:
    packet, fds, flags, _ = socket.recv_fds(
        sock, MAX_PACKET_BYTES, maxfds=1, flags=socket.MSG_CMSG_CLOEXEC
    )
    try:
        if not packet:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("the answer with the arena is cut off: are too many files open?")
        passed = decode_body(packet, _Passed)
        if passed.refused:
            raise RegistrationRefused(passed.refused)
        if not fds or passed.num_blocks < 1 or passed.block_bytes < 1:
            raise ProtocolError("the answer has no arena")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Arena.attach(fds[0], passed.num_blocks, passed.block_bytes, generation=passed.generation)


def _peer_process(sock: socket.socket) -> tuple[int, int]:
    """Pid and pidfd of the process that connected; `OSError` if it cannot be told.

    The kernel noted the process when it connected. Its pidfd is exact from Linux 6.5 on; before,
    a process that dies within microseconds of connecting could be mistaken for one with its pid.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", raw)
    try:
        return pid, sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return pid, os.pidfd_open(pid)


def _listen(path: Path) -> socket.socket:
    check_path(path)
    make_private(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if path.exists():
            _remove_stale(path)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(MAX_PEERS)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the KV arena cannot be served at {path} ({error.strerror}): "
            "choose another runtime_dir"
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


def check_path(path: Path) -> None:
    """Raise `ConfigError` for a path that is too long for a socket."""
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {size_bytes} bytes; at most {MAX_PATH_BYTES} are possible: "
            "choose a shorter runtime_dir"
        )


def make_private(folder: Path) -> None:
    """Make the folder if it is not there; raise `ConfigError` unless it is of this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"runtime_dir is {folder}: it cannot be made ({error.strerror}); choose another"
        ) from None
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"runtime_dir {folder} belongs to user {info.st_uid} with mode "
            f"{stat.S_IMODE(info.st_mode):o}: others must not reach the KV cache in it; "
            f"chmod 700 it, or choose another"
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead process; raises `AddressInUse` for anything else."""
    if not path.is_socket():
        raise AddressInUse(f"{path} is in the way and is no socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise AddressInUse(f"{path} is another's socket: {error.strerror}") from None
    raise AddressInUse(f"another worker serves {path}: give this one another worker_id")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())
