"""Processes die and freeze in the middle of requests: the text is that of an undisturbed run."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster
from tests.integration.probes import (
    check_stream,
    pid_of,
    wait_until,
    wait_until_idle,
    wait_until_linked,
)

from llmrt.client import Client, StreamEvent
from llmrt.wire.errors import NoWorker, WorkerLost
from llmrt.wire.messages import RequestRow

pytestmark = pytest.mark.integration

# With 2 cores and other tests beside it, a worker needs some seconds to load again.
BACK_S = 90.0
NUM_TOKENS = 200
NUM_WORKERS = 4


@pytest.fixture(scope="module")
def mortal(start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """Two of each, for tests that kill some of them and wait until they are back."""
    with start_cluster("--prefill", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.fixture
def reader(mortal: RunningCluster) -> Iterator[Client]:
    with Client(mortal.bind) as client:
        yield client
        wait_until_idle(client, 30)


def long_prompt(salt: int) -> list[int]:
    """In nobody's cache; it takes many steps to prefill."""
    return [2000 + (salt * 4001 + i * 13 + i * i) % 40000 for i in range(3600)]


def epochs(client: Client) -> dict[str, int]:
    return {row.worker_id: row.epoch for row in client.workers().workers}


def wait_until_back(client: Client, name: str, old: int) -> None:
    """Until another life of this worker serves, linked with all others."""
    wait_until(lambda: epochs(client).get(name, old) != old, BACK_S, f"{name} is back")
    wait_until_linked(client, NUM_WORKERS, BACK_S)


def the_request(client: Client, is_wanted: Callable[[RequestRow], bool]) -> RequestRow:
    """The only live request, once it is as wanted."""
    found: list[RequestRow] = []

    def look() -> bool:
        found[:] = [row for row in client.workers().requests if is_wanted(row)]
        return len(found) == 1

    wait_until(look, 20, "one request in the wanted stage")
    return found[0]


def test_a_stream_survives_the_death_of_its_owner(mortal: RunningCluster, reader: Client) -> None:
    """No token is lost or repeated, and the text goes on as if nothing had been."""
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 11}
    undisturbed = reader.generate("A long story", **options)  # type: ignore[arg-type]
    before = epochs(reader)
    events: list[StreamEvent] = []
    with reader.stream("A long story", **options) as stream:  # type: ignore[arg-type]
        for event in stream:
            events.append(event)
            if len(events) == 20:
                owner = the_request(reader, lambda row: True).decode_worker
                os.kill(pid_of(mortal, owner), signal.SIGKILL)
    check_stream(events)
    assert stream.result.token_ids == undisturbed.token_ids
    assert stream.result.text == undisturbed.text
    assert stream.result.decode_worker != owner
    assert len(stream.result.token_ids) == NUM_TOKENS
    wait_until_back(reader, owner, before[owner])
    after = epochs(reader)
    assert {name for name in after if after[name] != before[name]} == {owner}


def test_a_prefill_worker_may_die_in_the_middle_and_come_back(
    mortal: RunningCluster, reader: Client, colocated: RunningCluster
) -> None:
    """Its successor under the same name is not taken for it, and nobody else is restarted."""
    prompt = long_prompt(1)
    with Client(colocated.bind) as client:
        expected = client.generate(prompt, max_tokens=8).token_ids
        short = client.generate("hello there", max_tokens=8)
    before = epochs(reader)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(reader.generate, prompt, max_tokens=8)
        victim = the_request(reader, lambda row: bool(row.prefill_worker)).prefill_worker
        os.kill(pid_of(mortal, victim), signal.SIGKILL)
        assert asked.result(60).token_ids == expected
    wait_until_back(reader, victim, before[victim])
    after = epochs(reader)
    assert {name for name in after if after[name] != before[name]} == {victim}
    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda _: reader.generate("hello there", max_tokens=8), range(20)))
    assert {result.token_ids for result in results} == {short.token_ids}
    assert victim in {result.prefill_worker for result in results}


def test_a_decode_worker_comes_back_under_its_name(
    mortal: RunningCluster, reader: Client, colocated: RunningCluster
) -> None:
    """Its arena of the old life is mapped nowhere, and that of the new one in place everywhere."""
    with Client(colocated.bind) as client:
        expected = client.generate("hello there", max_tokens=8)
    before = epochs(reader)
    os.kill(pid_of(mortal, "decode-1"), signal.SIGKILL)
    wait_until_back(reader, "decode-1", before["decode-1"])
    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda _: reader.generate("hello there", max_tokens=8), range(20)))
    after = epochs(reader)
    assert {name for name in after if after[name] != before[name]} == {"decode-1"}
    assert {result.token_ids for result in results} == {expected.token_ids}
    assert "decode-1" in {result.decode_worker for result in results}
    for name in ("prefill-0", "prefill-1"):
        maps = Path(f"/proc/{pid_of(mortal, name)}/maps").read_text()
        assert maps.count("memfd:llmrt-kv") == 3  # its own, and those of two owners


def test_a_prefill_worker_that_pauses_is_waited_for(
    mortal: RunningCluster, reader: Client, colocated: RunningCluster
) -> None:
    prompt = long_prompt(2)
    with Client(colocated.bind) as client:
        expected = client.generate(prompt, max_tokens=8).token_ids
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(reader.generate, prompt, max_tokens=8, deadline_s=60)
        frozen = the_request(reader, lambda row: bool(row.prefill_worker)).prefill_worker
        pid = pid_of(mortal, frozen)
        os.kill(pid, signal.SIGSTOP)
        waking = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
        waking.start()
        result = asked.result(60)
    waking.join()
    assert result.token_ids == expected
    wait_until_linked(reader, NUM_WORKERS)
    assert pid_of(mortal, frozen) == pid


