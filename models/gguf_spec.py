"""`ModelSpec` from the metadata of a GGUF file.

Key and tensor names are those of ggml's `docs/gguf.md` and llama.cpp's `llama-arch.cpp`. What
GGUF does not carry comes from the family: activation, embedding scale, window pattern. Norm
weights of Gemma are stored with the 1 added. The q and k rows of `llama` are permuted, so that
dimensions 2i and 2i + 1 rotate together; those of other architectures are as in safetensors.
"""

from typing import Any

from llmrt.models.canonical import SpecReading, check_spec, file_names
from llmrt.models.families import (
    GEMMA3,
    LLAMA,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    QWEN2,
    QWEN3,
    Family,
    LayerKind,
    Sizes,
    build_spec,
    local_layers,
    refuse,
)
from llmrt.models.fields import MAX_INTEGER, Fields, short
from llmrt.models.quants import BLOCK_OF_KIND, dequantize
from llmrt.models.rope import rope_from_gguf
from llmrt.models.tensor_table import TensorTable
from llmrt.wire.errors import ModelError

FAMILY_OF_ARCHITECTURE = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3}

_EMBED, _HEAD, _FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOP = {"embed": _EMBED, "final_norm": "output_norm.weight", "head": _HEAD}
_LAYER_PREFIX = "blk."
_LEAVES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}

# Each changes the output of a model that has it, and none of the built-in families should.
_UNSUPPORTED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.layer_norm_epsilon",
    "rope.scaling.yarn_log_multiplier",
)
_USED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
)


def read_gguf_spec(metadata: dict[str, Any], table: TensorTable) -> SpecReading:
    """The spec, and the file's tensor names; raises `ModelError` naming key or tensor."""
    source = str(table.source)
    name = Fields(metadata, source).text("general.architecture")
    family = FAMILY_OF_ARCHITECTURE.get(name)
    if family is None:
        raise ModelError(
            f"{source}: general.architecture {short(name)} is not built in; "
            f"built in are {', '.join(FAMILY_OF_ARCHITECTURE)}"
        )
    fields = Fields(metadata, source, prefix=f"{name}.")
    refuse(fields, _UNSUPPORTED, name)
    notes: list[str] = []
    sizes = _sizes(fields, table)
    scale = sizes.head_dim**-0.5
    if family is GEMMA3 and sizes.num_layers == 62:
        # The 27B model alone scales by the hidden size, and no key says so.
        scale = (sizes.hidden_size / sizes.num_heads) ** -0.5
    spec = build_spec(
        family,
        sizes,
        _layer_kinds(fields, family, sizes, table, notes),
        scale=scale,
        is_tied=_HEAD not in table.tensors,
        has_qkv_bias=family.has_qkv_bias or f"{_LAYER_PREFIX}0.attn_q.bias" in table.tensors,
    )
    check_spec(spec, source)
    _check_vocabulary(metadata, spec.vocab_size, source)
    known = {fields.prefix + key for key in (*_USED, *_UNSUPPORTED)}
    unused = [key for key in metadata if key.startswith(fields.prefix) and key not in known]
    if unused:
        notes.append(f"keys without effect here: {', '.join(unused[:20])}")
    names = file_names(spec, top=_TOP, layer_prefix=_LAYER_PREFIX, leaves=_LEAVES)
    return SpecReading(spec, names, _LAYER_PREFIX, tuple(notes))


def _sizes(fields: Fields, table: TensorTable) -> Sizes:
    embed = table.tensors.get(_EMBED)
    if embed is None or len(embed.shape) != 2:
        raise ModelError(f"{fields.source}: tensor {_EMBED!r} is missing or no matrix (embed)")
    hidden_size = fields.integer("embedding_length")
    num_heads = _same_in_all_layers(fields, "attention.head_count")
    if not fields.has("attention.key_length") and hidden_size % num_heads:
        raise fields.error("embedding_length", f"a multiple of the {num_heads} heads", hidden_size)
    head_dim = fields.integer(
        "attention.key_length", hidden_size // num_heads or None, maximum=MAX_HEAD_DIM
    )
    if fields.integer("attention.value_length", head_dim) != head_dim:
        value_length = fields.get("attention.value_length")
        raise fields.error("attention.value_length", f"{head_dim}, as key_length", value_length)
    return Sizes(
        vocab_size=embed.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(fields, "feed_forward_length"),
        num_layers=fields.integer("block_count", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=_max_context(fields),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
    )


def _same_in_all_layers(fields: Fields, key: str, default: int | None = None) -> int:
    """A number, or a list of one per layer that are all the same."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if not value or any(item != value[0] for item in value):
        raise fields.error(key, "the same in all layers", value)
    return Fields({key: value[0]}, fields.source).integer(key)


def _max_context(fields: Fields) -> int:
    context = fields.integer("context_length")
    if fields.text("rope.scaling.type", "none") != "yarn":
        return context
    original = fields.integer("rope.scaling.original_context_length", context)
    scaled = original * fields.number("rope.scaling.factor", 1.0)
    return min(max(context, int(scaled)), MAX_INTEGER)


def _layer_kinds(
    fields: Fields, family: Family, sizes: Sizes, table: TensorTable, notes: list[str]
) -> list[LayerKind]:
    style = "interleaved" if family is LLAMA else "half"
    rotary_dim = fields.integer("rope.dimension_count", sizes.head_dim, maximum=sizes.head_dim)
    if not fields.has("rope.freq_base"):
        notes.append(f"{fields.prefix}rope.freq_base is missing: {family.default_theta:g} is used")
    theta = fields.number("rope.freq_base", family.default_theta, minimum=1, above=True)
    rope = rope_from_gguf(
        fields,
        style=style,
        theta=theta,
        rotary_dim=rotary_dim,
        max_context=fields.integer("context_length"),
        divisors=_divisors(table),
    )
    everything = LayerKind(rope)
    if family is GEMMA3:
        # Only the layers without a window are scaled; the others keep their own theta.
        theta = fields.number("rope.freq_base_swa", family.local_theta, minimum=1, above=True)
        local_rope = rope_from_gguf(
            Fields({}, fields.source),
            style=style,
            theta=theta,
            rotary_dim=rotary_dim,
            max_context=sizes.max_context,
        )
        local = LayerKind(local_rope, fields.integer("attention.sliding_window"))
        pattern = fields.integer("attention.sliding_window_pattern", family.local_pattern)
        is_local = local_layers(pattern, sizes.num_layers)
        return [local if flag else everything for flag in is_local]
    if family is LLAMA and fields.has("attention.sliding_window"):
        # Only Mistral's files have the key, and there it is meant for every layer.
        everything = LayerKind(rope, fields.integer("attention.sliding_window"))
    elif fields.has("attention.sliding_window"):
        notes.append(f"{fields.prefix}attention.sliding_window has no effect")
    return [everything] * sizes.num_layers


def _divisors(table: TensorTable) -> tuple[float, ...]:
    tensor = table.tensors.get(_FREQUENCIES)
    if tensor is None or tensor.kind not in BLOCK_OF_KIND or tensor.data.size > 8 * MAX_HEAD_DIM:
        return ()
    return tuple(dequantize(tensor).ravel().tolist())


def _check_vocabulary(metadata: dict[str, Any], vocab_size: int, source: str) -> None:
    """The embedding may be padded, but every token needs a row."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise ModelError(
            f"{source}: tokenizer.ggml.tokens has {len(tokens)} tokens, but tensor {_EMBED!r} "
            f"only {vocab_size} rows"
        )
