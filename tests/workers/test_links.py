"""How a worker chooses the transport of a link: the best that both have and that works."""

from array import array
from typing import Any

import pytest

from llmrt.wire import messages as m
from llmrt.workers import effects as do
from llmrt.workers import events as ev
from llmrt.workers.probing import MIN_TIMED_BYTES, PROBE_AGAIN_S, SLOW_READS

BOTH = ("nixl", "tcp")
RDMA, TCP = "nixl://them/1", "tcp://them/2"


def introduce(bench: Any, peer: Any, bulk: tuple[str, ...], **fields: Any) -> None:
    settings = peer.settings
    row = m.Peer(
        worker_id=peer.name.worker_id,
        epoch=peer.name.epoch,
        role=settings.role,
        link="ipc://link",
        contract=settings.contract,
        process=settings.process,
    )
    bench.from_broker(m.PEERS, m.Peers(peers=(row,)))
    bench.handle(ev.PeerConnected(peer.name, (TCP,)))
    greet(bench, peer, bulk, **fields)


def greet(bench: Any, peer: Any, bulk: tuple[str, ...], **fields: Any) -> None:
    settings = peer.settings
    values: dict[str, Any] = {
        "worker_id": peer.name.worker_id,
        "epoch": peer.name.epoch,
        "arena_generation": settings.arena_generation,
        "num_blocks": settings.num_blocks,
        "arena_socket": "/arena",
        "bulk": bulk,
        "contract": settings.contract,
        "process": settings.process,
    }
    bench.from_peer(peer.name, m.PEER_HELLO, m.PeerHello(**(values | fields)))


def probes_of(bench: Any) -> list[do.ProbeLink]:
    return [effect for effect in bench.effects if isinstance(effect, do.ProbeLink)]


def row_of(bench: Any) -> m.LinkRow:
    bench.tick()
    row: m.LinkRow = bench.sent(m.HEARTBEAT)[-1].body.load.link_rows["prefill-0"]
    return row


@pytest.fixture
def far_pair(make_worker: Any) -> Any:
    """An owner that has two transports, and a prefill worker on another host."""
    owner = make_worker("decode", transports=BOTH)
    host = m.ProcessName(boot_id="other", pid_namespace="x", pid=1, start_ticks=1)
    return owner, make_worker("prefill", process=host)


def test_the_best_transport_that_works_is_taken(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (TCP, RDMA))
    (probe,) = probes_of(owner)
    assert probe.address == RDMA
    assert len(probe.target) == owner.ledger.num_held > 0
    owner.clear()
    owner.handle(ev.LinkProbed(probe.probe_id, 2e9, 1e-5, "one node"))
    assert owner.ledger.num_held == 0
    assert probes_of(owner) == []
    assert [told.body for told in owner.sent(m.LINKED)] == [
        m.Linked(transport="nixl", bytes_per_s=2e9, latency_s=1e-5)
    ]
    assert row_of(owner) == m.LinkRow(
        transport="nixl",
        bytes_per_s=2e9,
        latency_s=1e-5,
        numa="one node",
        why_not={"shm": "the peer is on another host"},
    )


def test_what_fails_is_noted_and_the_next_one_tried(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (TCP, RDMA))
    owner.handle(ev.LinkProbed(probes_of(owner)[0].probe_id, failure="no device"))
    assert [probe.address for probe in probes_of(owner)] == [RDMA, TCP]
    assert row_of(owner).transport == "pending"
    owner.handle(ev.LinkProbed(probes_of(owner)[1].probe_id, 1e9, 1e-5, "one node"))
    row = row_of(owner)
    assert row.transport == "tcp"
    assert row.why_not["nixl"] == "no device"


def test_without_a_transport_the_link_is_refused_and_tried_again_later(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (TCP,))
    owner.handle(ev.LinkProbed(probes_of(owner)[0].probe_id, failure="no route"))
    row = row_of(owner)
    assert row.transport == "refused"
    assert row.why_not["nixl"] == "the peer does not offer it"
    owner.dispatch([5, 6, 7], prefill=prefill.name, max_tokens=1)
    assert owner.sent(m.OFFER) == []
    owner.clear()
    owner.tick(PROBE_AGAIN_S + 1)
    (probe,) = probes_of(owner)
    owner.handle(ev.LinkProbed(probe.probe_id, 1e9, 1e-5, "one node"))
    assert row_of(owner).transport == "tcp"


