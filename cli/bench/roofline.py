"""The bound that memory sets: bytes that a token must read, over bytes per second.

A step reads every matrix once, whatever the number of streams, and the KV cache of each stream.
Bytes are those of the model's file: weights that a worker widens make the bound harder to reach,
not wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrt.cli.bench.plan import TTFT, Point

if TYPE_CHECKING:
    from llmrt.models.spec import ModelSpec
    from llmrt.models.tensors import StoredTensor

_KV_ITEM_BYTES = {"bf16": 2, "f32": 4, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Sizes of one model. `weight_bytes`: all matrices that are multiplied with.

    `layer_kv_bytes`: K and V of one token in one layer. `windows`: per layer, the most tokens
    that its attention reads; None for all. `quantization`: storage types, most bytes first.
    """

    name: str
    quantization: str
    weight_bytes: int
    layer_kv_bytes: int
    windows: tuple[int | None, ...]

    def kv_bytes(self, context: float) -> float:
        """What one token at this context reads of the KV cache."""
        num_tokens = sum(min(context, window or math.inf) for window in self.windows)
        return num_tokens * self.layer_kv_bytes


def read_model_bytes(path: Path, kv_dtype: str) -> ModelBytes:
    """Raises `ModelError` or `ModelNotFound`."""
    from llmrt.models.loading import open_model

    opened = open_model(path)
    try:
        return model_bytes(opened.name, opened.spec, opened.tensors, kv_dtype)
    finally:
        opened.close()


def model_bytes(
    name: str, spec: "ModelSpec", tensors: "Mapping[str, StoredTensor]", kv_dtype: str
) -> ModelBytes:
    by_kind: dict[str, int] = {}
    for tensor_name, tensor in tensors.items():
        # Of an embedding that is not the head as well, a token reads one row.
        if len(tensor.shape) == 2 and (tensor_name != "embed" or spec.is_tied):
            by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.data.size
    attention = spec.attention
    return ModelBytes(
        name=name,
        quantization="+".join(sorted(by_kind, key=lambda kind: -by_kind[kind])),
        weight_bytes=sum(by_kind.values()),
        layer_kv_bytes=(
            2 * attention.num_kv_heads * attention.head_dim * _KV_ITEM_BYTES.get(kv_dtype, 2)
        ),
        windows=tuple(layer.attention.window for layer in spec.layers),
    )


def bytes_per_token(model: ModelBytes, point: Point, num_streams: int) -> float:
    """On average over a load. A prompt reads the weights once at least, and its tokens share."""
    if point.metric == TTFT:
        return model.weight_bytes / point.input_len
    return model.weight_bytes / num_streams + model.kv_bytes(mean_context(point))


def mean_context(point: Point) -> float:
    """Tokens in the cache when a token behind the first is computed, the token included."""
    return point.input_len + point.output_len / 2


def roofline(
    size_bytes: float, bandwidth: float, tokens_per_s: float | None
) -> dict[str, Any] | None:
    """The bound in tokens/s, and what share of it was reached; above 1 nothing is credible."""
    if tokens_per_s is None:
        return None
    bound = bandwidth / size_bytes
    fraction = tokens_per_s / bound
    return {
        "bytes_per_token": size_bytes,
        "bound_tokens_per_s": bound,
        "tokens_per_s": tokens_per_s,
        "fraction": fraction,
        "is_credible": fraction <= 1,
    }
