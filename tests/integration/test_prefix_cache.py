"""A cached prompt gives what a computed one gives, at every block edge and in every layout."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster

from llmrt.client import Client, Result

pytestmark = pytest.mark.integration

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 1000]
BLOCK = 32
MAX_TOKENS = 6
NUM_TOP = 5
# In float32 torch adds a prompt in another order when its beginning is cached.
TOLERANCE = 1e-4


class Facts(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    drawn: list[float]
    top: dict[tuple[int, int], float]


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    """Like no prompt of another length."""
    return [1000 + (num_tokens * 7919 + i * i + salt) % 40000 for i in range(num_tokens)]


def ask(client: Client, prompt: list[int]) -> Result:
    result = client.generate(prompt, max_tokens=MAX_TOKENS, logprobs=NUM_TOP, ignore_eos=True)
    assert result.usage.prompt_tokens == len(prompt)
    assert result.usage.cached_tokens < len(prompt)  # one at least is computed
    return result


def facts(result: Result) -> Facts:
    assert result.logprobs is not None
    assert all(len(entry.top) == NUM_TOP for entry in result.logprobs)
    top = {
        (position, token_id): value
        for position, entry in enumerate(result.logprobs)
        for token_id, value in entry.top
    }
    return Facts(result.token_ids, result.text, [e.drawn for e in result.logprobs], top)


def check_equal(result: Result, expected: Facts) -> None:
    found = facts(result)
    assert found[:2] == expected[:2]
    assert found.drawn == pytest.approx(expected.drawn, abs=TOLERANCE)
    assert found.top == pytest.approx(expected.top, abs=TOLERANCE)


@pytest.fixture(scope="module")
def computed(colocated: RunningCluster) -> dict[int, Facts]:
    with Client(colocated.bind) as client:
        return {n: facts(ask(client, prompt_of(n))) for n in LENGTHS}


def test_cached_runs_equal_the_first_one(client: Client, computed: dict[int, Facts]) -> None:
    """Three times, then beside other streams."""
    for num_tokens in LENGTHS:
        for _ in range(3):
            check_equal(ask(client, prompt_of(num_tokens)), computed[num_tokens])
    with ThreadPoolExecutor(4) as pool:
        for lengths in (LENGTHS[:4], LENGTHS[4:]):
            together = pool.map(lambda n: ask(client, prompt_of(n)), lengths)
            for num_tokens, result in zip(lengths, together, strict=True):
                check_equal(result, computed[num_tokens])


def test_the_second_run_takes_all_that_is_kept(colocated: RunningCluster) -> None:
    """All full blocks, and the last one if that is not full of answer by now."""
    with Client(colocated.bind) as client:
        for num_tokens in LENGTHS:
            prompt = prompt_of(num_tokens, salt=secrets.randbelow(40000))
            first, second = ask(client, prompt), ask(client, prompt)
            assert first.usage.cached_tokens == 0
            num_full = (num_tokens - 1) // BLOCK
            is_last_kept = (num_tokens + MAX_TOKENS - 1) // BLOCK == num_full
            expected = num_tokens - 1 if is_last_kept else num_full * BLOCK
            assert second.usage.cached_tokens == expected
            check_equal(second, facts(first))


def test_the_next_turn_computes_what_is_new_and_the_last_token(
    start_cluster: StartCluster, layout: RunningCluster
) -> None:
    """What decode generated is reused, too, at every place in a block."""
    added = prompt_of(7, salt=3)
    with (
        start_cluster("--both", "1", "--no-prefix-cache") as uncached,
        Client(uncached.bind) as reference,
        Client(layout.bind) as client,
    ):
        for num_tokens in (64, 70, 84, 95, 121):
            prompt = prompt_of(num_tokens, salt=secrets.randbelow(40000))
            for _ in range(3):
                result = ask(client, prompt)
                check_equal(result, facts(ask(reference, prompt)))
                num_known = len(prompt) + MAX_TOKENS - 1
                prompt = [*prompt, *result.token_ids, *added]
                again = client.generate(prompt, max_tokens=1, ignore_eos=True)
                assert again.usage.cached_tokens == num_known


def test_prompts_with_one_beginning_compute_it_once(layout: RunningCluster) -> None:
    """Also if they come together: whoever comes later waits for it."""
    beginning = prompt_of(320, salt=secrets.randbelow(40000))
    with Client(layout.bind) as client, ThreadPoolExecutor(4) as pool:
        prompts = [[*beginning, *prompt_of(50, salt=i)] for i in range(4)]
        results = list(pool.map(lambda prompt: ask(client, prompt), prompts))
    owners = {result.decode_worker for result in results}
    assert sum(result.usage.cached_tokens < 320 for result in results) <= len(owners)
