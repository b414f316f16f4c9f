"""Whole clusters of real machines in virtual time: the promises hold under faults and kills."""

from array import array
from functools import partial
from typing import Any

import pytest

from llmrt.kvtransfer.ledger import Ledger
from llmrt.simulation.cluster import COLOCATED, SPLIT, Cluster, Layout
from llmrt.simulation.processes import SimClient
from llmrt.simulation.world import Faults
from llmrt.wire.ids import BlockId, WorkerName
from llmrt.wire.messages import Finished
from llmrt.wire.sampling import SamplingParams

LEASES = Layout(num_prefill=2, num_decode=2, transfer="tcp")
# Just above what the longest request takes: everything is preempted now and then.
TIGHT = Layout(num_prefill=1, num_decode=1, num_blocks=16)
TIGHT_LEASES = Layout(num_prefill=1, num_decode=1, num_blocks=16, transfer="tcp")
HELD_BACK = Layout(num_both=1, num_prefill=1, num_decode=1, stream_interval_s=0.05)
DRAFTING = {
    "drafts": Layout(num_both=2, num_drafts=4),
    "drafts split": Layout(num_prefill=2, num_decode=2, num_drafts=4),
    "drafts tight": Layout(num_prefill=1, num_decode=2, num_blocks=16, num_drafts=16),
}
LAYOUTS = {
    **DRAFTING,
    "colocated": COLOCATED,
    "split": SPLIT,
    "leases": LEASES,
    "tight": TIGHT,
    "tight leases": TIGHT_LEASES,
    "held back": HELD_BACK,
    "weighed": Layout(num_prefill=1, num_decode=2, placement="auto"),
    "checked in place": Layout(num_prefill=2, num_decode=2, checksums="full"),
    "leases sampled": Layout(num_prefill=2, num_decode=2, transfer="tcp", checksums="sampled"),
}
LOSSY = Faults(drop=0.02, double=0.05, late=0.05)


