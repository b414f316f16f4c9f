"""Clients that leave, politely or not: nothing stays behind, and the gauges say so."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from local_cluster import RunningCluster
from tests.integration.probes import wait_until, wait_until_idle

from llmrt.actor.spawning import PARENT_ENV
from llmrt.client import Client

pytestmark = pytest.mark.integration

READER = """
import sys
from llmrt.actor.process import die_with_parent
from llmrt.client import Client
die_with_parent()
with Client(sys.argv[1]) as client:
    for event in client.stream("A long story", max_tokens=3000, ignore_eos=True):
        print("token", flush=True)
"""
STAYS = 3000


@pytest.fixture(autouse=True)
def _serves_on(client: Client) -> Iterator[None]:
    before = client.generate("before and after", max_tokens=4)
    yield
    wait_until_idle(client)
    assert client.generate("before and after", max_tokens=4).token_ids == before.token_ids


def test_a_killed_client_frees_everything(layout: RunningCluster, client: Client) -> None:
    """At once, not after the time in which a silent client may come back."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, layout.bind],
        stdout=subprocess.PIPE,
        env=os.environ | {PARENT_ENV: str(os.getpid())},
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"token\n"
        assert [row.stage for row in client.workers().requests] == ["decode"]
        reader.kill()
        reader.wait()
        wait_until(lambda: not client.workers().requests, 2, "the request is gone")
    wait_until_idle(client, 3)


def test_a_closed_stream_stops_the_work(client: Client) -> None:
    with client.stream("A long story", max_tokens=STAYS, ignore_eos=True) as stream:
        next(iter(stream))
    wait_until(lambda: not client.workers().requests, 1, "the request is gone")


def test_a_reader_that_raises_stops_the_work(client: Client) -> None:
    def read() -> None:
        for _ in client.stream("A story", max_tokens=STAYS, ignore_eos=True):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    wait_until(lambda: not client.workers().requests, 1, "the request is gone")


def test_a_closed_client_stops_its_work(layout: RunningCluster, client: Client) -> None:
    with Client(layout.bind) as leaving, ThreadPoolExecutor(4) as pool:
        for number in range(4):
            pool.submit(leaving.generate, f"story {number}", max_tokens=STAYS, ignore_eos=True)
        wait_until(lambda: len(client.workers().requests) == 4, 10, "four requests")
        leaving.close()
    wait_until(lambda: not client.workers().requests, 1, "all requests are gone")


def test_many_dropped_streams_leak_nothing(client: Client) -> None:
    """Left after the first token, in prefill, and in the queue; then ordinary requests."""
    expected = client.generate("ordinary", max_tokens=6).token_ids

    def drop(number: int) -> None:
        # A prompt of its own, so that no cache makes it short.
        prompt = [3000 + (number * 31 + i * 7) % 40000 for i in range(40 + 150 * (number % 3))]
        with client.stream(prompt, max_tokens=200, ignore_eos=True, deadline_s=60) as stream:
            if number % 3 == 0:
                next(iter(stream))
            else:
                with ThreadPoolExecutor(1) as reader:
                    reading = reader.submit(lambda: next(iter(stream), None))
                    wait_until(
                        lambda: stream.request_id in ids_of(client) or reading.done(),
                        30,
                        "the request is known",
                    )
                    client.cancel(stream.request_id)
                    reading.exception()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(drop, range(80)))
    wait_until(lambda: not client.workers().requests, 2, "all requests are gone")
    wait_until_idle(client)
    with ThreadPoolExecutor(16) as pool:
        ordinary = list(pool.map(lambda _: client.generate("ordinary", max_tokens=6), range(40)))
    assert {result.token_ids for result in ordinary} == {expected}


def ids_of(client: Client) -> set[str]:
    return {row.request_id for row in client.workers().requests}


def test_gauges_fall_when_all_requests_are_cancelled_at_once(client: Client) -> None:
    """Running and waiting ones; and the workers take new requests then."""
    with ThreadPoolExecutor(80) as pool, ExitStack() as streams:
        opened = [
            streams.enter_context(
                client.stream(f"story {number}", max_tokens=STAYS, ignore_eos=True)
            )
            for number in range(80)  # above what fits the workers
        ]
        reading = [pool.submit(list, stream) for stream in opened]

        def is_full() -> bool:
            rows = client.workers().workers
            num_running = sum(row.num_running for row in rows)
            num_waiting = sum(row.num_waiting for row in rows)
            return num_running >= 8 and num_waiting >= 8

        wait_until(is_full, 30, "some run and some wait")
        for stream in opened:
            client.cancel(stream.request_id)
        assert all(done.exception() is not None for done in reading)
    wait_until_idle(client, 3)
    loads = [(row.num_running, row.num_waiting) for row in client.workers().workers]
    assert loads == [(0, 0)] * len(loads)
