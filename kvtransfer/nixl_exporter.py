"""Lets peers read our arena through NIXL (RDMA).

Reads are one-sided: neither we nor NIXL see one begin, and nothing here can refuse one. So a reader
asks over the control link, after its last read, whether the lease still holds. A notice tells that
a read has ended; its token says whose it was.
"""

import contextlib
import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.nixl_address import TOKEN_BYTES, Notice, url_of
from llmrt.kvtransfer.nixl_child import NixlChild
from llmrt.kvtransfer.nixl_frames import ArenaAddress, Failed, Noticed, Open, Opened, read_report
from llmrt.wire.errors import TransferFailed
from llmrt.wire.ids import LeaseId

# Registering pins the arena's pages: seconds for tens of gigabytes.
START_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """`peer` has all bytes of a read. `transfer_id` counts its reads."""

    peer: str
    lease_id: LeaseId
    transfer_id: int
    num_blocks: int


def _ignore(*_: object) -> None:
    pass


class NixlExporter:
    """One process with one NIXL agent, which has the whole arena registered.

    If that process dies it is started again, and all addresses are new; `on_moved` says so. Both
    calls come from a thread of the exporter.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        on_read: Callable[[ReadEnded], None] = _ignore,
        on_moved: Callable[[], None] = _ignore,
    ) -> None:
        self.num_strangers = 0
        """Notices without a token that holds: of a revoked peer, or of nobody we know."""
        self._arena = arena
        self._on_read = on_read
        self._on_moved = on_moved
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._child: NixlChild | None = None
        self._reports: BinaryIO | None = None
        self._address: ArenaAddress | None = None
        self._peer_to_token: dict[str, bytes] = {}
        self._watcher = threading.Thread(target=self._watch, name="kv-nixl", daemon=True)

    def start(self) -> None:
        """Register the arena: 0.7 s and more. Raises `TransferFailed` if NIXL cannot be used."""
        self._open()
        self._watcher.start()

    def address_for(self, peer: str) -> str:
        """Where `peer` reads, with a new token in it; tell it to nobody else.

        It holds until `revoke`, and ends an earlier one. Raises `TransferFailed` while the process
        is being started again.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            if self._address is None:
                raise TransferFailed("KV cannot be read by NIXL: its process is starting again")
            self._peer_to_token[peer] = token
            return url_of(self._address, token)

    def revoke(self, peer: str) -> None:
        """Take no notice of `peer` any more.

        Its reads cannot be stopped: NIXL has no way to take memory keys back from one peer, and to
        register the arena anew would take them from all. `close` does that.
        """
        with self._lock:
            self._peer_to_token.pop(peer, None)

    def close(self) -> None:
        """End all reads. When it returns, nothing reads the arena any more."""
        self._is_closing.set()
        with self._lock:
            self._address = None
            if self._child is not None:
                self._child.end()
        if self._watcher.is_alive():
            self._watcher.join()

    def _open(self) -> None:
        arena = self._arena
        order = Open(
            agent=f"arena-{secrets.token_hex(8)}",
            num_blocks=arena.num_blocks,
            block_bytes=arena.block_bytes,
            generation=arena.generation,
        )
        with self._lock:
            if self._is_closing.is_set():
                raise TransferFailed("KV cannot be read by NIXL: it is closed")
            child = self._child = NixlChild(order, arena)
        child.sock.settimeout(START_TIMEOUT_S)
        reports = child.sock.makefile("rb")
        try:
            report = read_report(reports)
        except OSError as error:
            report = Failed(f"{error}")
        if isinstance(report, Opened):
            child.sock.settimeout(None)
            with self._lock:
                self._reports, self._address = reports, report.address
            return
        reports.close()
        how = child.end()
        reason = report.reason if isinstance(report, Failed) else how
        raise TransferFailed(f"KV cannot be read by NIXL: {reason}")

    # On the thread

    def _watch(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closing.is_set():
            if self._reports is not None:
                self._follow(self._reports)
                pause_s = _FIRST_PAUSE_S
            self._lose_child()
            if self._is_closing.wait(pause_s):
                return
            try:
                self._open()
                self._on_moved()
            except TransferFailed:
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _follow(self, reports: BinaryIO) -> None:
        """Take notices until the process ends."""
        with reports, contextlib.suppress(OSError):
            while isinstance(report := read_report(reports), Noticed):
                self._take(report.notice)

    def _take(self, raw: bytes) -> None:
        notice = Notice.unpack(raw)
        token = b"" if notice is None else notice.token
        with self._lock:
            known = list(self._peer_to_token.items())
        # All are compared, so that the time tells nothing.
        peers = [peer for peer, other in known if hmac.compare_digest(token, other)]
        if notice is None or not peers:
            self.num_strangers += 1
            return
        self._on_read(ReadEnded(peers[0], notice.lease_id, notice.transfer_id, notice.num_blocks))

    def _lose_child(self) -> None:
        with self._lock:
            self._address = self._reports = None
            if self._child is not None:
                self._child.end()
                self._child = None
