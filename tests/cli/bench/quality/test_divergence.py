"""Statistics of logits that were made by hand, against values that were worked out by hand."""

import math

import numpy as np
import pytest

from llmrt.cli.bench.quality.divergence import (
    Expected,
    Figures,
    Ids,
    Logits,
    Tally,
    compare,
    equal_share,
    log_softmax,
)

HALF_FIRST = (1 / 2, 1 / 4, 1 / 4)
HALF_LAST = (1 / 4, 1 / 4, 1 / 2)


def logits_of(*rows: tuple[float, ...], shift: float = 0.0) -> Logits:
    """Of distributions; a shift of all logits means nothing."""
    return (np.log(rows) + shift).astype(np.float32)


def figures(reference: Logits, other: Logits, targets: list[int]) -> Figures:
    tally = Tally()
    compare(Expected(reference, np.array(targets)), other, tally)
    return tally.figures()


def test_one_token_by_hand() -> None:
    """The truth has 1/2 of the reference and 1/4 of the other: twice the perplexity."""
    found = figures(logits_of(HALF_FIRST, shift=3.0), logits_of(HALF_LAST, shift=-5.0), [0])
    assert found.num_tokens == 1
    assert found.perplexity == pytest.approx(4, rel=1e-6)
    assert found.perplexity_change == pytest.approx(1, rel=1e-6)
    assert found.perplexity_change_stderr == pytest.approx(0, abs=1e-6)
    # 1/2 ln(1/2 : 1/4) + 1/4 ln(1/4 : 1/4) + 1/4 ln(1/4 : 1/2)
    assert found.mean_kl == pytest.approx(math.log(2) / 4, rel=1e-6)
    assert found.top1_agreement == 0


def test_losses_that_cancel_leave_a_standard_error() -> None:
    """ln 2 more, ln 2 less, and as the reference: a mean of 0, and a deviation of ln 2 sqrt 2/3."""
    reference = logits_of(HALF_FIRST, HALF_FIRST, HALF_FIRST)
    other = logits_of(HALF_LAST, HALF_LAST, HALF_FIRST)
    found = figures(reference, other, [0, 2, 0])
    # Probabilities of 1/4, 1/2 and 1/2.
    assert found.perplexity == pytest.approx(16 ** (1 / 3), rel=1e-6)
    assert found.perplexity_change == pytest.approx(0, abs=1e-6)
    deviation = math.log(2) * math.sqrt(2 / 3)
    assert found.perplexity_change_stderr == pytest.approx(deviation / math.sqrt(3), rel=1e-6)
    assert found.mean_kl == pytest.approx(2 / 3 * math.log(2) / 4, rel=1e-6)
    assert found.top1_agreement == pytest.approx(1 / 3)


def test_the_reference_against_itself() -> None:
    logits = np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32)
    found = figures(logits, logits, list(range(9)))
    assert found == Figures(
        num_tokens=9,
        perplexity=found.perplexity,
        perplexity_change=0,
        perplexity_change_stderr=0,
        mean_kl=0,
        top1_agreement=1,
    )


def test_equal_logits_have_the_perplexity_of_the_vocabulary() -> None:
    logits = np.full((4, 321), 7, np.float32)
    assert figures(logits, logits, [0, 1, 2, 320]).perplexity == pytest.approx(321, rel=1e-12)


def test_parts_add_up() -> None:
    """A vocabulary so large that each token is a part of its own; the sums are those of all."""
    rng = np.random.default_rng(1)
    reference, other = (rng.normal(size=(3, 1 << 20)).astype(np.float32) for _ in range(2))
    targets: Ids = np.array([5, 6, 7])
    tally = Tally()
    for idx in range(3):
        rows = slice(idx, idx + 1)
        compare(Expected(reference[rows], targets[rows]), other[rows], tally)
    whole = figures(reference, other, targets.tolist())
    assert whole == tally.figures()
    p, q = log_softmax(reference), log_softmax(other)
    assert whole.mean_kl == pytest.approx(float((np.exp(p) * (p - q)).sum(axis=1).mean()))
    losses = [-q[idx, target] for idx, target in enumerate(targets)]
    assert whole.perplexity == pytest.approx(math.exp(np.mean(losses)))


def test_large_logits_do_not_overflow() -> None:
    found = log_softmax(np.array([[30000, 30000, -30000]], np.float32))
    np.testing.assert_allclose(found, [[-math.log(2), -math.log(2), -60000 - math.log(2)]])


@pytest.mark.parametrize(
    ("found", "share"), [([1, 2, 3, 4], 1), ([1, 2, 9, 4], 0.5), ([9, 2, 3, 4], 0)]
)
def test_what_follows_the_first_other_token_does_not_count(found: list[int], share: float) -> None:
    assert equal_share([1, 2, 3, 4], found) == share
