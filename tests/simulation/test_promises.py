"""Whole clusters of real machines in virtual time: the promises hold under faults and kills."""

from functools import partial

import pytest

from llmrt.simulation.cluster import COLOCATED, SPLIT, Cluster, Layout
from llmrt.simulation.world import Faults
from llmrt.wire.messages import Finished

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
    run(cluster)
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


def test_one_seed_replays_one_history() -> None:
    hashes = set()
    for _ in range(2):
        cluster = Cluster(7, SPLIT, LOSSY)
        run(cluster)
        hashes.add(cluster.world.history_hash)
    assert len(hashes) == 1
