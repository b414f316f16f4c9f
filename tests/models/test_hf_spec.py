"""`ModelSpec` from config.json: old and new spellings, and what is refused."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llmrt.models.hf_spec import read_hf_spec
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.safetensors_files import open_safetensors
from llmrt.models.tensor_table import TensorTable
from llmrt.wire.errors import ModelError

Maker = Callable[..., Path]


def edit(folder: Path, **changes: Any) -> OpenedModel:
    """Open after `changes` to config.json; None drops a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return open_model(folder)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    # The arrays are views of the file: copy them before it is written over.
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    path.unlink()
    save_file(change(tensors), path)


@pytest.mark.parametrize(
    ("model_type", "old"),
    [
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen2", {"rope_theta": 1e6, "rope_scaling": None}),
        (
            "gemma3_text",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_the_old_spelling_of_rope_gives_the_same_spec(
    model_type: str, old: dict[str, Any], hf_folder: Maker
) -> None:
    scaling = dict(old["rope_scaling"] or {})
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    new: dict[str, Any] = {"rope_theta": old["rope_theta"], "rope_type": kind, **scaling}
    if model_type == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": old["rope_local_base_freq"]}
        new = {"full_attention": new, "sliding_attention": local}
    folder = hf_folder(model_type)
    expected = edit(folder, rope_parameters=new).spec
    assert edit(folder, rope_parameters=None, **old).spec == expected


def test_gemma_facts(hf_folder: Maker) -> None:
    spec = open_model(hf_folder("gemma3_text")).spec
    assert [layer.attention.window for layer in spec.layers] == [4, None, 4]
    assert spec.layers[0].attention.rope.inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))
    assert spec.layers[1].attention.rope.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8))
    assert spec.attention.scale == pytest.approx(12**-0.5)
    assert spec.embed_scale == float(np.float32(np.sqrt(np.float32(32))))
    assert (spec.architecture, spec.norm_plus_one, spec.is_tied) == ("gemma3", True, True)


def test_gemma_without_layer_types_has_its_pattern(hf_folder: Maker) -> None:
    folder = hf_folder("gemma3_text", num_hidden_layers=7, layer_types=None)
    layers = edit(folder, layer_types=None).spec.layers
    assert [layer.attention.window for layer in layers] == [4, 4, 4, 4, 4, None, 4]
    layers = edit(folder, sliding_window_pattern=2).spec.layers
    assert [layer.attention.window for layer in layers] == [4, None, 4, None, 4, None, 4]


def test_the_text_part_of_a_gemma_with_vision_is_served(hf_folder: Maker) -> None:
    folder = hf_folder("gemma3_text")
    expected = open_model(folder)
    text_config = json.loads((folder / "config.json").read_text())
    wrapper = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text_config,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    eye = {"vision_tower.encoder.layers.0.norm.weight": np.ones(4, np.float32)}
    rewrite(folder, lambda tensors: {f"language_model.{n}": a for n, a in tensors.items()} | eye)
    model = open_model(folder)
    assert model.spec == expected.spec
    assert model.weights_hash() == expected.weights_hash()
    assert model.ignored == tuple(eye)
    assert model.notes == ("only the text part of this vision model is served",)


def test_sizes_that_a_vision_config_leaves_out_are_the_defaults(hf_folder: Maker) -> None:
    folder = hf_folder("gemma3_text")
    text_config = json.loads((folder / "config.json").read_text())
    del text_config["vocab_size"]
    with pytest.raises(ModelError, match=r"sizes ask for \[262208, 32\]"):
        edit(
            folder,
            model_type="gemma3",
            architectures=["Gemma3ForConditionalGeneration"],
            text_config=text_config,
        )


def test_mistral_windows(hf_folder: Maker) -> None:
    """null means none, absent the default of transformers."""
    folder = hf_folder("mistral")
    assert open_model(folder).spec.attention.window == 5
    assert edit(folder, sliding_window=None).spec.attention.window == 4096
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    assert open_model(folder).spec.attention.window is None


def test_head_dim_may_be_absent(hf_folder: Maker) -> None:
    assert edit(hf_folder(), head_dim=None).spec.attention.head_dim == 8


def test_kv_heads_of_an_old_llama_are_its_heads(hf_folder: Maker) -> None:
    folder = hf_folder(num_key_value_heads=4)
    assert edit(folder, num_key_value_heads=None).spec.attention.num_kv_heads == 4


