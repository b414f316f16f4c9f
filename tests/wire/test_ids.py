"""Names of one life of a worker, as sockets and arenas spell them."""

import pytest

from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import WorkerId, WorkerName


@pytest.mark.parametrize("worker_id", ["decode-0", "a@b"])
def test_a_routing_id_names_the_life_that_it_was_made_from(worker_id: str) -> None:
    name = WorkerName(WorkerId(worker_id), 17)
    assert name.full_name == f"{worker_id}@17"
    assert WorkerName.from_routing_id(name.routing_id) == name


@pytest.mark.parametrize("routing_id", [b"", b"@1", b"decode-0", b"decode-0@", b"d@-1", b"\xff"])
def test_what_names_no_worker_is_refused(routing_id: bytes) -> None:
    with pytest.raises(ProtocolError, match="names no worker"):
        WorkerName.from_routing_id(routing_id)