def test_a_peer_that_dies_during_its_probe_leaves_no_block(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (TCP,))
    (probe,) = probes_of(owner)
    owner.handle(ev.MapperDied(prefill.name))
    assert owner.ledger.num_held == len(probe.target)  # until nothing writes there any more
    owner.handle(ev.LinkProbed(probe.probe_id, failure="it died"))
    assert owner.ledger.num_held == 0


def test_a_full_arena_is_probed_when_it_has_room(far_pair: Any) -> None:
    owner, prefill = far_pair
    blocks = owner.ledger.allocate(owner.ledger.num_free)
    introduce(owner, prefill, (TCP,))
    assert probes_of(owner) == []
    owner.ledger.release(blocks)
    owner.tick(2.0)
    assert len(probes_of(owner)) == 1


def test_new_addresses_of_a_peer_are_probed(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (RDMA,))
    owner.handle(ev.LinkProbed(probes_of(owner)[0].probe_id, 1e9, 1e-5, "one node"))
    owner.clear()
    moved = "nixl://them/3"
    greet(owner, prefill, (moved,))
    (probe,) = probes_of(owner)
    assert probe.address == moved


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ({"boot_id": "elsewhere"}, "the peer is on another host"),
        ({"pid_namespace": "elsewhere"}, "another pid namespace"),
    ],
)
def test_shared_memory_that_cannot_be_says_why(
    make_worker: Any, process: dict[str, str], reason: str
) -> None:
    owner = make_worker("decode")
    prefill = make_worker("prefill")
    ours = owner.settings.process
    names = {"boot_id": ours.boot_id, "pid_namespace": ours.pid_namespace} | process
    introduce(owner, prefill, (TCP,), process=m.ProcessName(**names, pid=1, start_ticks=1))
    assert reason in row_of(owner).why_not["shm"]


def test_the_rate_of_a_mapping_and_the_round_trip_are_told_to_both(
    make_worker: Any, link: Any
) -> None:
    owner, prefill = make_worker("decode"), make_worker("prefill")
    link(owner, prefill, is_mapped=False)
    owner.handle(ev.ArenaMapped(prefill.name))
    shape = ev.ArenaShape(
        owner.settings.num_blocks,
        owner.settings.contract.block_bytes,
        owner.settings.arena_generation,
    )
    prefill.handle(ev.ArenaAttached(owner.name, shape))
    (probe,) = probes_of(prefill)
    assert probe.target == array("I")
    prefill.handle(ev.LinkProbed(probe.probe_id, 8e9, 0.0, "one node"))
    (told,) = prefill.sent(m.LINKED)
    owner.relay(told, prefill.name)
    (answer,) = owner.sent(m.LINKED)
    prefill.now += 0.001
    prefill.relay(answer, owner.name)
    final = prefill.sent(m.LINKED)[-1]
    assert final.body.latency_s == pytest.approx(0.001)
    owner.clear()
    owner.relay(final, prefill.name)
    assert owner.sent(m.LINKED) == []
    row = row_of(owner)
    assert (row.transport, row.bytes_per_s) == ("shm", 8e9)
    assert row.latency_s == pytest.approx(0.001)


def test_a_transport_that_has_become_slow_is_warned_about(far_pair: Any) -> None:
    owner, prefill = far_pair
    introduce(owner, prefill, (TCP,))
    owner.handle(ev.LinkProbed(probes_of(owner)[0].probe_id, 1e9, 1e-5, "one node"))
    links = owner.core._links
    for rate in (0.5e9, 0.2e9):
        for _ in range(SLOW_READS):
            links.read_took(prefill.name, MIN_TIMED_BYTES, MIN_TIMED_BYTES / rate)
        assert owner.core.counters.get("links_slow", 0) == (rate < 0.25e9)
    assert 0.2e9 < row_of(owner).recent_bytes_per_s < 0.5e9
