"""`ModelSpec` from GGUF metadata: values, defaults, and what is refused."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.models.gguf_parts import open_gguf
from llmrt.models.gguf_spec import read_gguf_spec
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.tensor_table import TensorTable
from llmrt.wire.errors import ModelError

Writer = Callable[..., Path]


def test_the_real_model_has_its_published_sizes(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    spec, attention = model.spec, model.spec.attention
    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == ("llama", 49152, 576)
    assert (spec.num_layers, spec.max_context, spec.is_tied) == (30, 8192, True)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert (attention.scale, attention.window) == (0.125, None)
    assert (attention.rope.style, attention.rope.rotary_dim) == ("interleaved", 64)
    assert attention.rope.inv_freq[1] == pytest.approx(1e5 ** (-1 / 32))
    assert spec.layers[0].mlp.intermediate_size == 1536
    assert len(model.tensors) == 272
    assert (model.ignored, model.notes) == ((), ())


def opened(path: Path) -> OpenedModel:
    return open_model(path)


def test_gemma_gets_what_its_file_does_not_say(gguf_file: Writer, hf_model: Any) -> None:
    model = hf_model("gemma3_text", num_hidden_layers=7, layer_types=None)
    spec = opened(gguf_file("gemma3", model=model)).spec
    assert [layer.attention.window for layer in spec.layers] == [4, 4, 4, 4, 4, None, 4]
    assert spec.layers[0].attention.rope.inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))
    assert spec.layers[5].attention.rope.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8))
    assert spec.embed_scale == float(np.float32(np.sqrt(np.float32(32))))
    assert (spec.layers[0].mlp.activation, spec.layers[0].has_post_norms) == ("gelu_tanh", True)
    assert not spec.norm_plus_one


def test_gemma_scales_only_its_global_layers(gguf_file: Writer, hf_model: Any) -> None:
    model = hf_model("gemma3_text", num_hidden_layers=6, layer_types=None)
    changes = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    layers = opened(gguf_file("gemma3", model=model, changes=changes)).spec.layers
    assert layers[0].attention.rope.inv_freq[0] == 1.0
    assert layers[5].attention.rope.inv_freq[0] == 1 / 8


def test_a_missing_rope_base_is_the_default_and_is_said(gguf_file: Writer) -> None:
    model = opened(gguf_file(changes={"llama.rope.freq_base": None}))
    assert model.spec.attention.rope.inv_freq[1] == pytest.approx(1e4 ** (-1 / 4))
    assert model.notes == ("llama.rope.freq_base is missing: 10000 is used",)


def test_keys_without_effect_are_said(gguf_file: Writer) -> None:
    model = opened(gguf_file(changes={"llama.new_thing": 3, "other.thing": 4}))
    assert model.notes == ("keys without effect here: llama.new_thing",)


def test_the_window_of_a_mistral_file_is_for_all_layers(gguf_file: Writer) -> None:
    layers = opened(gguf_file(changes={"llama.attention.sliding_window": 9})).spec.layers
    assert [layer.attention.window for layer in layers] == [9, 9, 9]


def test_rope_frequencies_of_a_tensor_divide(gguf_file: Writer) -> None:
    extra = {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    model = opened(gguf_file(extra=extra))
    plain = opened(gguf_file()).spec.attention.rope.inv_freq
    divided = [f / d for f, d in zip(plain, (1, 2, 4, 8), strict=True)]
    assert list(model.spec.attention.rope.inv_freq) == divided


def test_yarn_extends_the_context(gguf_file: Writer) -> None:
    changes = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    assert opened(gguf_file(changes=changes)).spec.max_context == 512


def test_one_number_per_layer_is_fine_if_all_are_the_same(gguf_file: Writer) -> None:
    changes: dict[str, Any] = {"llama.attention.head_count_kv": [2, 2, 2]}
    assert opened(gguf_file(changes=changes)).spec.attention.num_kv_heads == 2
    changes = {"llama.attention.head_count_kv": [2, 2, 4]}
    with pytest.raises(ModelError, match=r"llama.attention.head_count_kv must be the same"):
        opened(gguf_file(changes=changes))


def test_biases_are_found_by_their_tensors(gguf_file: Writer) -> None:
    extra = {f"blk.{i}.attn_{x}.bias": np.ones(n, np.float32) for i in range(3) for x, n in SIZES}
    assert opened(gguf_file(extra=extra)).spec.attention.has_qkv_bias


SIZES = (("q", 32), ("k", 16), ("v", 16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not built in"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 2_000_000_000}, "llama.block_count must be an integer from 1"),
        ({"llama.block_count": 4}, "'blk.3.attn_norm.weight' is missing"),
        ({"llama.context_length": "long"}, "llama.context_length must be an integer"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be an integer"),
        ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"llama.attention.head_count": 8}, "'blk.0.attn_q.weight' has shape"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length must be 8"),
        ({"llama.attention.key_length": 7, "llama.attention.value_length": 7}, "an even part"),
        ({"llama.embedding_length": 64}, "'token_embd.weight' has shape"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count must be"),
        ({"llama.rope.freq_base": 0.5}, "llama.rope.freq_base must be a number above 1"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be"),
        ({"llama.expert_count": 8}, "llama.expert_count must be absent"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping must be absent"),
        ({"tokenizer.ggml.tokens": ["x"] * 97}, "tokenizer.ggml.tokens has 97 tokens"),
    ],
)
def test_a_wrong_key_is_refused_by_name(
    changes: dict[str, Any], named: str, gguf_file: Writer
) -> None:
    with pytest.raises(ModelError, match=named):
        opened(gguf_file(changes=changes))


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight", "blk.2.attn_k.weight"],
)
def test_a_missing_tensor_is_named(name: str, gguf_file: Writer) -> None:
    with pytest.raises(ModelError, match=f"tensor '{name}' is missing"):
        opened(gguf_file(without=[name]))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_output.bias", "blk.2.attn_sinks", "blk.1.ffn_gate_exps.weight"]
)
def test_a_tensor_that_would_change_the_output_is_refused(name: str, gguf_file: Writer) -> None:
    with pytest.raises(ModelError, match=f"tensor '{name}' would change the output"):
        opened(gguf_file(extra={name: np.ones(32, np.float32)}))


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)


@pytest.fixture(scope="module")
def gemma(gguf_file: Writer) -> tuple[dict[str, Any], TensorTable]:
    yarn = {"gemma3.rope.scaling.type": "yarn", "gemma3.rope.scaling.factor": 2.0}
    return open_gguf(gguf_file("gemma3", changes=yarn))


@settings(deadline=2000)
@given(data=st.data())
def test_any_value_gives_a_spec_or_a_model_error(
    data: st.DataObject, gemma: tuple[dict[str, Any], TensorTable]
) -> None:
    metadata, table = gemma
    keys = [*sorted(metadata), "gemma3.rope.freq_base_swa", "gemma3.rope.scaling.yarn_beta_fast"]
    chosen = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3))
    values = VALUES | st.lists(VALUES, max_size=4)
    with contextlib.suppress(ModelError):
        read_gguf_spec({**metadata, **{key: data.draw(values) for key in chosen}}, table)


def test_an_unused_tensor_is_reported(gguf_file: Writer) -> None:
    extra = {"nothing.weight": np.ones(32, np.float32)}
    assert opened(gguf_file(extra=extra)).ignored == ("nothing.weight",)


def test_a_file_without_output_has_a_tied_head(gguf_file: Writer) -> None:
    model = opened(gguf_file(without=["output.weight"]))
    assert model.spec.is_tied
    assert "head" not in model.tensors