def run(cluster: Cluster, *, num_requests: int = 25, spread_s: float = 3.0) -> None:
    """Submit at random times, then let everything come to its end."""
    world = cluster.world
    world.run(until=3.0)
    for _ in range(num_requests):
        world.at(3.0 + world.rng.uniform(0, spread_s), cluster.submit_random)
    world.run(until=300.0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_undisturbed_requests_all_finish_with_the_expected_tokens(
    layout: Layout, seed: int
) -> None:
    cluster = Cluster(seed, layout)
    run(cluster)
    counts = cluster.assert_promises()
    assert set(counts) <= {"stop", "length", "cancelled"}, counts
    assert counts["stop"] + counts["length"] >= 15
    cluster.assert_nothing_left()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_a_faulty_network_costs_no_token_and_no_block(layout: Layout, seed: int) -> None:
    cluster = Cluster(seed, layout, LOSSY)
    run(cluster)
    cluster.assert_promises()
    cluster.assert_nothing_left()


@pytest.mark.parametrize("layout", DRAFTING.values(), ids=DRAFTING.keys())
def test_drafts_are_taken_and_refused(layout: Layout) -> None:
    cluster = Cluster(0, layout)
    run(cluster)
    schedulers = [worker.scheduler for worker in cluster.workers.values()]
    num_drafted = sum(scheduler.drafting.num_drafted for scheduler in schedulers)
    num_accepted = sum(scheduler.drafting.num_accepted for scheduler in schedulers)
    assert 50 < num_accepted < num_drafted - 50
    ends = [outcome.ends[0] for outcome in cluster.outcomes()]
    finished = [end for end in ends if isinstance(end, Finished)]
    assert 50 < sum(end.num_accepted for end in finished) <= num_accepted


def kill_some(cluster: Cluster) -> None:
    """Half of the workers die at random times, and come back."""
    world = cluster.world
    for worker_id in world.rng.sample(sorted(cluster.workers), k=len(cluster.workers) // 2):
        worker = cluster.workers[worker_id]
        when = world.rng.uniform(3.0, 6.0)
        world.at(when, partial(cluster.kill, worker))
        cluster.restart(worker, when + world.rng.uniform(0.5, 3.0))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_killed_workers_cost_no_token_and_no_block(layout: Layout, seed: int) -> None:
    cluster = Cluster(seed, layout)
    kill_some(cluster)
    run(cluster, num_requests=40)
    counts = cluster.assert_promises()
    assert counts["stop"] + counts["length"] >= 15
    cluster.assert_nothing_left()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_kills_under_a_faulty_network_cost_no_token_and_no_block(layout: Layout, seed: int) -> None:
    cluster = Cluster(seed, layout, LOSSY)
    kill_some(cluster)
    run(cluster)
    cluster.assert_promises()
    cluster.assert_nothing_left()


def stall_some(cluster: Cluster, longest_s: float) -> None:
    """Half of the workers do not run for a while, in the middle of whatever they do."""
    world = cluster.world
    for worker_id in world.rng.sample(sorted(cluster.workers), k=len(cluster.workers) // 2):
        worker = cluster.workers[worker_id]
        seconds = world.rng.uniform(0.1, longest_s)
        world.at(world.rng.uniform(3.0, 6.0), partial(worker.stall, seconds))


@pytest.mark.parametrize("longest_s", [4.0, 60.0])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_writers_that_stall_and_come_back_late_cost_no_token_and_no_block(
    layout: Layout, seed: int, longest_s: float
) -> None:
    cluster = Cluster(seed, layout, LOSSY if seed % 2 else None)
    stall_some(cluster, longest_s)
    run(cluster)
    cluster.assert_promises()
    cluster.assert_nothing_left()


SHARING = {
    "grants": Layout(num_prefill=2, num_decode=1, num_blocks=12),
    "leases": Layout(num_prefill=2, num_decode=1, num_blocks=12, transfer="tcp"),
    "beside": Layout(num_both=1, num_prefill=1, num_decode=1, num_blocks=12),
}


def chat(cluster: Cluster, num_turns: int = 3) -> None:
    """Turns of one conversation, each behind the last one's prompt and some new tokens."""
    world = cluster.world
    client = world.rng.choice(list(cluster.clients.values()))
    first = 10 + world.rng.randrange(6) * 60
    for turn in range(num_turns):
        prompt = array("I", range(first, first + 70 + 40 * turn))
        params = SamplingParams(max_tokens=world.rng.choice([1, 8, 40]), seed=7, temperature=1.0)
        world.after(turn * world.rng.uniform(0, 0.5), partial(ask, cluster, client, prompt, params))


def ask(cluster: Cluster, client: SimClient, prompt: "array[int]", params: SamplingParams) -> None:
    cluster.submit(client, prompt, params)


@pytest.mark.parametrize("faults", [None, LOSSY], ids=["calm", "lossy"])
@pytest.mark.parametrize("layout", SHARING.values(), ids=SHARING.keys())
def test_prefixes_that_are_evicted_shared_and_read_at_once_while_writers_stall_and_die(
    layout: Layout, faults: Faults | None
) -> None:
    """Six conversations in an arena that holds the prefixes of two of them."""
    num_shared: list[int] = []
    num_evicted: list[int] = []
    make_grant = Ledger.grant

    def watch(
        ledger: Ledger, writer: WorkerName, count: int, prefix: list[BlockId], *tail: Any
    ) -> Any:
        num_shared.append(sum(ledger._pins[block] > 1 for block in prefix))
        return make_grant(ledger, writer, count, prefix, *tail)

    for seed in range(3):
        cluster = Cluster(seed, layout, faults)
        world = cluster.world
        world.run(until=3.0)
        for _ in range(20):
            world.at(3.0 + world.rng.uniform(0, 4.0), partial(chat, cluster))
        for worker in cluster.workers.values():
            if worker.role == "prefill":
                stalls = partial(worker.stall, world.rng.choice([0.3, 3.0, 20.0]))
                world.at(world.rng.uniform(3.0, 7.0), stalls)
        kill_some(cluster)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "grant", watch)
            world.run(until=300.0)
        cluster.assert_promises()
        cluster.assert_nothing_left()
        workers = [*cluster.workers.values(), *cluster.graveyard]
        num_evicted.append(sum(worker.ledger.num_evicted for worker in workers))
    assert all(num_evicted)
    assert sum(num_shared) > 0  # what is to be tested has happened


def test_one_seed_replays_one_history() -> None:
    hashes = set()
    for _ in range(2):
        cluster = Cluster(7, SPLIT, LOSSY)
        run(cluster)
        hashes.add(cluster.world.history_hash)
    assert len(hashes) == 1
