"""How far the predictions of one model in two formats lie apart: pure functions, natural logs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Of float64, in which all is computed: a KL may be below what float32 leaves of a logarithm.
_PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Over the tokens of a text; all but `perplexity` against the reference.

    `perplexity_change` is relative, and `perplexity_change_stderr` its standard error, as if
    tokens were independent. `mean_kl` is KL(reference || this) in nats per token.
    `top1_agreement` is the share of tokens for which both find the same one the likeliest.
    """

    num_tokens: int
    perplexity: float
    perplexity_change: float
    perplexity_change_stderr: float
    mean_kl: float
    top1_agreement: float


class Tally:
    """Sums over the tokens that were compared so far."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._loss = 0.0
        self._excess = 0.0
        self._squared_excess = 0.0
        self._kl = 0.0
        self._num_same = 0

    def add(self, losses: Floats, reference_losses: Floats, kl: Floats, num_same: int) -> None:
        """Losses and KL of some tokens, [tokens] each, and how often the likeliest is the same."""
        excess = losses - reference_losses
        self._num_tokens += len(losses)
        self._loss += float(losses.sum())
        self._excess += float(excess.sum())
        self._squared_excess += float((excess**2).sum())
        self._kl += float(kl.sum())
        self._num_same += num_same

    def figures(self) -> Figures:
        """Of at least one token."""
        count = self._num_tokens
        excess = self._excess / count
        variance = max(0.0, self._squared_excess / count - excess**2)
        ratio = math.exp(excess)
        return Figures(
            num_tokens=count,
            perplexity=math.exp(self._loss / count),
            perplexity_change=ratio - 1,
            perplexity_change_stderr=ratio * math.sqrt(variance / count),
            mean_kl=self._kl / count,
            top1_agreement=self._num_same / count,
        )


class Expected:
    """What the reference predicts for some tokens, which in truth are `targets` [tokens].

    Takes four times the bytes of `logits` [tokens, vocab].
    """

    def __init__(self, logits: Logits, targets: Ids) -> None:
        self.targets = targets
        self.log_probabilities = log_softmax(logits)
        self.probabilities = np.exp(self.log_probabilities)
        self.losses = _losses(self.log_probabilities, targets)
        self.best = logits.argmax(axis=1)


def compare(expected: Expected, logits: Logits, tally: Tally) -> None:
    """Add the tokens of `expected`, of which another format has `logits`, to its tally."""
    part = max(1, _PART_BYTES // (8 * logits.shape[1]))
    for first in range(0, len(logits), part):
        rows = slice(first, first + part)
        found = log_softmax(logits[rows])
        losses = _losses(found, expected.targets[rows])
        gaps = np.subtract(expected.log_probabilities[rows], found, out=found)
        tally.add(
            losses,
            expected.losses[rows],
            np.einsum("tv,tv->t", expected.probabilities[rows], gaps),
            int((logits[rows].argmax(axis=1) == expected.best[rows]).sum()),
        )


def log_softmax(logits: Logits) -> Floats:
    """Log probabilities, [tokens, vocab]."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def _losses(log_probabilities: Floats, targets: Ids) -> Floats:
    losses: Floats = -np.take_along_axis(log_probabilities, targets[:, None], axis=1)[:, 0]
    return losses


def equal_share(expected: Sequence[int], found: Sequence[int]) -> float:
    """The share of tokens, equally many in both, before the first that differs."""
    differing = (
        n for n, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1
    )
    return next(differing, len(expected)) / len(expected)
