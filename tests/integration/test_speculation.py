"""With drafts, real clusters answer what they answer without, in both layouts."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster
from tests.integration.probes import check_stream, pid_of

from llmrt.client import Client, StreamEvent

pytestmark = pytest.mark.integration

DRAFTS = ("--speculative", "ngram", "--speculative-tokens", "6")
PROMPT = "one two three one two three one two three one two"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "few words": {"temperature": 1.0, "top_k": 2, "seed": 3, "logit_bias": {50: 30.0, 51: 30.0}},
    "repetition": {"repetition_penalty": 1.05, "logit_bias": {50: 30.0, 51: 30.0}},
    "counts": {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "minimum": {"temperature": 1.0, "top_k": 3, "seed": 5, "min_tokens": 20},
}


@pytest.fixture(scope="module", params=["colocated", "split"])
def drafting(
    request: pytest.FixtureRequest, start_cluster: StartCluster
) -> Iterator[RunningCluster]:
    roles = ["--both", "1"] if request.param == "colocated" else ["--prefill", "1", "--decode", "1"]
    with start_cluster(*roles, *DRAFTS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clients(drafting: RunningCluster, colocated: RunningCluster) -> Iterator[tuple[Client, Client]]:
    with Client(drafting.bind) as drafts, Client(colocated.bind) as plain:
        yield drafts, plain


def answer(client: Client, **options: Any) -> tuple[Any, ...]:
    result = client.generate(PROMPT, **options)
    usage = result.usage.completion_tokens
    return result.token_ids, result.text, result.finish_reason, result.stop, usage, result.logprobs


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_without(clients: tuple[Client, Client], name: str) -> None:
    drafts, plain = clients
    expected = answer(plain, **REQUESTS[name], max_tokens=40)
    assert answer(drafts, **REQUESTS[name], max_tokens=40) == expected
    stop = expected[1][len(expected[1]) // 2 :][:3]
    if stop:
        stopped = {**REQUESTS[name], "stop": [stop], "max_tokens": 40}
        assert answer(drafts, **stopped) == answer(plain, **stopped)


def test_drafts_were_taken(clients: tuple[Client, Client]) -> None:
    """Those of a text of one word: else the tests above show nothing."""
    drafts, _ = clients
    finished = drafts.generate(PROMPT, logit_bias={50: 100.0}, max_tokens=40, ignore_eos=True)
    assert set(finished.token_ids) == {50}
    deadline = time.monotonic() + 10
    while not any(row.num_accepted for row in drafts.workers().workers):
        assert time.monotonic() < deadline, "no heartbeat tells of an accepted draft"
        time.sleep(0.1)
    assert all(
        (row.num_accepted or 0) <= (row.num_drafted or 0) for row in drafts.workers().workers
    )


def test_a_stream_of_drafts_survives_the_death_of_its_owner(
    start_cluster: StartCluster, colocated: RunningCluster
) -> None:
    """Each of its steps gives several tokens; none is lost or repeated."""
    options: dict[str, Any] = {**REQUESTS["few words"], "max_tokens": 600, "ignore_eos": True}
    with Client(colocated.bind) as client:
        expected = client.generate(PROMPT, **options)
    events: list[StreamEvent] = []
    with start_cluster("--both", "2", *DRAFTS) as cluster, Client(cluster.bind) as client:
        with client.stream(PROMPT, **options) as stream:
            for event in stream:
                events.append(event)
                if len(events) == 20:
                    (row,) = client.workers().requests
                    os.kill(pid_of(cluster, row.decode_worker), signal.SIGKILL)
        assert stream.result.decode_worker != row.decode_worker
    check_stream(events)
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.text == expected.text
    assert len(events) < len(expected.token_ids)


REAL_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "penalties": {
        "temperature": 0.5,
        "seed": 6,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.05,
    },
    "stop": {"temperature": 0.0, "stop": ["7, 8"], "min_tokens": 12},
}
REAL_PROMPTS = (
    "Count again and again: 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
)


@pytest.fixture(scope="module")
def real_clients(
    start_cluster: StartCluster, smollm2_path: Path
) -> Iterator[tuple[Client, Client]]:
    """SmolLM2 as it is stored, with drafts and without."""
    flags = ("--both", "1", "--dtype", "auto", "--kv-cache-dtype", "bf16")
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(start_cluster(*flags, *more, model=smollm2_path))
            for more in (DRAFTS, ())
        ]
        drafts, plain = (stack.enter_context(Client(cluster.bind)) for cluster in clusters)
        yield drafts, plain


@pytest.mark.parametrize("name", REAL_REQUESTS)
@pytest.mark.parametrize("prompt", REAL_PROMPTS, ids=["numbers", "code"])
def test_a_real_model_says_the_same(
    real_clients: tuple[Client, Client], prompt: str, name: str
) -> None:
    results = [
        client.generate(prompt, max_tokens=48, **REAL_REQUESTS[name]) for client in real_clients
    ]
    first, second = (
        (r.token_ids, r.text, r.finish_reason, r.stop, r.logprobs, r.usage.completion_tokens)
        for r in results
    )
    assert first == second
    drafts, plain = results
    assert (plain.num_drafted, plain.num_accepted) == (0, 0)
    assert drafts.num_accepted <= drafts.num_drafted
    if name == "greedy":
        assert drafts.num_accepted > 5
