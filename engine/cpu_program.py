"""What the compiled step executes for a model: a list of ops over its packed weights.

embed
per layer: qkv, rope, attend, o, gate and up, down; o and down add to the residual stream,
or are stored, normed and then added (post norms)
head
"""

import ctypes
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmrt.engine.cpu_weights import check_model, prefixes, weight_requests
from llmrt.kernels.cpu import library as c
from llmrt.models.loading import OpenedModel
from llmrt.models.packed_file import load_packed
from llmrt.models.packing import PackedWeights, Progress
from llmrt.models.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from llmrt.wire.errors import ConfigError

KV_FORMATS: Mapping[str, c.KvFormat] = {
    "bf16": c.KvFormat.BF16,
    "f32": c.KvFormat.F32,
    "int8": c.KvFormat.INT8,
    "fp8": c.KvFormat.FP8,
}
_EPILOGUES = {"silu": c.Epilogue.SILU, "gelu_tanh": c.Epilogue.GELU_TANH}


class _Buffer(IntEnum):
    """[tokens, width] float32 each. `UNNORMED` is what post norms are applied to."""

    RESIDUAL = 0
    QKV = 1
    ATTENDED = 2
    GATED = 3
    UNNORMED = 4


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise `ConfigError` unless it names a format of the KV cache."""
    if kv_dtype not in KV_FORMATS:
        raise ConfigError(
            f"kv_cache_dtype is {kv_dtype!r}: one of {', '.join(KV_FORMATS)} is needed"
        )


class CpuProgram:
    """Ops over packed weights, at `address`; they live as long as this.

    `formats` names those of the weights, as in `q4m.q8`; `remedy` says what helps if they are
    damaged, or is empty.
    """

    def __init__(
        self, spec: ModelSpec, weights: PackedWeights, *, kv_dtype: str, max_context: int
    ) -> None:
        """Raises `ConfigError` as `check_model` and `check_kv_dtype` do, and for `max_context`."""
        check_model(spec)
        check_kv_dtype(kv_dtype)
        if not 0 < max_context <= spec.max_context:
            raise ConfigError(
                f"max_context is {max_context}: from 1 to the model's {spec.max_context} is needed"
            )
        self.kv_dtype = kv_dtype
        self.max_context = max_context
        self.vocab_size = spec.vocab_size
        self.remedy = _remedy(weights.path)
        formats = {tensor.format for tensor in weights.tensors.values()}
        self.formats = ".".join(format_.name.lower() for format_ in sorted(formats))
        builder = _Builder(spec, weights)
        builder.build()
        widths = np.array(_widths(spec), np.int64)
        attention = spec.attention
        self._struct = c.Program(
            num_ops=len(builder.ops),
            ops=builder.keep((c.Op * len(builder.ops))(*builder.ops)),
            num_buffers=len(widths),
            widths=builder.keep_array(widths),
            num_ropes=len(builder.ropes),
            ropes=builder.keep((c.Rope * len(builder.ropes))(*map(builder.rope, builder.ropes))),
            num_layers=spec.num_layers,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            kv_format=KV_FORMATS[kv_dtype],
            vocab_size=spec.vocab_size,
            max_context=max_context,
        )
        self._kept = builder.kept
        self.address = ctypes.addressof(self._struct)


def load_program(
    model: OpenedModel,
    *,
    dtype: str,
    kv_dtype: str,
    max_context: int,
    progress: Progress | None = None,
) -> tuple[CpuProgram, PackedWeights]:
    """The program of a model over its packed weights, which are packed if nobody did before.

    Raises `ConfigError` as `weight_requests` and `CpuProgram` do, and `ModelError`.
    """
    requests = weight_requests(model.spec, model.tensors, dtype)
    packed = load_packed(model, requests, progress)
    return CpuProgram(model.spec, packed, kv_dtype=kv_dtype, max_context=max_context), packed


def _remedy(packed: Path | None) -> str:
    if packed is None:
        return ""
    return f"the weights are those of {packed}: remove it and start again to pack them anew"


def _widths(spec: ModelSpec) -> list[int]:
    attention = spec.attention
    attended = attention.num_heads * attention.head_dim
    qkv = attended + 2 * attention.num_kv_heads * attention.head_dim
    gated = max(layer.mlp.intermediate_size for layer in spec.layers)
    return [spec.hidden_size, qkv, attended, gated, spec.hidden_size]


class _Builder:
    """Appends to `ops`; what these point to is in `kept`."""

    def __init__(self, spec: ModelSpec, weights: PackedWeights) -> None:
        self.ops: list[c.Op] = []
        self.ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        self.kept: list[object] = [weights]
        self._spec = spec
        self._weights = weights
        self._structs: dict[str, int] = {}

    def keep(self, struct: Any) -> int:
        """The address of a ctypes object that stays."""
        self.kept.append(struct)
        return ctypes.addressof(struct)

    def keep_array(self, array: npt.NDArray[Any]) -> int:
        self.kept.append(array)
        return array.ctypes.data

    def rope(self, rope: RopeSpec) -> c.Rope:
        return c.Rope(
            inv_freq=self.keep_array(np.array(rope.inv_freq, np.float32)),
            rotary_dim=rope.rotary_dim,
            is_interleaved=rope.style == "interleaved",
            factor=rope.attention_factor,
        )

    def build(self) -> None:
        spec = self._spec
        self._add(
            c.OpKind.EMBED,
            out=_Buffer.RESIDUAL,
            weight=self._weight("embed"),
            scale=spec.embed_scale,
        )
        for idx, (prefix, layer) in enumerate(zip(prefixes(spec), spec.layers, strict=True)):
            self._attention(idx, prefix, layer)
            self._mlp(prefix, layer)
        head = "embed" if spec.is_tied else "head"
        self._linear(head, _Buffer.RESIDUAL, c.OUT_LOGITS, norm=self._norm("final_norm"))

    def _attention(self, idx: int, prefix: str, layer: LayerSpec) -> None:
        attention = layer.attention
        self._qkv(prefix, attention)
        q_norm, k_norm = (
            self._norm(prefix + name) if attention.has_qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        place = {"in_": _Buffer.QKV, "layer": idx, "rope": self.ropes.index(attention.rope)}
        self._add(c.OpKind.ROPE, **place, q_norm=q_norm, k_norm=k_norm)
        self._add(
            c.OpKind.ATTEND,
            **place,
            out=_Buffer.ATTENDED,
            scale=attention.scale,
            window=attention.window or 0,
        )
        post_norm = prefix + "post_attn_norm" if layer.has_post_norms else None
        self._add_to_residual(prefix + "o", _Buffer.ATTENDED, post_norm)

    def _qkv(self, prefix: str, attention: AttentionSpec) -> None:
        """One product, or three of weights whose formats differ."""
        norm = self._norm(prefix + "attn_norm")
        names = [prefix + leaf for leaf in ("q", "k", "v")]
        biases = [
            self._weights.vectors[name + "_bias"] if attention.has_qkv_bias else None
            for name in names
        ]
        if prefix + "qkv" in self._weights.tensors:
            present = [bias for bias in biases if bias is not None]
            bias = self.keep_array(np.concatenate(present)) if present else None
            self._linear(prefix + "qkv", _Buffer.RESIDUAL, _Buffer.QKV, norm=norm, bias=bias)
            return
        column, is_prepared_float = 0, None
        for name, bias_values in zip(names, biases, strict=True):
            weight = self._weights.tensors[name]
            is_float = weight.format >= c.Format.BF16
            self._linear(
                name,
                _Buffer.RESIDUAL,
                _Buffer.QKV,
                norm=norm,
                bias=None if bias_values is None else self.keep_array(bias_values),
                out_column=column,
                is_prepared=is_float is is_prepared_float,
            )
            column, is_prepared_float = column + weight.rows, is_float

    def _mlp(self, prefix: str, layer: LayerSpec) -> None:
        self._linear(
            prefix + "gate_up",
            _Buffer.RESIDUAL,
            _Buffer.GATED,
            norm=self._norm(prefix + "mlp_norm"),
            epilogue=_EPILOGUES[layer.mlp.activation],
        )
        post_norm = prefix + "post_mlp_norm" if layer.has_post_norms else None
        self._add_to_residual(prefix + "down", _Buffer.GATED, post_norm)

    def _add_to_residual(self, weight: str, in_: _Buffer, post_norm: str | None) -> None:
        if post_norm is None:
            self._linear(weight, in_, _Buffer.RESIDUAL, epilogue=c.Epilogue.ADD)
            return
        self._linear(weight, in_, _Buffer.UNNORMED)
        self._add(
            c.OpKind.ADD_NORM,
            in_=_Buffer.UNNORMED,
            out=_Buffer.RESIDUAL,
            norm=self._norm(post_norm),
        )

    def _linear(self, weight: str, in_: int, out: int, **fields: object) -> None:
        self._add(c.OpKind.LINEAR, in_=in_, out=out, weight=self._weight(weight), **fields)

    def _add(self, kind: c.OpKind, **fields: Any) -> None:
        self.ops.append(c.Op(kind=kind, eps=self._spec.norm_eps, **fields))

    def _norm(self, name: str) -> int:
        weight = self._weights.vectors[name]
        # In float32, as the reference does it.
        return self.keep_array(weight + np.float32(1) if self._spec.norm_plus_one else weight)

    def _weight(self, name: str) -> int:
        """The address of a packed weight, of which there is one for all ops that use it."""
        if name not in self._structs:
            packed = self._weights.tensors[name]
            self._structs[name] = self.keep(
                c.Weight(packed.rows, packed.columns, packed.format, packed.data.ctypes.data)
            )
        return self._structs[name]
