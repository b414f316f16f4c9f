"""Names of things that cross processes, each with the life it belongs to."""

from typing import NamedTuple, NewType

import msgspec

from llmrt.wire.errors import ProtocolError

RequestId = NewType("RequestId", bytes)
"""16 random bytes, chosen by the client; written in hex in logs and on the command line."""

WorkerId = NewType("WorkerId", str)
"""The name of a worker, stable over its restarts: `decode-0`."""

ClientId = NewType("ClientId", bytes)
"""The routing id of a client's connection: 16 random bytes per session."""

BlockId = NewType("BlockId", int)
"""Index of a block in one arena."""

GrantId = NewType("GrantId", int)
"""A right to write, unique within one epoch of the worker that made it."""

LeaseId = NewType("LeaseId", int)
"""A right to read, unique within one epoch of the worker that made it."""

REQUEST_ID_BYTES = 16


class Attempt(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One try at a request: the epoch of the broker that made it, and its number there.

    Attempts order by epoch, then number; a restarted broker takes an epoch above the highest it
    hears of, so a later attempt always compares greater.
    """

    epoch: int
    n: int


NO_ATTEMPT = Attempt(0, 0)


class WorkerName(NamedTuple):
    """One life of a worker: its name, and the epoch that it took when it started."""

    worker_id: WorkerId
    epoch: int

    @property
    def full_name(self) -> str:
        """`decode-0@17`: what arenas, sockets and bulk readers call this life."""
        return f"{self.worker_id}@{self.epoch}"

    @property
    def routing_id(self) -> bytes:
        """The full name as bytes: two lives never meet on one socket."""
        return self.full_name.encode()

    @classmethod
    def from_routing_id(cls, routing_id: bytes) -> "WorkerName":
        """The life behind a routing id; raises `ProtocolError` if it names none."""
        worker_id, _, epoch = routing_id.decode(errors="replace").rpartition("@")
        if not worker_id or not epoch.isdecimal():
            raise ProtocolError(f"routing id {routing_id[:64]!r} names no worker")
        return cls(WorkerId(worker_id), int(epoch))
