"""A plain forward pass driven by nothing but `ModelSpec` equals transformers, for every family.

So the two readers, the names and the conversions of values are right together.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.quants import dequantize
from llmrt.models.spec import AttentionSpec, ModelSpec, RopeSpec

Floats = npt.NDArray[np.float32]
IDS = np.array([1, 17, 5, 90, 33, 33, 8, 61, 2, 44, 71, 12, 29, 3], np.int64)

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
}


def norm(spec: ModelSpec, x: Floats, weight: Floats) -> Floats:
    scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(spec.norm_eps))
    return np.asarray(scaled * (weight + 1 if spec.norm_plus_one else weight), np.float32)


def rotate(rope: RopeSpec, x: Floats) -> Floats:
    """x: [tokens, heads, head_dim]."""
    angles = np.outer(np.arange(len(x)), rope.inv_freq)[:, None]
    cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    half = rope.rotary_dim // 2
    interleaved = rope.style == "interleaved"
    a = slice(0, rope.rotary_dim, 2) if interleaved else slice(0, half)
    b = slice(1, rope.rotary_dim, 2) if interleaved else slice(half, rope.rotary_dim)
    out = x.copy()
    out[..., a], out[..., b] = (
        x[..., a] * cos - x[..., b] * sin,
        x[..., b] * cos + x[..., a] * sin,
    )
    return out


def attend(spec: AttentionSpec, q: Floats, k: Floats, v: Floats) -> Floats:
    groups = spec.num_heads // spec.num_kv_heads
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.scale
    behind = np.arange(len(q))[:, None] - np.arange(len(k))[None, :]
    visible = (behind >= 0) & (behind < (spec.window or len(q)))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1), np.float32)


def activate(activation: str, x: Floats) -> Floats:
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)), np.float32)
    assert activation == "gelu_tanh"
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)


def forward(model: OpenedModel, ids: npt.NDArray[np.int64]) -> Floats:
    spec, w = model.spec, {name: dequantize(t) for name, t in model.tensors.items()}
    x = w["embed"][ids] * np.float32(spec.embed_scale)
    for i, layer in enumerate(spec.layers):
        attention, prefix = layer.attention, f"layers.{i}."
        h = norm(spec, x, w[prefix + "attn_norm"])
        heads = {}
        for part in "qkv":
            projected = h @ w[prefix + part].T
            if attention.has_qkv_bias:
                projected = projected + w[f"{prefix}{part}_bias"]
            heads[part] = projected.reshape(len(ids), -1, attention.head_dim)
            if attention.has_qk_norm and part != "v":
                heads[part] = norm(spec, heads[part], w[f"{prefix}{part}_norm"])
        q, k = rotate(attention.rope, heads["q"]), rotate(attention.rope, heads["k"])
        out = attend(attention, q, k, heads["v"]) @ w[prefix + "o"].T
        x = x + (norm(spec, out, w[prefix + "post_attn_norm"]) if layer.has_post_norms else out)
        h = norm(spec, x, w[prefix + "mlp_norm"])
        gated = activate(layer.mlp.activation, h @ w[prefix + "gate"].T) * (h @ w[prefix + "up"].T)
        out = gated @ w[prefix + "down"].T
        x = x + (norm(spec, out, w[prefix + "post_mlp_norm"]) if layer.has_post_norms else out)
    return norm(spec, x, w["final_norm"]) @ w["embed" if spec.is_tied else "head"].T


def expected(model: Any) -> Floats:
    with torch.no_grad():
        logits: Floats = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    return logits


def assert_same_logits(path: Path, model: Any) -> None:
    want = expected(model)
    np.testing.assert_allclose(forward(open_model(path), IDS), want, atol=2e-4 * want.std(), rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_safetensors_of_each_family_compute_as_transformers(
    model_type: str, hf_model: Callable[..., Any], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model(model_type)
    assert_same_logits(save_model(tmp_path, model), model)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_of_each_family_computes_as_transformers(
    arch: str, hf_model: Callable[..., Any], gguf_file: Callable[..., Path]
) -> None:
    options: dict[str, Any] = {}
    if arch == "gemma3":
        # GGUF takes the pattern and the scale from the architecture.
        options = {"layer_types": None, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
    model = hf_model("gemma3_text" if arch == "gemma3" else arch, **options)
    assert_same_logits(gguf_file(arch, model=model), model)


@pytest.mark.parametrize("scaling", ROPE_SCALINGS)
def test_rope_scaling_computes_as_transformers(
    scaling: str, hf_model: Callable[..., Any], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = hf_model(rope_parameters=dict(ROPE_SCALINGS[scaling]))
    assert_same_logits(save_model(tmp_path, model), model)


@pytest.mark.parametrize(
    "config",
    [
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
        {"tie_word_embeddings": True},
    ],
)
def test_qwen_windows_and_tied_heads_compute_as_transformers(
    config: dict[str, Any],
    hf_model: Callable[..., Any],
    save_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = hf_model("qwen2", **config)
    assert_same_logits(save_model(tmp_path, model), model)


def test_half_precision_files_compute_as_transformers(
    hf_model: Callable[..., Any], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    save_model(tmp_path, hf_model().to(torch.bfloat16))
    assert {tensor.kind for tensor in open_model(tmp_path).tensors.values()} == {"BF16"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert_same_logits(tmp_path, load(tmp_path, dtype=torch.float32, attn_implementation="eager"))
