"""Runs a text through all formats side by side, so that no logits are kept for later."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from llmrt.cli.bench.quality.corpus import Corpus
from llmrt.cli.bench.quality.divergence import (
    Expected,
    Figures,
    Logits,
    Tally,
    compare,
    equal_share,
)
from llmrt.cli.bench.quality.variants import Variant
from llmrt.wire.errors import ConfigError, InternalError

# Of a chunk; each device keeps a buffer of that size.
_LOGITS_BYTES = 32 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    """Windows of `context` tokens over the first `max_tokens` of the text (None: all of it).

    Behind `num_prompts` of `prompt_tokens` each, `output_tokens` are generated.
    """

    context: int = 512
    max_tokens: int | None = None
    num_prompts: int = 16
    prompt_tokens: int = 64
    output_tokens: int = 64

    def check(self) -> None:
        """Raise `ConfigError` naming the flag at fault."""
        if self.context < 2:
            raise ConfigError(f"--context is {self.context}: at least 2 are needed")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"--tokens is {self.max_tokens}: at least 2 are needed")


@dataclass(frozen=True, slots=True)
class Quality:
    """`greedy_agreement`: of the tokens generated behind a prompt, the share before the first
    that the reference would not have generated, on average."""

    figures: Figures
    greedy_agreement: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a window, from position `start` on, that are computed at once."""

    window: "array[int]"
    start: int
    end: int

    @property
    def targets(self) -> "npt.NDArray[np.int64]":
        """The token behind each; the last one of a window has none."""
        return np.array(self.window[self.start + 1 : self.end + 1], np.int64)


def make_chunks(corpus: Corpus, context: int, vocab_size: int) -> list[Chunk]:
    """All windows, in pieces whose logits take a bounded memory."""
    size = max(1, _LOGITS_BYTES // (4 * vocab_size))
    return [
        Chunk(window, start, min(start + size, len(window)))
        for window in corpus.windows(context)
        for start in range(0, len(window), size)
    ]


def num_progress(chunks: Sequence[Chunk], num_variants: int) -> int:
    """How often `measure` reports progress."""
    return num_variants * (len(chunks) + 1)


def measure(
    variants: Sequence[Variant],
    chunks: Sequence[Chunk],
    prompts: "Sequence[array[int]]",
    output_tokens: int,
    progress: Progress,
) -> list[Quality]:
    """Of each variant, the first of which is the reference.

    Raises `InternalError` if a logit is not finite.
    """
    tallies = [Tally() for _ in variants]
    for chunk in chunks:
        expected: Expected | None = None
        for tally, variant in zip(tallies, variants, strict=True):
            logits = _logits(variant, chunk)
            expected = expected or Expected(logits, chunk.targets)
            compare(expected, logits, tally)
            progress(variant.label)
    outputs = []
    for variant in variants:
        outputs.append(variant.generate(prompts, output_tokens))
        progress(variant.label)
    return [
        Quality(tally.figures(), fmean(map(equal_share, outputs[0], found)))
        for tally, found in zip(tallies, outputs, strict=True)
    ]


def _logits(variant: Variant, chunk: Chunk) -> Logits:
    """Of all tokens of a chunk that have a target."""
    logits = variant.logits(chunk.window[chunk.start : chunk.end], chunk.start)
    if not np.isfinite(logits).all():
        raise InternalError(
            f"{variant.label} has a logit that is not finite, at positions {chunk.start} to "
            f"{chunk.end} of a window: its weights or kernels are damaged"
        )
    return logits[: len(chunk.targets)]
