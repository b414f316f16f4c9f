"""A decoder in torch, described by a `ModelSpec`: weights made ready, layers run over a step.

The residual stream, norms and rotary embeddings are float32 in every mode; only the products
with weights take the type that the mode and the CPU call for.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from llmrt.kernels.torch_linear import (
    DenseLinear,
    HalfLinear,
    Int4Linear,
    Linear,
    compute_dtype,
    reads_half,
)
from llmrt.kernels.torch_ops import Angles, gated, rms_norm, rope_angles, rotate
from llmrt.models.quants import INT4_KINDS, dequantize, to_int4_groups
from llmrt.models.spec import LayerSpec
from llmrt.models.tensors import StoredTensor, WeightFile

# Unpacking is single-threaded work on memory that fits no cache: two halve the time, and each holds
# one product's float32 weights.
LOADER_THREADS = 2

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [M, heads, D], kv [M, 2, kv_heads, D]) -> [M, heads, D]: stores kv and attends."""

Progress = Callable[[int, int], None]
"""(bytes of the file that are done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a layer; q, k and v are one product, gate and up another."""

    spec: LayerSpec
    rope_idx: int
    attn_norm: Tensor
    qkv: Linear
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Linear
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None


class TorchDecoder:
    """`has_int4` tells whether any weight is multiplied in its 4-bit form."""

    def __init__(self, weights: WeightFile, dtype: str, progress: Progress | None) -> None:
        """Converts every tensor, one product at a time. `dtype`: auto, bf16 or f32."""
        spec = weights.spec
        loader = _Loader(weights, dtype, progress)
        ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        self._spec = spec
        self._eps = torch.tensor([spec.norm_eps])
        self._ropes = [(rope, torch.tensor(rope.inv_freq)) for rope in ropes]
        rope_idxs = [ropes.index(layer.attention.rope) for layer in spec.layers]
        prefixes = [f"layers.{idx}." for idx in range(spec.num_layers)]
        with ThreadPoolExecutor(LOADER_THREADS, thread_name_prefix="weights") as pool:
            embed = pool.submit(loader.embedding)
            load = partial(_load_layer, loader)
            self._layers = list(pool.map(load, prefixes, spec.layers, rope_idxs))
        self._final_norm = loader.norm("final_norm")
        self._embed = embed.result()
        self._head = loader.head(self._embed if spec.is_tied else None)
        self.has_int4 = loader.has_int4

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last layer, [M, hidden], for tokens at positions [M]."""
        x = torch.nn.functional.embedding(token_ids, self._embed).float()
        if self._spec.embed_scale != 1.0:
            x *= self._spec.embed_scale
        angles = [
            rope_angles(
                positions,
                inv_freq,
                rope.attention_factor,
                is_interleaved=rope.style == "interleaved",
            )
            for rope, inv_freq in self._ropes
        ]
        for idx, layer in enumerate(self._layers):
            x += self._attention(idx, layer, x, angles[layer.rope_idx], attend)
            x += self._mlp(layer, x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits, float32 [rows, vocab], of rows of the residual stream."""
        return self._head(rms_norm(x, self._final_norm, self._eps)).float()

    def _attention(
        self, idx: int, layer: _Layer, x: Tensor, angles: Angles, attend: Attend
    ) -> Tensor:
        spec = layer.spec.attention
        qkv = layer.qkv(rms_norm(x, layer.attn_norm, self._eps)).float()
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(x.shape[0], -1, spec.head_dim)
        qk = heads[:, : spec.num_heads + spec.num_kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(rms_norm(qk, layer.qk_norm, self._eps))
        rotate(qk, angles)
        q = heads[:, : spec.num_heads]
        kv = heads[:, spec.num_heads :].view(x.shape[0], 2, spec.num_kv_heads, spec.head_dim)
        y = layer.o(attend(idx, q, kv).flatten(1))
        if layer.post_attn_norm is not None:
            y = rms_norm(y.float(), layer.post_attn_norm, self._eps)
        return y

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, self._eps))
        y = layer.down(gated(gate_up, layer.spec.mlp.activation))
        if layer.post_mlp_norm is not None:
            y = rms_norm(y.float(), layer.post_mlp_norm, self._eps)
        return y