def test_a_prefill_worker_that_stays_frozen_is_fenced(
    mortal: RunningCluster, reader: Client, colocated: RunningCluster
) -> None:
    """The owner computes the prompt, and has its blocks back once that process is dead."""
    prompt = long_prompt(3)
    with Client(colocated.bind) as client:
        expected = client.generate(prompt, max_tokens=8).token_ids
    before = epochs(reader)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(reader.generate, prompt, max_tokens=8, deadline_s=60)
        request = the_request(reader, lambda row: bool(row.prefill_worker))
        os.kill(pid_of(mortal, request.prefill_worker), signal.SIGSTOP)
        assert asked.result(60).token_ids == expected
    wait_until_back(reader, request.prefill_worker, before[request.prefill_worker])
    rows = {row.worker_id: row for row in reader.workers().workers}
    assert rows[request.decode_worker].num_fenced == 1
    assert rows[request.decode_worker].num_quarantined_blocks == 0


def test_an_owner_serves_on_while_a_stopped_writer_has_40_percent_of_its_arena(
    start_cluster: StartCluster,
) -> None:
    """It is stopped before it hears of the grant, or this small model would be done with it."""
    with (
        start_cluster("--prefill", "1", "--decode", "1", "--kv-tokens", "8192") as cluster,
        Client(cluster.bind) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        wait_until_linked(client, 2)
        old = epochs(client)["prefill-0"]
        events: list[StreamEvent] = []
        with client.stream("A story", max_tokens=4000, ignore_eos=True, deadline_s=90) as stream:
            for event in stream:
                events.append(event)
                if len(events) == 5:
                    os.kill(pid_of(cluster, "prefill-0"), signal.SIGSTOP)
                    stopped_at, num_before = time.monotonic(), len(events)
                    asked = pool.submit(client.generate, long_prompt(4), max_tokens=2)
                    wait_until(lambda: num_granted(client) >= 0.4 * 256, 4, "40 % are granted")
                elif len(events) % 20 == 0 and has_fenced(client):
                    break
        assert time.monotonic() - stopped_at < 10
        assert len(events) - num_before > 50
        assert asked.result(60).usage.completion_tokens == 2
        wait_until(lambda: epochs(client).get("prefill-0", old) != old, BACK_S, "P is back")
        wait_until_idle(client, 30)


def num_granted(client: Client) -> int:
    """Blocks of the owner that are neither free nor cached: one of them is its stream's."""
    (row,) = (row for row in client.workers().workers if row.role == "decode")
    return row.num_blocks - row.num_free_blocks - row.num_cached_blocks - 1


def has_fenced(client: Client) -> bool:
    """An owner has ended a writer, and has its blocks back."""
    rows = client.workers().workers
    return any(row.num_fenced and not row.num_quarantined_blocks for row in rows)


def test_a_frozen_owner_loses_its_stream_to_another(mortal: RunningCluster, reader: Client) -> None:
    """What it still sends when it wakes up belongs to an attempt that is over."""
    undisturbed = reader.generate("A longer story", max_tokens=NUM_TOKENS)
    events: list[StreamEvent] = []
    with reader.stream("A longer story", max_tokens=NUM_TOKENS, deadline_s=60) as stream:
        for event in stream:
            events.append(event)
            if len(events) == 20:
                owner = the_request(reader, lambda row: True).decode_worker
                pid = pid_of(mortal, owner)
                os.kill(pid, signal.SIGSTOP)
                # It sleeps for longer than the broker waits for a sign of life.
                waking = threading.Timer(8.0, os.kill, (pid, signal.SIGCONT))
                waking.start()
    waking.join()
    check_stream(events)
    assert stream.result.token_ids == undisturbed.token_ids
    assert stream.result.decode_worker != owner
    wait_until(lambda: owner in epochs(reader), 30, f"{owner} is registered again")
    wait_until_linked(reader, NUM_WORKERS)
    assert reader.workers().counters["requests_failed"] == 0


def test_a_stream_ends_when_its_broker_dies_and_the_next_one_serves(
    mortal: RunningCluster, reader: Client
) -> None:
    """It goes on if the workers are back before its client asks again, else it ends by a code."""
    undisturbed = reader.generate("The last story", max_tokens=NUM_TOKENS)
    events: list[StreamEvent] = []
    stream = reader.stream("The last story", max_tokens=NUM_TOKENS, deadline_s=30)

    def read() -> None:
        for event in stream:
            events.append(event)
            if len(events) == 20:
                os.kill(pid_of(mortal, "broker"), signal.SIGKILL)

    with suppress(NoWorker, WorkerLost):
        read()
        assert stream.result.text == undisturbed.text
    check_stream(events)
    token_ids = tuple(token_id for event in events for token_id in event.token_ids)
    assert len(token_ids) >= 20
    assert token_ids == undisturbed.token_ids[: len(token_ids)]
    wait_until_linked(reader, NUM_WORKERS)
    assert reader.generate("The last story", max_tokens=NUM_TOKENS).text == undisturbed.text
