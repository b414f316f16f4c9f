"""`ModelSpec` from a Hugging Face `config.json`, in the spellings of transformers 4 and 5.

Defaults for keys that a config lacks are those of transformers' configuration classes. Code that
a model brings along (`auto_map`) is never executed.
"""

from typing import Any

import numpy as np

from llmrt.models.canonical import SpecReading, check_spec, file_names
from llmrt.models.families import (
    GEMMA3,
    LLAMA,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MISTRAL,
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
from llmrt.models.rope import rope_from_config
from llmrt.models.tensor_table import TensorTable
from llmrt.wire.errors import ModelError

FAMILY_OF_MODEL_TYPE = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3,
}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# Inside a vision model's config, what equals the default of `Gemma3TextConfig` is left out.
_GEMMA3_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}

# Where the text model lies in a checkpoint: alone, saved without its head, or as a part of a
# vision model in the layouts of transformers 4 and 5.
_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")

_LEAVES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_POST_NORM_LEAVES = _LEAVES | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def read_hf_spec(config: dict[str, Any], table: TensorTable) -> SpecReading:
    """The spec, and the file's tensor names; raises `ModelError` naming the field at fault."""
    source = str(table.source / "config.json")
    top = Fields(config, source)
    notes: list[str] = []
    family = _family(top, notes)
    fields = top
    if top.text("model_type") == "gemma3":
        text = top.section("text_config")
        fields = Fields({**_GEMMA3_TEXT_DEFAULTS, **text.values}, text.source)
    unsupported = ("quantization_config", "attn_logit_softcapping", "final_logit_softcapping")
    refuse(top, unsupported[:1], family.architecture)
    refuse(fields, (*unsupported, "use_bidirectional_attention"), family.architecture)
    _check_activation(fields, family)

    sizes = _sizes(fields, family)
    kinds = _layer_kinds(fields, family, sizes)
    prefix = _prefix(table)
    head_prefix = "language_model." if prefix == "language_model.model." else ""
    names = {
        "embed": f"{prefix}embed_tokens.weight",
        "final_norm": f"{prefix}norm.weight",
        "head": f"{head_prefix}lm_head.weight",
    }
    scalar = fields.number("query_pre_attn_scalar", 256.0, above=True)
    spec = build_spec(
        family,
        sizes,
        kinds,
        scale=(scalar if family is GEMMA3 else sizes.head_dim) ** -0.5,
        is_tied=_is_tied(top, fields, table, names, notes),
        has_qkv_bias=family.has_qkv_bias or fields.flag("attention_bias", False),
        norm_plus_one=family is GEMMA3,
    )
    check_spec(spec, source)
    layer_prefix = f"{prefix}layers."
    leaves = _POST_NORM_LEAVES if family.has_post_norms else _LEAVES
    canonical = file_names(spec, top=names, layer_prefix=layer_prefix, leaves=leaves)
    return SpecReading(spec, canonical, layer_prefix, tuple(notes))


def _family(top: Fields, notes: list[str]) -> Family:
    model_type = top.text("model_type")
    family = FAMILY_OF_MODEL_TYPE.get(model_type)
    brings_code = "it brings code of its own (auto_map), which is never executed"
    if family is None:
        why = f"; {brings_code}" if top.has("auto_map") else ""
        raise ModelError(
            f"{top.source}: model_type {short(model_type)} is not built in{why}. "
            f"Built in are {', '.join(FAMILY_OF_MODEL_TYPE)}"
        )
    if top.has("auto_map"):
        notes.append(f"{brings_code}: the built-in architecture {family.architecture} is used")
    architectures = top.get("architectures") or ["ForCausalLM"]
    heads = ("ForCausalLM", "ForConditionalGeneration")
    if not isinstance(architectures, list) or not any(
        str(a).endswith(heads) for a in architectures
    ):
        raise top.error("architectures", "a model for text generation", architectures)
    if model_type == "gemma3":
        notes.append("only the text part of this vision model is served")
    return family


def _check_activation(fields: Fields, family: Family) -> None:
    default = "silu" if family.activation == "silu" else "gelu_pytorch_tanh"
    key = "hidden_activation" if family is GEMMA3 else "hidden_act"
    if _ACTIVATIONS.get(fields.text(key, default)) != family.activation:
        raise fields.error(key, default, fields.get(key))


