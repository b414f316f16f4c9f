"""Bytes per token, and the bound that follows."""

from pathlib import Path

import pytest

from llmrt.cli.bench.plan import Point
from llmrt.cli.bench.roofline import (
    ModelBytes,
    bytes_per_token,
    mean_context,
    read_model_bytes,
    roofline,
)

# 2 layers, of which one sees the last 50 tokens; K and V of a token take 10 bytes in each.
MODEL = ModelBytes("tiny", "Q4_0", weight_bytes=6000, layer_kv_bytes=10, windows=(None, 50))


def make_point(metric: str, **fields: int | None) -> Point:
    values: dict[str, int | None] = {"input_len": 80, "output_len": 40, "num_prompts": 1, **fields}
    return Point(metric=metric, **values)  # type: ignore[arg-type]


def test_a_window_bounds_what_is_read() -> None:
    assert MODEL.kv_bytes(20) == 400
    assert MODEL.kv_bytes(100) == 1000 + 500


def test_the_mean_context_of_a_decode() -> None:
    """Tokens 2 to 40 are computed at contexts 81 to 119."""
    assert mean_context(make_point("decode")) == sum(range(81, 120)) / 39 == 100


def test_streams_share_the_weights_and_not_the_cache() -> None:
    assert bytes_per_token(MODEL, make_point("decode"), 1) == 6000 + 1500
    assert bytes_per_token(MODEL, make_point("throughput"), 4) == 1500 + 1500
    assert bytes_per_token(MODEL, make_point("ttft"), 1) == 6000 / 80


def test_a_share_of_the_bound_above_1_is_not_credible() -> None:
    assert roofline(7500, 75_000, 4) == {
        "bytes_per_token": 7500,
        "bound_tokens_per_s": 10.0,
        "tokens_per_s": 4,
        "fraction": 0.4,
        "is_credible": True,
    }
    at_the_bound, above = roofline(7500, 75_000, 10), roofline(7500, 75_000, 10.1)
    assert at_the_bound is not None
    assert above is not None
    assert (at_the_bound["is_credible"], above["is_credible"]) == (True, False)
    assert roofline(7500, 75_000, None) is None


def test_a_real_file_is_counted_by_its_matrices(smollm2_path: Path) -> None:
    """SmolLM2-135M: 30 layers of 576 x (576 + 2 x 192 + 576 + 3 x 1536) weights in Q4_1 at 20
    bytes per 32, and a tied head of 49152 x 576 in Q8_0 at 34 bytes per 32; 3 KV heads of 64."""
    model = read_model_bytes(smollm2_path, "bf16")
    layers = 30 * 576 * (576 + 2 * 192 + 576 + 3 * 1536)
    assert model.weight_bytes == layers // 32 * 20 + 49152 * 576 // 32 * 34
    assert model.quantization == "Q4_1+Q8_0"
    assert model.layer_kv_bytes == 2 * 3 * 64 * 2
    assert model.windows == (None,) * 30
    assert read_model_bytes(smollm2_path, "f32").layer_kv_bytes == 2 * 3 * 64 * 4


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_counts_only_as_a_head(is_tied: bool) -> None:
    import numpy as np

    from llmrt.cli.bench.roofline import model_bytes
    from llmrt.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
    from llmrt.models.tensors import StoredTensor

    attention = AttentionSpec(1, 1, 2, 1.0, RopeSpec("half", 2, (1.0,)))
    layer = LayerSpec(attention, MlpSpec(2, "silu"))
    spec = ModelSpec("llama", 100, 2, 64, 1e-5, (layer,), is_tied)
    sizes = {"embed": ((100, 2), 800), "layers.0.q": ((2, 2), 16), "final_norm": ((2,), 8)}
    if not is_tied:
        sizes["head"] = ((100, 2), 800)
    tensors = {
        name: StoredTensor(name, shape, "F32", np.zeros(size, np.uint8))
        for name, (shape, size) in sizes.items()
    }
    assert model_bytes("m", spec, tensors, "bf16").weight_bytes == 816
