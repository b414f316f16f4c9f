"""The sampler: what each parameter keeps, and that nothing but (row, seed, position) matters."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmrt.engine.batch import SampleSpec
from llmrt.engine.sampler import _GOLDEN_GAMMA, _mix, draw_row, uniform
from llmrt.wire.errors import InternalError, InvalidRequest
from llmrt.wire.sampling import SamplingParams

VOCAB = 512


def make_spec(
    *,
    position: int = 5,
    seed: int = 1,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SampleSpec:
    token_ids = array("I", [*prompt, *generated])
    return SampleSpec(
        SamplingParams(**params), seed, position, token_ids, len(prompt), banned=banned
    )


def make_logits(seed: int = 0, vocab: int = VOCAB) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def drawn_ids(logits: npt.NDArray[np.float32], count: int = 400, **params: Any) -> set[int]:
    return {draw_row(logits, make_spec(position=i, **params))[0] for i in range(count)}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        *({"temperature": 10.0**-i} for i in (3, 4, 5, 6, 7, 30, 300)),
        {"temperature": 5e-324},
        {"temperature": 0.0, "top_k": -1},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_every_way_to_ask_for_the_best_token_gives_it(params: dict[str, Any]) -> None:
    logits = make_logits()
    logits[77] = np.sort(logits)[-1] + 0.15
    assert drawn_ids(logits, 50, **params) == {77}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 30, 200]] = 2
    assert draw_row(logits, make_spec())[0] == 9
    assert draw_row(logits, make_spec(temperature=1.0, top_k=1))[0] == 9


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 6 tokens and 6,000 positions: above 20.5 once in 1,000 fair samplers."""
    logits = np.log(np.array([0.3, 0.05, 0.25, 0.2, 0.15, 0.05], np.float32))
    count = 6000
    specs = [make_spec(position=i, temperature=2.0) for i in range(count)]
    ids = [draw_row(logits, spec)[0] for spec in specs]
    weights = np.sqrt([0.3, 0.05, 0.25, 0.2, 0.15, 0.05])
    expected = weights / weights.sum() * count
    assert (((np.bincount(ids, minlength=6) - expected) ** 2) / expected).sum() < 20.5


def test_top_k_keeps_the_k_best_and_the_lowest_ids_of_equals() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[100, 50]] = 1
    assert drawn_ids(logits, temperature=2.0, top_k=4) == {50, 100, 0, 1}
    assert len(drawn_ids(logits, 3000, temperature=2.0, top_k=0)) > 400


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {3}), (0.45, {3, 1}), (0.75, {3, 1, 4})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    logits = np.log(np.array([0.1, 0.3, 0.05, 0.35, 0.15, 0.05], np.float32))
    assert drawn_ids(logits, temperature=1.0, top_p=top_p) == kept


def test_top_p_counts_within_what_top_k_left() -> None:
    """0.35 and 0.3 of 0.65: the best alone holds 0.54."""
    logits = np.log(np.array([0.1, 0.3, 0.05, 0.35, 0.15, 0.05], np.float32))
    assert drawn_ids(logits, temperature=1.0, top_k=2, top_p=0.5) == {3}
    assert drawn_ids(logits, temperature=1.0, top_k=2, top_p=0.6) == {1, 3}


def test_min_p_keeps_what_has_that_part_of_the_best() -> None:
    logits = np.log(np.array([0.1, 0.3, 0.04, 0.36, 0.15, 0.05], np.float32))
    assert drawn_ids(logits, temperature=1.0, min_p=0.4) == {1, 3, 4}
    assert drawn_ids(logits, temperature=1.0, top_k=2, min_p=0.4) == {1, 3}


def test_a_wide_nucleus_is_found_whole() -> None:
    """Equal weights: 0.75 of 8,192 tokens is the 6,144 lowest ids, more than any first look."""
    logits = np.zeros(8192, np.float32)
    ids = drawn_ids(logits, 2000, temperature=1.0, top_p=0.75)
    assert max(ids) < 6144
    assert max(ids) > 6000


def test_penalties_apply_to_what_they_name() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[:4] = [4, 3, 2, -1]
    best = draw_row
    assert best(logits, make_spec(prompt=[0], repetition_penalty=1.5))[0] == 1
    assert best(logits, make_spec(prompt=[0], generated=[1], repetition_penalty=2.5))[0] == 2
    assert best(logits, make_spec(prompt=[0, 0], presence_penalty=2.0))[0] == 0
    assert best(logits, make_spec(generated=[0, 0], presence_penalty=1.5))[0] == 1
    assert best(logits, make_spec(generated=[0, 0], presence_penalty=0.9))[0] == 0
    assert best(logits, make_spec(generated=[0, 0], frequency_penalty=0.6))[0] == 1
    assert best(logits, make_spec(generated=[0], frequency_penalty=0.6))[0] == 0


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    logits = np.array([-2.0, -3.0], np.float32)
    assert draw_row(logits, make_spec(prompt=[0], repetition_penalty=2.0))[0] == 1


