"""Runs a text through all formats side by side, so that no logits are kept for later."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
# From so many tokens of the text on, all prompts are continued. Below, they would be most of the
# work, for a figure that is no firmer than the others.
_FULL_TOKENS = 1024

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    """Windows of `context` tokens over the first `max_tokens` of the text (None: all of it).

    Behind `num_prompts` of `prompt_tokens` each, `output_tokens` are generated; see `for_text`.
    """

    context: int = 512
    max_tokens: int | None = None
    num_prompts: int = 16
    prompt_tokens: int = 64
    output_tokens: int = 64

    def for_text(self, num_tokens: int) -> "QualitySettings":
        """With fewer prompts, and fewer tokens behind each, for a text of less than 1024 tokens:
        in proportion, down to 2 prompts and 16 tokens.
        """

        def part(whole: int, least: int) -> int:
            return min(whole, max(least, round(whole * num_tokens / _FULL_TOKENS)))

        return replace(
            self, num_prompts=part(self.num_prompts, 2), output_tokens=part(self.output_tokens, 16)
        )

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


def num_progress(chunks: Sequence[Chunk], output_tokens: int, num_variants: int) -> int:
    """How often `measure` reports progress."""
    return num_variants * (len(chunks) + output_tokens)


def measure(
    variants: Sequence[Variant],
    chunks: Sequence[Chunk],
    prompts: "Sequence[array[int]]",
    output_tokens: int,
    progress: Progress,
) -> list[Quality]:
    """Of each variant, the first of which is the reference. Reports every chunk of the text, and
    every token behind the prompts.

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
        on_token = partial(progress, f"{variant.label}, greedy")
        outputs.append(variant.generate(prompts, output_tokens, on_token))
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
