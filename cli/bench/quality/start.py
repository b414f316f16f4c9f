"""From a path to a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrt.cli.bench.delivery import progress_bar
from llmrt.cli.bench.machine import this_machine
from llmrt.cli.bench.quality.corpus import Corpus, make_corpus, read_text
from llmrt.cli.bench.quality.measure import (
    QualitySettings,
    make_chunks,
    measure,
    num_progress,
)
from llmrt.cli.bench.quality.report import make_report, make_result
from llmrt.cli.bench.quality.variants import Sizes, choose_formats, load_variants
from llmrt.cli.bench.roofline import model_bytes
from llmrt.engine.cpu_cores import num_cores
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import ConfigError


def measure_quality(
    model: Path,
    dtypes: Sequence[str],
    kv_dtypes: Sequence[str],
    *,
    settings: QualitySettings,
    text_path: Path | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """The report of `llmrt bench quality`, with a bar on a terminal until it is there.

    Raises `ConfigError`, `ModelError` or `ModelNotFound` before anything is computed.
    """
    settings.check()
    text = read_text(text_path)
    threads = threads or num_cores()
    opened = open_model(model)
    formats = choose_formats(opened, dtypes, kv_dtypes)
    corpus = make_corpus(text, Tokenizer.of_model(opened), settings.max_tokens)
    chunks = make_chunks(corpus, settings.context, opened.spec.vocab_size)
    settings = settings.for_text(len(corpus.token_ids))
    prompts = corpus.prompts(settings.num_prompts, settings.prompt_tokens)
    sizes = _sizes(settings, corpus, opened)
    num_variants = 1 + len(formats.pairs)
    num_steps = num_variants + num_progress(chunks, settings.output_tokens, num_variants)
    with progress_bar(num_steps) as progress:
        variants = []
        for variant in load_variants(opened, formats, sizes, threads):
            variants.append(variant)
            progress(variant.label)
        found = measure(variants, chunks, prompts, settings.output_tokens, progress)
    conditions = {
        "model": opened.name,
        "quantization": model_bytes(opened.name, opened.spec, opened.tensors, "").quantization,
        "weights_hash": opened.weights_hash(),
        "machine": this_machine().conditions(),
        "threads": threads,
        "context": settings.context,
        "num_prompts": settings.num_prompts,
        "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens,
    }
    results = list(map(make_result, variants, found))
    return make_report(conditions, text, results, formats.notes)


def _sizes(settings: QualitySettings, corpus: Corpus, opened: OpenedModel) -> Sizes:
    prompt = len(corpus.prefix) + settings.prompt_tokens + settings.output_tokens
    sizes = Sizes(settings.context, prompt, settings.num_prompts)
    if sizes.max_context > opened.spec.max_context:
        raise ConfigError(
            f"windows of {settings.context} tokens and prompts that grow to {prompt}: the context "
            f"of {opened.name} is {opened.spec.max_context}"
        )
    return sizes