class _Loader:
    """Takes tensors by name, converts them and reports progress in bytes of the file.

    Several threads may call it at once.
    """

    def __init__(self, weights: WeightFile, dtype: str, progress: Progress | None) -> None:
        self._tensors = weights.tensors
        self._norm_plus_one = weights.spec.norm_plus_one
        self._dtype = dtype
        self._progress = progress
        self._done: set[str] = set()
        self._has_half = dtype == "auto" and reads_half()
        self._lock = Lock()
        self._total_bytes = sum(tensor.data.size for tensor in self._tensors.values())
        self._done_bytes = 0
        self.has_int4 = False

    def tensor(self, *names: str) -> Tensor:
        """The tensors one below the other, float32."""
        whole = torch.from_numpy(np.concatenate([dequantize(self._tensors[n]) for n in names]))
        self._report(names)
        return whole

    def embedding(self) -> Tensor:
        """[vocab, hidden], in float16 where a product may share it; see `head`."""
        dtype = torch.float16 if self._has_half else torch.bfloat16
        return self.tensor("embed").to(torch.float32 if self._dtype == "f32" else dtype)

    def head(self, tied: Tensor | None) -> Linear:
        """The last product, the largest there is; `tied`: the embedding, if that is its weight."""
        name = "head" if tied is None else "embed"
        if not self._has_half or self._is_int4([self._tensors[name]]):
            return self.linear(name)
        return HalfLinear(self.tensor(name).half() if tied is None else tied)

    def norm(self, name: str) -> Tensor:
        weight = self.tensor(name)
        return weight.add_(1.0) if self._norm_plus_one else weight

    def linear(self, *names: str) -> Linear:
        """One product for weights that share their input, 4-bit if all of them are."""
        stored = [self._tensors[name] for name in names]
        if not self._is_int4(stored):
            return DenseLinear(self.tensor(*names).to(compute_dtype(self._dtype)))
        parts = [to_int4_groups(tensor) for tensor in stored]
        q, scale, zero = (np.concatenate(part) for part in zip(*parts, strict=True))
        self._report(names)
        self.has_int4 = True
        return Int4Linear(q, scale, zero)

    def _is_int4(self, stored: list[StoredTensor]) -> bool:
        has_kind = all(tensor.kind in INT4_KINDS for tensor in stored)
        num_rows = sum(tensor.shape[0] for tensor in stored)
        return self._dtype == "auto" and has_kind and Int4Linear.fits(num_rows)

    def _report(self, names: tuple[str, ...]) -> None:
        with self._lock:
            new = set(names) - self._done
            self._done |= new
            self._done_bytes += sum(self._tensors[name].data.size for name in new)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _load_layer(loader: _Loader, prefix: str, spec: LayerSpec, rope_idx: int) -> _Layer:
    def name(*parts: str) -> tuple[str, ...]:
        return tuple(prefix + part for part in parts)

    attention = spec.attention
    qk_norm = None
    if attention.has_qk_norm:
        q_norm, k_norm = (loader.norm(prefix + part) for part in ("q_norm", "k_norm"))
        heads = (attention.num_heads, 1), (attention.num_kv_heads, 1)
        qk_norm = torch.cat([q_norm.repeat(heads[0]), k_norm.repeat(heads[1])])
    return _Layer(
        spec=spec,
        rope_idx=rope_idx,
        attn_norm=loader.norm(prefix + "attn_norm"),
        qkv=loader.linear(*name("q", "k", "v")),
        qkv_bias=(
            loader.tensor(*name("q_bias", "k_bias", "v_bias")) if attention.has_qkv_bias else None
        ),
        qk_norm=qk_norm,
        o=loader.linear(*name("o")),
        post_attn_norm=loader.norm(prefix + "post_attn_norm") if spec.has_post_norms else None,
        mlp_norm=loader.norm(prefix + "mlp_norm"),
        gate_up=loader.linear(*name("gate", "up")),
        down=loader.linear(*name("down")),
        post_mlp_norm=loader.norm(prefix + "post_mlp_norm") if spec.has_post_norms else None,
    )
