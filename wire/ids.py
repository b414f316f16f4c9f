"""Names of things that cross processes, each with the life it belongs to."""

from typing import NamedTuple, NewType

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


class Attempt(NamedTuple):
    """One try at a request: the epoch of the broker that made it, and its number there.

    Attempts order as tuples; a restarted broker takes an epoch above the highest it hears of,
    so a later attempt always compares greater.
    """

    epoch: int
    n: int


NO_ATTEMPT = Attempt(0, 0)


class WorkerName(NamedTuple):
    """One life of a worker: its name, and the epoch that it took when it started."""

    worker_id: WorkerId
    epoch: int
