"""The interface of bulk links, over which a worker reads blocks of a peer's arena into its own.

The owner of an arena has one exporter per transport; it tells each peer an address of its own over
the control link. The peer makes a reader of that address. Every transport behaves alike:
`tests/kvtransfer/test_transports.py` says how.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmrt.kvtransfer.arena import Arena
from llmrt.wire.ids import BlockId, LeaseId

PROBE_LEASE = LeaseId(0)
"""No ledger gives it. Who has a token may read any block under it, and believe none of it."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a peer wants to read: `peer` is the name that its address was made for."""

    peer: str
    lease_id: LeaseId
    blocks: Sequence[int]


Check = Callable[[ReadRequest], str | None]
"""None, or why a read is refused. Called on threads: `Ledger.leased_blocks` is safe there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Times in seconds. `host` and `port` are where peers reach us; port 0 takes a free one.

    A read is divided over up to `connections`, and a part whose connection breaks is read again up
    to `retries` times. `max_readers` bounds the connections of all peers together. Without progress
    for `stall_timeout_s` the owner hangs up.
    """

    host: str = "127.0.0.1"
    port: int = 0
    connections: int = 4
    retries: int = 1
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    max_readers: int = 256


class BlockReader(Protocol):
    """The reader's end of a bulk link to one peer: copies blocks of its arena into ours."""

    async def read(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_blocks: Sequence[BlockId],
        *,
        timeout_s: float,
    ) -> None:
        """Copy `src_blocks` of the peer's arena into `dst_blocks` of ours, in that order.

        Returns when all bytes are there. Raises `TransferFailed` if the peer refuses, dies, or
        takes longer than `timeout_s`. Either way, and when cancelled, nothing writes to
        `dst_blocks` afterwards.
        """
        ...

    async def close(self) -> None:
        """Hang up; reads that go on fail. Nothing writes to our arena when it returns."""
        ...


class ArenaExporter(Protocol):
    """The owner's end: lets peers read our arena."""

    def start(self) -> None:
        """May block for seconds. Raises a `LlmrtError` if it cannot be."""
        ...

    def address_for(self, peer: str) -> str:
        """A URL whose scheme names the transport, with a new token; tell it to `peer` alone.

        It holds until `revoke`, and ends an earlier one. Raises `TransferFailed` if there is none
        for now.
        """
        ...

    def revoke(self, peer: str) -> None:
        """End a peer's right to read."""
        ...

    def close(self) -> None:
        """End all reads. When it returns, nothing reads the arena any more."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to read a peer's arena; `scheme` begins its addresses and names it everywhere.

    `why_not` says why it cannot be used in this process, or None. The arena of a reader is ours;
    a reader raises `ProtocolError` for an address that it cannot understand.
    """

    scheme: str
    why_not: Callable[[], str | None]
    exporter: Callable[[Arena, Check, LinkOptions], ArenaExporter]
    reader: Callable[[str, Arena, LinkOptions], BlockReader]