@pytest.mark.parametrize("context", [32, 128])
def test_yarn_extends_the_context(context: int, hf_folder: Maker) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    changes = {"rope_parameters": None, "rope_scaling": scaling}
    assert edit(hf_folder(), max_position_embeddings=context, **changes).spec.max_context == 128


def test_own_code_is_never_executed_but_noted(hf_folder: Maker) -> None:
    folder = hf_folder()
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    auto_map = {"AutoModelForCausalLM": "evil.LlamaForCausalLM"}
    model = edit(folder, auto_map=auto_map)
    assert len(model.notes) == 1
    assert "built-in architecture llama is used" in model.notes[0]
    with pytest.raises(ModelError, match=r"'evil_lm' is not built in.*auto_map.*never executed"):
        edit(folder, model_type="evil_lm")


def test_a_config_without_the_key_leaves_tying_to_the_tensors(hf_folder: Maker) -> None:
    untied, tied = hf_folder(), hf_folder(tie_word_embeddings=True)
    assert not edit(untied, tie_word_embeddings=None).spec.is_tied
    assert edit(tied, tie_word_embeddings=None).spec.is_tied


def test_a_head_that_differs_is_used_although_the_config_ties_it(hf_folder: Maker) -> None:
    model = edit(hf_folder(), tie_word_embeddings=True)
    assert not model.spec.is_tied
    assert model.notes[0].startswith("lm_head.weight differs from the embedding")


def test_an_equal_head_of_a_tied_model_is_left_out(hf_folder: Maker) -> None:
    folder = hf_folder(tie_word_embeddings=True)
    embed = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors[embed].copy()})
    model = open_model(folder)
    assert model.spec.is_tied
    assert model.ignored == ("lm_head.weight",)


def test_a_missing_head_is_named(hf_folder: Maker) -> None:
    folder = hf_folder(tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"'lm_head.weight' is missing"):
        edit(folder, tie_word_embeddings=False)


def test_biases_of_the_output_are_refused(hf_folder: Maker) -> None:
    with pytest.raises(ModelError, match=r"o_proj.bias' would change the output"):
        open_model(hf_folder(attention_bias=True))
    with pytest.raises(ModelError, match=r"mlp.*bias' would change the output"):
        open_model(hf_folder(mlp_bias=True))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=9), x, max_size=3)
)


@pytest.fixture(scope="module", params=["qwen2", "gemma3_text"])
def tiny(request: pytest.FixtureRequest, hf_folder: Maker) -> tuple[dict[str, Any], TensorTable]:
    folder = hf_folder(request.param)
    return json.loads((folder / "config.json").read_text()), open_safetensors(folder)


@settings(deadline=2000)
@given(data=st.data())
def test_any_value_gives_a_spec_or_a_model_error(
    data: st.DataObject, tiny: tuple[dict[str, Any], TensorTable]
) -> None:
    config, table = tiny
    yarn = {"type": "yarn", "factor": 2.0, "beta_fast": 32, "mscale": 1, "mscale_all_dim": 2}
    scaling = yarn | {key: data.draw(JSON) for key in data.draw(st.sets(st.sampled_from([*yarn])))}
    keys = [*sorted(config), "rope_scaling", "head_dim", "auto_map", "sliding_window_pattern"]
    chosen = data.draw(st.lists(st.sampled_from(keys), max_size=3))
    changes = {key: data.draw(JSON) for key in chosen}
    with contextlib.suppress(ModelError):
        read_hf_spec({**config, "rope_parameters": scaling, **changes}, table)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"model_type": None}, "model_type is missing"),
        ("llama", {"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not built in"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": 33, "head_dim": None}, "hidden_size must be a multiple"),
        ("llama", {"hidden_size": "32"}, "hidden_size must be an integer"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer"),
        ("llama", {"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ("llama", {"vocab_size": 97}, "'model.embed_tokens.weight' has shape"),
        ("llama", {"hidden_act": "relu"}, "hidden_act must be silu"),
        ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "text generation"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full"] * 3}, "layer_types"),
        ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("qwen3", {"head_dim": None}, "'model.layers.0.self_attn.q_proj.weight' has shape"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "layer_types must be 3 times"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    model_type: str, changes: dict[str, Any], named: str, hf_folder: Maker
) -> None:
    with pytest.raises(ModelError, match=named):
        edit(hf_folder(model_type), **changes)
