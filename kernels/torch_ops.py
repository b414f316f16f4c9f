"""Torch operations of a decoder over a paged KV arena, on CPU.

Shape letters: M tokens of a step, R rows that attend together, H KV heads, G query heads per KV
head, D head size, T tokens attended to, B tokens per block, N blocks of the arena, L layers.

Arena layout, block-major: N blocks of [L][H][K: D x B, then V: B x D]. K lies with its tokens
side by side, so that a query times a block is a plain matrix product.

Query heads of a group are folded into the rows of one product; that is 5 to 17 times faster
than repeating KV heads (measured at contexts of 512 to 4096).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerPages(NamedTuple):
    """One layer's share of an arena, in three views of the same memory.

    `heads` [N, H, 2, D * B] is K and V of a block side by side; `k_slots` and `v_slots`,
    [N, B, H, D], are addressed by token.
    """

    heads: Tensor
    k_slots: Tensor
    v_slots: Tensor


def arena_pages(
    arena: Tensor, *, num_layers: int, num_kv_heads: int, head_dim: int, block_tokens: int
) -> list[LayerPages]:
    """Views of a flat arena, layer by layer."""
    parts = arena.view(-1, num_layers, num_kv_heads, 2, head_dim * block_tokens)
    pages = []
    for heads in parts.unbind(1):
        k, v = heads.unbind(2)
        k = k.view(-1, num_kv_heads, head_dim, block_tokens).permute(0, 3, 1, 2)
        v = v.view(-1, num_kv_heads, block_tokens, head_dim).permute(0, 2, 1, 3)
        pages.append(LayerPages(heads, k, v))
    return pages


def store_kv(pages: LayerPages, slots: tuple[Tensor, Tensor], kv: Tensor) -> None:
    """Write K and V of M tokens, kv: [M, 2, H, D], to slots (block [M], offset [M])."""
    k, v = kv.to(pages.heads.dtype).unbind(1)
    pages.k_slots.index_put_(slots, k)
    pages.v_slots.index_put_(slots, v)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    `eps` is a tensor of one element, made once: building it costs more than the operation.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


def rope_angles(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Tensor:
    """cos + i sin, [M, 1, rotary_dim / 2] complex64, for positions [M]."""
    angles = torch.outer(positions.float(), inv_freq).unsqueeze_(1)
    return torch.polar(torch.full_like(angles, attention_factor), angles)


def rotate(x: Tensor, angles: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotary embedding of x: [M, heads, D] float32, in place; dims after rotary_dim stay.

    Pairs are (2i, 2i + 1) if interleaved, else (i, i + rotary_dim / 2) (Su et al., RoFormer,
    2021, and GPT-NeoX).
    """
    half = angles.shape[-1]
    rotary = x[..., : 2 * half]
    if is_interleaved:
        torch.view_as_complex(rotary.view(*x.shape[:-1], half, 2)).mul_(angles)
        return x
    cos, sin = angles.real, angles.imag
    a, b = rotary.tensor_split(2, -1)
    rotated_a = (a * cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(rotated_a)
    return x


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up for gate_up: [M, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, -1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return act.mul_(up)


def decode_attention(
    q: Tensor,
    pages: LayerPages,
    table: Tensor,
    *,
    scale: float,
    span: slice | None = None,
    hidden: Tensor | None = None,
    unwritten: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One query per row over its pages; returns [R, heads, D] float32.

    q: [R, heads, D] float32; table: [R, blocks], int64. A single row gives `span`, the part of
    its gathered tokens that it sees. Several rows give `hidden`, [R, 1, 1, T] bool, true for
    what a row must not see, and `unwritten`, (row, token) indices of slots that hold no token:
    what lies there may be NaN, which a zero probability would not remove.
    """
    rows, blocks = table.shape
    block_tokens, num_kv_heads, head_dim = pages.k_slots.shape[1:]
    tokens = blocks * block_tokens
    gathered = pages.heads.index_select(0, table.flatten())
    gathered = gathered.view(rows, blocks, num_kv_heads, 2, -1)
    k = torch.empty(rows, num_kv_heads, head_dim, blocks, block_tokens)
    v = torch.empty(rows, num_kv_heads, blocks, block_tokens * head_dim)
    k.copy_(gathered[..., 0, :].view(rows, blocks, *k.shape[1:3], -1).permute(0, 2, 3, 1, 4))
    v.copy_(gathered[..., 1, :].transpose(1, 2))
    k = k.view(rows * num_kv_heads, head_dim, tokens)
    v = v.view(rows * num_kv_heads, tokens, head_dim)
    if unwritten is not None:
        v.view(rows, num_kv_heads, tokens, head_dim).transpose(1, 2).index_put_(
            unwritten, v.new_zeros(())
        )
    if span is not None:
        k, v = k[..., span], v[:, span]
    folded = q.reshape(rows * num_kv_heads, -1, head_dim)
    scores = torch.bmm(folded * scale, k)
    if hidden is not None:
        scores.view(rows, num_kv_heads, -1, tokens).masked_fill_(hidden, float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def prefill_attention(
    q: Tensor,
    pages: LayerPages,
    table: Tensor,
    *,
    scale: float,
    span: slice,
    mask: Tensor | None,
) -> Tensor:
    """Many queries of one row over its pages; returns [tokens, heads, D] in q's dtype.

    q: [tokens, heads, D]; table: [blocks]; `span` is the part of the gathered tokens that any
    query sees. `mask`: [tokens, T] in q's dtype, added to scores; None is plain causal order,
    possible if the span begins at the first query.
    """
    block_tokens, num_kv_heads, head_dim = pages.k_slots.shape[1:]
    blocks = table.shape[0]
    gathered = pages.heads.index_select(0, table)
    k = q.new_empty(num_kv_heads, blocks, block_tokens, head_dim)
    v = q.new_empty(num_kv_heads, blocks, block_tokens * head_dim)
    k.copy_(gathered[:, :, 0].view(blocks, num_kv_heads, head_dim, -1).permute(1, 0, 3, 2))
    v.copy_(gathered[:, :, 1].transpose(0, 1))
    k, v = k.view(num_kv_heads, -1, head_dim), v.view(num_kv_heads, -1, head_dim)
    # [H, G, tokens, D] against [H, 1, T, D]: a KV head is read, not copied, by its group.
    grouped = q.reshape(q.shape[0], num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, grouped.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(
        grouped,
        k[:, None, span].expand(shape),
        v[:, None, span].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """The plain reference: q [n, heads, D] are the last n of T tokens, k and v [T, H, D]."""
    num_tokens, group = k.shape[0], q.shape[1] // k.shape[1]
    q_positions = torch.arange(num_tokens - q.shape[0], num_tokens)[:, None]
    k_positions = torch.arange(num_tokens)[None]
    hidden = k_positions > q_positions
    if window is not None:
        hidden |= k_positions <= q_positions - window
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
