"""Model families: what the name of an architecture says and its files do not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmrt.models.fields import Fields
from llmrt.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

# Far above any model; they bound what a damaged file can make us build.
MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096


@dataclass(frozen=True, slots=True)
class Family:
    """`scales_embeddings`: by sqrt(hidden). `local_pattern`: of so many layers all but the last
    have the window, and with it `local_theta`; 1 if the family has no such layers."""

    architecture: str
    activation: str = "silu"
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    scales_embeddings: bool = False
    default_theta: float = 10000.0
    local_theta: float = 10000.0
    local_pattern: int = 1


LLAMA = Family("llama")
MISTRAL = Family("mistral")
QWEN2 = Family("qwen2", has_qkv_bias=True)
QWEN3 = Family("qwen3", has_qk_norm=True)
GEMMA3 = Family(
    "gemma3",
    activation="gelu_tanh",
    has_qk_norm=True,
    has_post_norms=True,
    scales_embeddings=True,
    default_theta=1e6,
    local_pattern=6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs between the layers of one model: rope, and window."""

    rope: RopeSpec
    window: int | None = None


def build_spec(
    family: Family,
    sizes: Sizes,
    kinds: Sequence[LayerKind],
    *,
    scale: float,
    is_tied: bool,
    has_qkv_bias: bool,
    norm_plus_one: bool = False,
) -> ModelSpec:
    """The spec of a model whose layer i is of `kinds[i]`.

    The embedding scale of Gemma is sqrt(hidden) rounded to float32, as in llama.cpp, and in
    transformers for a float32 model; transformers rounds it to bfloat16 in a bfloat16 model,
    where it is up to 0.4 % off.
    """
    mlp = MlpSpec(sizes.intermediate_size, family.activation)
    layer_of: dict[LayerKind, LayerSpec] = {}
    for kind in kinds:
        attention = AttentionSpec(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=scale,
            rope=kind.rope,
            window=kind.window,
            has_qkv_bias=has_qkv_bias,
            has_qk_norm=family.has_qk_norm,
        )
        layer_of[kind] = LayerSpec(attention, mlp, family.has_post_norms)
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_context=sizes.max_context,
        norm_eps=sizes.norm_eps,
        layers=tuple(layer_of[kind] for kind in kinds),
        is_tied=is_tied,
        norm_plus_one=norm_plus_one,
        embed_scale=float(np.sqrt(np.float32(sizes.hidden_size)))
        if family.scales_embeddings
        else 1.0,
    )


def local_layers(pattern: int, num_layers: int) -> list[bool]:
    """For each layer, whether it has the window: of `pattern` layers all but the last."""
    return [(i + 1) % pattern != 0 for i in range(num_layers)]


def refuse(fields: Fields, keys: Sequence[str], architecture: str) -> None:
    """Raise `ModelError` for a key that would change the output and that is not supported."""
    for key in keys:
        if fields.get(key):
            raise fields.error(
                key, f"absent: {architecture} is not supported with it", fields.get(key)
            )
