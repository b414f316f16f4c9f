"""Loads that can be repeated: arrivals and prompts follow from the seed."""

import itertools
import math
import random
import statistics

import pytest

from llmrt.cli.bench.workload import arrival_times, make_prompt, probe_text
from llmrt.wire.kv import BLOCK_TOKENS


def gaps(times: tuple[float, ...]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise((0.0, *times))]


def test_poisson_arrivals_have_exponential_gaps() -> None:
    """Exactly those of the inverse distribution function at the seed's uniform numbers."""
    rng = random.Random("seed")
    expected = [-math.log(1 - rng.random()) / 4 for _ in range(50)]
    assert gaps(arrival_times(50, 4.0, 1.0, seed="seed")) == pytest.approx(expected)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert arrival_times(9, 2.0, 0.5, seed="a") == arrival_times(9, 2.0, 0.5, seed="a")
    assert arrival_times(9, 2.0, 0.5, seed="a") != arrival_times(9, 2.0, 0.5, seed="b")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gaps_and_leaves_the_rate(burstiness: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).

    Of 20,000 gaps the mean lies within 4 of its standard errors, 2.9 % at k = 0.25.
    """
    sample = gaps(arrival_times(20_000, 5.0, burstiness, seed="0"))
    mean = statistics.fmean(sample)
    assert mean == pytest.approx(0.2, rel=4 / math.sqrt(burstiness * 20_000))
    assert statistics.pstdev(sample) / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_prompts_differ_from_their_first_block_on() -> None:
    """So that no cached prefix of one helps another."""
    ids = list(range(1000))
    prompts = [make_prompt(ids, 2 * BLOCK_TOKENS, seed=f"0 {i}") for i in range(50)]
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} == {2 * BLOCK_TOKENS}
    assert {token for prompt in prompts for token in prompt} <= set(ids)
    assert prompts[0] == make_prompt(ids, 2 * BLOCK_TOKENS, seed="0 0")


def test_the_probe_is_plain_words() -> None:
    words = probe_text(0).split(" ")
    assert len(words) == 2000
    assert all(word.isascii() and word.islower() for word in words)
    assert probe_text(0) == probe_text(0) != probe_text(1)
