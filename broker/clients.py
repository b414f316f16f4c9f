"""The client sessions that the broker has heard of."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmrt.wire.ids import ClientId, RequestId
from llmrt.wire.messages import ProcessName


@dataclass(slots=True, eq=False)
class Client:
    """One session. `requests` are its live and ended ones.

    `is_reachable` turns false when a message could not be sent, and true with the next one that
    comes. `orphaned_at` is when its silence was noticed.
    """

    client_id: ClientId
    heard_at: float
    process: ProcessName | None = None
    requests: dict[RequestId, None] = field(default_factory=dict)
    is_reachable: bool = True
    orphaned_at: float | None = None


class ClientTable:
    def __init__(self) -> None:
        self._by_id: dict[ClientId, Client] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, client_id: ClientId) -> Client | None:
        return self._by_id.get(client_id)

    def add(self, client_id: ClientId, now: float) -> Client:
        client = self._by_id[client_id] = Client(client_id, heard_at=now)
        return client

    def forget(self, client: Client) -> None:
        del self._by_id[client.client_id]
