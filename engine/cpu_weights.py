"""How the compiled step wants the weights of a model: which are packed together, and as what."""

from collections.abc import Iterator, Mapping

from llmrt.kernels.cpu.library import GROUP, STRIP, Format
from llmrt.models.packing import PackRequest, format_of
from llmrt.models.spec import ModelSpec
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ConfigError

DTYPES = ("auto", "bf16", "f32", "int8")
_ELSE = "run this model with --device torch"


def check_model(spec: ModelSpec) -> None:
    """Raise `ConfigError` if the compiled step has no code for sizes of the model."""
    attention = spec.attention
    columns = {
        "the hidden size": spec.hidden_size,
        "heads * head size": attention.num_heads * attention.head_dim,
    }
    for idx, layer in enumerate(spec.layers):
        columns[f"the intermediate size of layer {idx}"] = layer.mlp.intermediate_size
    for name, size in columns.items():
        if size % GROUP:
            raise ConfigError(
                f"{name} is {size}: the cpu device needs a multiple of {GROUP}; {_ELSE}"
            )
    if attention.head_dim % STRIP:
        raise ConfigError(
            f"the head size is {attention.head_dim}: the cpu device needs a multiple of "
            f"{STRIP}; {_ELSE}"
        )


def weight_requests(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor], dtype: str
) -> list[PackRequest]:
    """The packed weights that a program of the model takes, by the names of their parts.

    `dtype` auto keeps integers and takes bf16 for floats; int8 makes floats integers, too; bf16
    and f32 are for all. Raises `ConfigError` for another one.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: one of {', '.join(DTYPES)} is needed")

    def one(*names: str) -> Format:
        return _common({_format(tensors[name].kind, dtype) for name in names})

    requests = [PackRequest("embed", ("embed",), one("embed"))]
    for prefix in prefixes(spec):
        q, k, v = (prefix + leaf for leaf in ("q", "k", "v"))
        if one(q) == one(k) == one(v):
            requests.append(PackRequest(prefix + "qkv", (q, k, v), one(q)))
        else:
            requests += [PackRequest(name, (name,), one(name)) for name in (q, k, v)]
        gate, up = prefix + "gate", prefix + "up"
        requests += [
            PackRequest(prefix + "o", (prefix + "o",), one(prefix + "o")),
            PackRequest(prefix + "gate_up", (gate, up), one(gate, up), is_interleaved=True),
            PackRequest(prefix + "down", (prefix + "down",), one(prefix + "down")),
        ]
    if not spec.is_tied:
        requests.append(PackRequest("head", ("head",), one("head")))
    return requests


def _format(kind: str, dtype: str) -> Format:
    natural = format_of(kind)
    if dtype == "f32":
        return Format.F32
    if dtype == "bf16":
        return Format.BF16
    if natural < Format.BF16:
        return natural
    return Format.Q8 if dtype == "int8" else Format.BF16


def _common(formats: set[Format]) -> Format:
    """The smallest format that holds all of them: more bits, and a minimum if one has it."""
    if len(formats) == 1:
        return next(iter(formats))
    if max(formats) >= Format.BF16:
        return Format.BF16
    has_minimum = bool(formats & {Format.Q4M, Format.Q8M})
    if max(formats) >= Format.Q8:
        return Format.Q8M if has_minimum else Format.Q8
    return Format.Q4M


def prefixes(spec: ModelSpec) -> Iterator[str]:
    """What the names of a layer's tensors begin with, layer by layer."""
    return (f"layers.{idx}." for idx in range(spec.num_layers))