def _sizes(fields: Fields, family: Family) -> Sizes:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    # Configs older than grouped queries have no KV heads.
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family is LLAMA else None)
    default = {"qwen3": 128, "gemma3": 256}.get(family.architecture)
    if default is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of the {num_heads} heads", hidden_size)
    return Sizes(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer(
            "head_dim", default or hidden_size // num_heads, maximum=MAX_HEAD_DIM
        ),
        max_context=_max_context(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )


def _max_context(fields: Fields) -> int:
    """With YaRN, configs give the context before scaling, or after it: take the larger."""
    context = fields.integer("max_position_embeddings")
    scaling = _scaling(fields, _FULL)
    if scaling.text("rope_type", scaling.text("type", "default")) != "yarn":
        return context
    original = scaling.integer("original_max_position_embeddings", context)
    scaled = original * scaling.number("factor", 1.0, minimum=1)
    return min(max(context, int(scaled)), MAX_INTEGER)


def _scaling(fields: Fields, layer_type: str) -> Fields:
    """The rope object of a layer type, from the newest spelling that the config has."""
    parameters = fields.section("rope_parameters")
    if parameters.has(_FULL) or parameters.has(_SLIDING):
        return parameters.section(layer_type)
    if parameters.values:
        return parameters
    return fields.section("rope_scaling")


def _layer_kinds(fields: Fields, family: Family, sizes: Sizes) -> list[LayerKind]:
    window, is_local = _windows(fields, family, sizes.num_layers)
    context = fields.integer("max_position_embeddings")
    theta = fields.number("rope_theta", family.default_theta, minimum=1, above=True)
    rope = rope_from_config(
        _scaling(fields, _FULL), theta=theta, rotary_dim=sizes.head_dim, max_context=context
    )
    local_rope = rope
    if family is GEMMA3:
        # In the old spelling, `rope_scaling` is for the layers without a window.
        nested = fields.section("rope_parameters").section(_SLIDING)
        theta = fields.number("rope_local_base_freq", family.local_theta, minimum=1, above=True)
        local_rope = rope_from_config(
            nested, theta=theta, rotary_dim=sizes.head_dim, max_context=context
        )
    local, everything = LayerKind(local_rope, window), LayerKind(rope)
    return [local if flag else everything for flag in is_local]


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, list[bool]]:
    """The window, and for each layer whether it has it."""
    has_window = family is not LLAMA and (
        family not in (QWEN2, QWEN3) or fields.flag("use_sliding_window", False)
    )
    # null means no window; a config without the key means the default.
    if not has_window or fields.values.get("sliding_window", 0) is None:
        return None, [False] * num_layers
    window = fields.integer("sliding_window", 4096)
    layer_types = fields.get("layer_types")
    if layer_types is not None and family is not MISTRAL:
        known = isinstance(layer_types, list) and {_SLIDING, _FULL}.issuperset(
            kind if isinstance(kind, str) else "" for kind in layer_types
        )
        if not known or len(layer_types) != num_layers:
            wanted = f"{num_layers} times {_SLIDING} or {_FULL}"
            raise fields.error("layer_types", wanted, layer_types)
        return window, [kind == _SLIDING for kind in layer_types]
    if family is MISTRAL:
        return window, [True] * num_layers
    if family is GEMMA3:
        pattern = fields.integer("sliding_window_pattern", family.local_pattern)
        return window, local_layers(pattern, num_layers)
    first = fields.integer("max_window_layers", 28, minimum=0)
    return window, [i >= first for i in range(num_layers)]


def _prefix(table: TensorTable) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in table.tensors:
            return prefix
    raise ModelError(f"{table.source}: tensor 'model.embed_tokens.weight' is missing (embed)")


def _is_tied(
    top: Fields, fields: Fields, table: TensorTable, names: dict[str, str], notes: list[str]
) -> bool:
    """Whether the head is the embedding. A config without the key leaves it to the tensors."""
    head = table.tensors.get(names["head"])
    key = "tie_word_embeddings"
    is_tied = top.flag(key, fields.flag(key, head is None))
    if not is_tied or head is None:
        return is_tied
    embed = table.tensors[names["embed"]]
    if embed.kind == head.kind and np.array_equal(embed.data, head.data):
        return True
    # transformers 5 does the same; older versions drop the head.
    notes.append(
        f"{names['head']} differs from the embedding: used, although config.json ties them"
    )
    return False
