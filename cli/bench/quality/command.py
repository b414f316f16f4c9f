"""`llmrt bench quality`: its flags."""

import json
from pathlib import Path
from typing import Annotated

import typer

from llmrt.actor.signals import raised
from llmrt.cli.options import JsonOption
from llmrt.wire.errors import ConfigError


def quality(
    model: Annotated[
        Path, typer.Option(help="GGUF file, or folder with config.json and safetensors")
    ],
    dtype: Annotated[str, typer.Option(help="formats of the weights")] = "auto,int8,bf16,f32",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="formats of the KV cache")
    ] = "f32,bf16,int8,fp8",
    device: Annotated[str, typer.Option(help="cpu (the compiled step): no other has them all")] = (
        "cpu"
    ),
    text: Annotated[
        Path | None,
        typer.Option(
            help="file in UTF-8 [two chapters of a book that come with llmrt]", show_default=False
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="tokens of a window")] = 512,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="first so many tokens of the text, and below 1024 fewer prompts [all]",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="threads of a step [all cores]", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare formats of weights and KV cache: perplexity of a fixed text, and how near each is
    to float32.

    Example: llmrt bench quality --model model.gguf --dtype auto --kv-cache-dtype bf16,int8,fp8
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device is {device!r}: quality is measured on the cpu device (the compiled step), "
            "the only one that has all formats"
        )
    try:
        from llmrt.cli.bench.quality.measure import QualitySettings
        from llmrt.cli.bench.quality.report import text_of
        from llmrt.cli.bench.quality.start import measure_quality
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"measuring quality needs the package {error.name}: pip install 'llmrt[worker]'"
        ) from None
    with raised():  # so that its bar is taken off the terminal
        report = measure_quality(
            model,
            _names(dtype),
            _names(kv_cache_dtype),
            settings=QualitySettings(context=context, max_tokens=tokens),
            text_path=text,
            threads=threads,
        )
    print(json.dumps(report) if json_output else text_of(report))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
