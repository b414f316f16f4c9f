"""Tiny models through the compiled step, from their files to the report."""

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tests.engine.tiny_models import save_tiny_model
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmrt.cli.bench.quality import measure as quality_measure
from llmrt.cli.bench.quality import start as quality_start
from llmrt.cli.bench.quality.measure import QualitySettings
from llmrt.cli.bench.quality.report import text_of
from llmrt.cli.bench.quality.start import measure_quality
from llmrt.cli.bench.quality.variants import Sizes, choose_formats, load_variants
from llmrt.cli.main import main
from llmrt.models.loading import open_model
from llmrt.wire.errors import ConfigError, InternalError

VOCAB = 128
SETTINGS = QualitySettings(
    context=48, max_tokens=150, num_prompts=3, prompt_tokens=12, output_tokens=8
)
ALL_DTYPES = ("auto", "int8", "bf16", "f32")
ALL_KV = ("f32", "bf16", "int8", "fp8")


def save_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """A token per printable byte, and some that no English text has."""
    alphabet = sorted(ByteLevel.alphabet())
    printable = [char for char in alphabet if char.isascii()] + ["Ġ", "Ċ"]
    others = [char for char in alphabet if char not in printable]
    pieces = (printable + others)[:VOCAB]
    made = tokenizers.Tokenizer(BPE({piece: n for n, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.save(str(folder / "tokenizer.json"))
    return made


def head_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    return weights["lm_head.weight"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    saved = save_tiny_model("qwen3", folder)
    save_tokenizer(folder)
    return folder, saved


@pytest.fixture(scope="module")
def report(model: tuple[Path, transformers.PreTrainedModel]) -> dict[str, Any]:
    return measure_quality(model[0], ALL_DTYPES, ALL_KV, settings=SETTINGS, threads=1)


def windows(folder: Path) -> list[list[int]]:
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = Path(quality_measure.__file__).with_name("wonderland.txt").read_text()
    ids = made.encode(text).ids[: SETTINGS.max_tokens]
    return [ids[start : start + SETTINGS.context] for start in range(0, len(ids), SETTINGS.context)]


def test_the_reference_has_the_perplexity_of_transformers(
    model: tuple[Path, transformers.PreTrainedModel], report: dict[str, Any]
) -> None:
    folder, reference = model
    losses = []
    for window in windows(folder):
        ids = torch.tensor([window])
        with torch.no_grad():
            log_probabilities = reference(ids).logits[0].double().log_softmax(dim=-1)
        losses += [-float(log_probabilities[n, token]) for n, token in enumerate(window[1:])]
    assert report["reference"]["num_tokens"] == len(losses) == 150 - 4
    assert report["reference"]["perplexity"] == pytest.approx(
        math.exp(sum(losses) / len(losses)), rel=2e-5
    )


def test_every_format_is_there_once_and_near_the_reference(report: dict[str, Any]) -> None:
    """A model in float32 has no integers of its own: auto is bf16."""
    pairs = [(result["dtype"], result["kv_cache_dtype"]) for result in report["results"]]
    assert pairs == [
        *(("f32", kv_dtype) for kv_dtype in ALL_KV if kv_dtype != "f32"),
        *((dtype, kv_dtype) for dtype in ("auto", "int8") for kv_dtype in ALL_KV),
    ]
    assert report["notes"] == ["bf16 weights of this model are those of auto: measured once"]
    kl = {pair: result["mean_kl"] for pair, result in zip(pairs, report["results"], strict=True)}
    assert all(0 < value < 0.05 for value in kl.values())
    assert kl["f32", "int8"] < kl["f32", "fp8"]
    assert kl["auto", "f32"] < kl["int8", "f32"]
    for result in report["results"]:
        assert 0.7 < result["top1_agreement"] <= 1
        assert abs(result["perplexity_change"]) < 0.05
        assert result["numerics_id"].endswith(f"/kv-{result['kv_cache_dtype']}")
    sizes = {result["kv_cache_dtype"]: result["kv_token_bytes"] for result in report["results"]}
    assert sizes["f32"] == 2 * sizes["bf16"] > 2 * sizes["int8"] == 2 * sizes["fp8"]


def test_greedy_tokens_are_those_of_transformers(
    model: tuple[Path, transformers.PreTrainedModel],
) -> None:
    """Prompts of several lengths, side by side."""
    folder, reference = model
    opened = open_model(folder)
    prompts = [
        array("I", window[:length])
        for window, length in zip(windows(folder), (12, 1, 7, 12), strict=True)
    ]
    formats = choose_formats(opened, ["f32"], ["f32"])
    [variant] = load_variants(opened, formats, Sizes(48, 20, len(prompts)), 1)
    outputs = variant.generate(prompts, 8)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt.tolist()
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert output == tokens[len(prompt) :]


def test_chunks_change_nothing(
    model: tuple[Path, transformers.PreTrainedModel],
    report: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of 7 tokens at a time; sums in another order differ in their last digits."""
    monkeypatch.setattr(quality_measure, "_LOGITS_BYTES", 7 * 4 * VOCAB)
    again = measure_quality(model[0], ["f32"], ["int8"], settings=SETTINGS, threads=1)
    expected = next(r for r in report["results"] if r["kv_cache_dtype"] == "int8")
    [found] = again["results"]
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-5) if type(value) is float else value)


def test_equal_logits_have_the_perplexity_of_the_vocabulary(tmp_path: Path) -> None:
    saved = save_tiny_model("qwen2", tmp_path)
    with torch.no_grad():
        head_of(saved).zero_()
    saved.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    report = measure_quality(tmp_path, ALL_DTYPES, ALL_KV, settings=SETTINGS, threads=1)
    for result in (report["reference"], *report["results"]):
        assert result["perplexity"] == VOCAB
        assert result["mean_kl"] == result["perplexity_change"] == 0
        assert result["top1_agreement"] == result["greedy_agreement"] == 1


def test_a_damaged_weight_is_an_error(tmp_path: Path) -> None:
    saved = save_tiny_model("qwen2", tmp_path)
    with torch.no_grad():
        head_of(saved)[3, 3] = math.nan
    saved.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(InternalError, match="f32 weights, f32 KV has a logit that is not finite"):
        measure_quality(tmp_path, ["f32"], ["f32"], settings=SETTINGS, threads=1)


@pytest.mark.parametrize(
    ("num_tokens", "num_prompts", "output_tokens"),
    [(7021, 16, 64), (1024, 16, 64), (512, 8, 32), (64, 2, 16), (2, 2, 16)],
)
def test_a_short_text_has_fewer_prompts(
    num_tokens: int, num_prompts: int, output_tokens: int
) -> None:
    """Or the prompts would be most of the work of `--tokens 64`."""
    settings = QualitySettings().for_text(num_tokens)
    assert (settings.num_prompts, settings.output_tokens) == (num_prompts, output_tokens)
    few = replace(settings, num_prompts=1, output_tokens=3).for_text(num_tokens)
    assert (few.num_prompts, few.output_tokens) == (1, 3)


def test_progress_covers_loading_text_and_every_token_behind_the_prompts(
    model: tuple[Path, transformers.PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    labels: list[str] = []

    @contextmanager
    def bar(total: int) -> Iterator[Callable[[str], None]]:
        totals.append(total)
        yield labels.append

    monkeypatch.setattr(quality_start, "progress_bar", bar)
    settings = replace(SETTINGS, output_tokens=5)
    report = measure_quality(model[0], ["f32"], ["bf16"], settings=settings, threads=1)
    assert (report["num_prompts"], report["output_tokens"]) == (2, 5)
    num_windows = len(windows(model[0]))
    assert totals == [len(labels)] == [2 * (1 + num_windows + 5)]
    assert labels[-5:] == ["f32 weights, bf16 KV, greedy"] * 5


@pytest.mark.parametrize(
    ("dtypes", "kv_dtypes", "settings", "message"),
    [
        (["q4"], ["f32"], SETTINGS, "dtype is 'q4'"),
        (["f32"], ["int4"], SETTINGS, "kv_cache_dtype is 'int4'"),
        (["f32"], ["f32"], replace(SETTINGS, context=257), "context of .* is 256"),
        (["f32"], ["f32"], replace(SETTINGS, context=1), "--context is 1"),
        (["f32"], ["f32"], replace(SETTINGS, max_tokens=1), "--tokens is 1"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    model: tuple[Path, transformers.PreTrainedModel],
    dtypes: list[str],
    kv_dtypes: list[str],
    settings: QualitySettings,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_quality(model[0], dtypes, kv_dtypes, settings=settings)


def test_the_table_has_a_line_per_format(report: dict[str, Any]) -> None:
    lines = text_of(report).splitlines()
    assert "146 tokens of wonderland.txt (sha256 aa178d3aa9ba8a44) in windows of 48" in lines[0]
    table = lines[lines.index("") + 1 :][: 2 + len(report["results"])]
    assert [line.split()[:2] for line in table] == [
        ["weights", "KV"],
        ["f32", "f32"],
        *([result["dtype"], result["kv_cache_dtype"]] for result in report["results"]),
    ]
    assert "reference" in table[1]
    assert all(
        line.endswith(r["numerics_id"])
        for line, r in zip(table[2:], report["results"], strict=True)
    )
    assert lines[-1] == report["notes"][0]


Llmrt = Callable[..., tuple[object, str, str]]


@pytest.fixture
def llmrt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Llmrt:
    def run(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["llmrt", "bench", "quality", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_the_command_prints_one_object(
    model: tuple[Path, transformers.PreTrainedModel], llmrt: Llmrt, tmp_path: Path
) -> None:
    text = tmp_path / "own.txt"
    text.write_text("What is the use of a book without pictures or conversations? " * 4)
    flags = ("--dtype", "auto", "--kv-cache-dtype", "bf16, int8", "--text", str(text))
    code, out, err = llmrt("--model", str(model[0]), *flags, "--context", "64", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["schema"] == "llmrt-bench-quality/1"
    assert report["text"]["name"] == "own.txt"
    assert [result["kv_cache_dtype"] for result in report["results"]] == ["bf16", "int8"]
    assert report["machine"]["cpu"]
    assert llmrt("--model", str(model[0]), *flags, "--context", "64")[1].startswith(
        f"{report['model']} (F32), "
    )


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "--model"),
        (("--model", "/no/such.gguf"), 78, "no model at /no/such.gguf"),
        (("--model", "/", "--device", "torch"), 78, "only one that has all formats"),
        (("--model", "/", "--text", "/no/such.txt"), 78, "cannot read the text /no/such.txt"),
    ],
)
def test_a_wrong_flag_is_named(
    llmrt: Llmrt, args: tuple[str, ...], code: int, message: str
) -> None:
    found = llmrt(*args)
    assert found[:2] == (code, "")
    assert message in found[2]