def test_bias_and_bans() -> None:
    logits = make_logits()
    assert draw_row(logits, make_spec(logit_bias={13: 100.0}))[0] == 13
    best = int(logits.argmax())
    assert best not in drawn_ids(logits, temperature=100.0, banned=(best,))
    assert draw_row(logits, make_spec(banned=(best,)))[0] == int(np.argsort(logits)[-2])
    with pytest.raises(InvalidRequest, match="all 3 tokens are banned"):
        draw_row(np.zeros(3, np.float32), make_spec(banned=(0, 1, 2)))


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(logit_bias={VOCAB: 1.0}),
        make_spec(banned=(VOCAB,)),
        make_spec(prompt=[VOCAB], repetition_penalty=2.0),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(spec: SampleSpec) -> None:
    with pytest.raises(InvalidRequest, match=r"token 512: the vocabulary ends at 511"):
        draw_row(make_logits(), spec)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails(value: float) -> None:
    logits = make_logits()
    logits[44] = value
    with pytest.raises(InternalError, match="token 44 at position 5"):
        draw_row(logits, make_spec(temperature=1.0))
    with pytest.raises(InternalError, match=r"KV cache are damaged; restart it$"):
        draw_row(logits, make_spec(), "restart it")


def test_logprobs_are_of_the_model_before_temperature_and_filters() -> None:
    logits = make_logits()
    plain = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    spec = make_spec(temperature=5.0, top_k=50, logit_bias={3: 1.0}, logprobs=4)
    token_id, logprobs = draw_row(logits, spec)
    assert logprobs is not None
    assert logprobs.drawn == pytest.approx(plain[token_id])
    best = np.argsort(-plain)[:4]
    assert [token for token, _ in logprobs.top] == best.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(plain[best].tolist())
    assert draw_row(logits, make_spec())[1] is None
    only_drawn = draw_row(logits, make_spec(logprobs=0))[1]
    assert only_drawn is not None
    assert only_drawn.top == ()


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 40),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_a_draw_is_independent_of_those_before_and_of_history_without_penalties(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    spec = make_spec(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    alone = draw_row(make_logits(0, 64), spec)
    draw_row(make_logits(1, 64), make_spec(seed=seed, temperature=1.0))
    assert draw_row(make_logits(0, 64), spec) == alone
    assert draw_row(make_logits(0, 64), replace(spec, token_ids=array("I", [3, 4]))) == alone


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40), st.data())
def test_only_possible_tokens_are_drawn(values: list[float], data: st.DataObject) -> None:
    """Whatever the logits and filters: an id in range, and one that its filters keep."""
    logits = np.array(values, np.float32)
    temperature = data.draw(st.floats(1e-300, 100, exclude_min=True))
    top_k = data.draw(st.integers(1, 5))
    spec = make_spec(
        position=data.draw(st.integers(0, 2**24)),
        temperature=temperature,
        top_k=top_k,
        top_p=data.draw(st.floats(1e-9, 1.0)),
    )
    token_id, _ = draw_row(logits, spec)
    assert 0 <= token_id < len(values)
    assert (logits > logits[token_id]).sum() < top_k


def test_uniform_mixes_as_splitmix64_does() -> None:
    """Its first outputs for the seed 1234567, as published (Rosetta Code, SplitMix64)."""
    outputs = [_mix(1234567 + i * _GOLDEN_GAMMA) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_never_changes() -> None:
    """A seeded request that moves to another version of llmrt must go on as it began."""
    assert [uniform(0, 0), uniform(42, 7), uniform(2**64 - 1, 2**24)] == [
        0.6524484863740322,
        0.7347204584623639,
        0.0725527788968261,
    ]


def test_uniform_covers_the_unit_interval_evenly() -> None:
    """Per seed and across seeds: 16 bins of 4,000 numbers, chi-square below 37.7 (1 in 1,000)."""
    for numbers in (
        [uniform(7, position) for position in range(4000)],
        [uniform(seed, 100) for seed in range(4000)],
        [uniform(seed, 4000 - seed) for seed in range(4000)],
    ):
        assert 0.0 <= min(numbers) <= max(numbers) < 1.0
        counts = np.bincount((np.array(numbers) * 16).astype(int), minlength=16)
        assert ((counts - 250.0) ** 2 / 250.0).sum() < 37.7
