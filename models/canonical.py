"""From a file's tensors to those that a `ModelSpec` calls for, by canonical name, all checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmrt.models.fields import short
from llmrt.models.quants import BLOCK_OF_KIND
from llmrt.models.spec import AttentionSpec, LayerSpec, ModelSpec
from llmrt.models.tensor_table import TensorTable
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

ROPE_STYLES = ("half", "interleaved")
ACTIVATIONS = ("silu", "gelu_tanh")

# Tensors of a layer that no `ModelSpec` can express: leaving one out would change the text.
_MATTERS = re.compile(r"(\d+)\..*(bias|norm|sinks|exps|experts|lora|scales|qzeros)")


@dataclass(frozen=True, slots=True)
class SpecReading:
    """What a reader of a format found.

    `names` gives the file's name of each canonical tensor, `layer_prefix` what the names of all
    tensors of a layer begin with, before its index. `notes` are facts that the user should
    know: defaults that were taken, parts of the file that are not used.
    """

    spec: ModelSpec
    names: Mapping[str, str]
    layer_prefix: str
    notes: tuple[str, ...] = ()


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by canonical name, as `[rows, columns]` or `[length]`."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    for i, layer in enumerate(spec.layers):
        for leaf, shape in _layer_shapes(layer, hidden).items():
            shapes[f"layers.{i}.{leaf}"] = shape
    shapes["final_norm"] = (hidden,)
    if not spec.is_tied:
        shapes["head"] = (spec.vocab_size, hidden)
    return shapes


def file_names(
    spec: ModelSpec, *, top: Mapping[str, str], layer_prefix: str, leaves: Mapping[str, str]
) -> dict[str, str]:
    """The file's name of each canonical tensor: from `top`, or prefix, layer and `leaves`."""
    names = {}
    for name in tensor_shapes(spec):
        _, _, rest = name.partition("layers.")
        index, _, leaf = rest.partition(".")
        names[name] = f"{layer_prefix}{index}.{leaves[leaf]}" if rest else top[name]
    return names


def check_spec(spec: ModelSpec, source: str) -> None:
    """Raise `ModelError` unless every part of llmrt can rely on `spec`."""
    if not spec.layers:
        raise ModelError(f"{source}: the model has no layers")
    first = spec.attention
    for i, layer in enumerate(spec.layers):
        fault = _fault(layer.attention, first)
        if layer.mlp.activation not in ACTIVATIONS:
            fault = f"activation {layer.mlp.activation!r} is not one of {', '.join(ACTIVATIONS)}"
        if fault:
            raise ModelError(f"{source}: layer {i}: {fault}")


def bind_tensors(
    reading: SpecReading, table: TensorTable
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors that the spec calls for, and the names of those it does not.

    Raises `ModelError` naming file and tensor if one is missing, has another shape or a type that
    cannot be computed with, or if one is left over that would change the output.
    """
    spec = reading.spec
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        file_name = reading.names[name]
        stored = table.tensors.get(file_name)
        if stored is None:
            raise ModelError(f"{table.source}: tensor {file_name!r} is missing ({name})")
        place = f"{table.file_of[file_name]}: tensor {file_name!r}"
        if stored.shape != shape:
            raise ModelError(
                f"{place} has shape {list(stored.shape)}; the model's sizes ask for {list(shape)}"
            )
        if stored.kind not in BLOCK_OF_KIND:
            raise ModelError(
                f"{place} has type {stored.kind}; known for weights are {', '.join(BLOCK_OF_KIND)}"
            )
        tensors[name] = replace(stored, name=name)
    used = set(reading.names.values())
    ignored = tuple(name for name in table.tensors if name not in used)
    for name in ignored:
        prefix, _, rest = name.partition(reading.layer_prefix)
        match = None if prefix else _MATTERS.match(rest)
        if match and int(match[1]) < spec.num_layers:
            raise ModelError(
                f"{table.file_of[name]}: tensor {short(name)} would change the output, but "
                f"{spec.architecture} as built in has no place for it"
            )
    return tensors, ignored


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    attention, intermediate = layer.attention, layer.mlp.intermediate_size
    q_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if attention.has_qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if attention.has_qk_norm:
        shapes |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    if layer.has_post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    return shapes


def _fault(attention: AttentionSpec, first: AttentionSpec) -> str:
    rope = attention.rope
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    if heads != (first.num_heads, first.num_kv_heads, first.head_dim):
        return f"heads, KV heads and head size {heads} differ from those of layer 0"
    if attention.num_heads % attention.num_kv_heads:
        return f"{heads[0]} heads are no multiple of {heads[1]} KV heads"
    if rope.style not in ROPE_STYLES:
        return f"rope style {rope.style!r} is not one of {', '.join(ROPE_STYLES)}"
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= attention.head_dim:
        return f"{rope.rotary_dim} rotated of {attention.head_dim} dimensions: an even part fits"
    if len(rope.inv_freq) * 2 != rope.rotary_dim:
        return f"{len(rope.inv_freq)} frequencies for {rope.rotary_dim} rotated dimensions"
    return ""
