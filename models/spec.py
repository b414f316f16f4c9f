"""`ModelSpec`: everything that a decoder needs to know about a model, whatever its file format.

Two readers fill it, from `config.json` and from GGUF metadata. Differences between families are
fields here, never code elsewhere. Axes that no family needs yet (latent attention, experts,
recurrent state) will become further kinds of `AttentionSpec` and `MlpSpec`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    `style` is `half` (dims i and i + d/2 rotate together) or `interleaved` (2i and 2i + 1).
    `inv_freq` holds the rotary_dim / 2 inverse frequencies in radians per position, with any
    scaling (linear, llama3, yarn) already applied; `attention_factor` multiplies cos and sin.
    """

    style: str
    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer: grouped-query, over all tokens or over the last `window`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated feed-forward: down(act(gate(x)) * up(x)). `activation`: silu or gelu_tanh."""

    intermediate_size: int
    activation: str


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. `has_post_norms`: attention and MLP outputs are normed too (Gemma)."""

    attention: AttentionSpec
    mlp: MlpSpec
    has_post_norms: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    `norm_plus_one`: RMS norm weights are stored as w - 1 (Gemma in safetensors; GGUF has w).
    `embed_scale` multiplies embeddings. `is_tied`: the head is the embedding matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_context: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    norm_plus_one: bool = False
    embed_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer: heads and head size are the same in all (checked)."""
        return self.layers[0].attention
