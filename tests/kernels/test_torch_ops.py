"""Torch operations against their plain references, over block edges, head ratios and windows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from llmrt.kernels.torch_ops import (
    LayerPages,
    arena_pages,
    decode_attention,
    gated,
    prefill_attention,
    reference_attention,
    rms_norm,
    rope_angles,
    rotate,
    store_kv,
)

BLOCK_TOKENS = 32
HEAD_DIM = 16
# Relative to values of size 1: float32 sums in another order; bfloat16 keeps 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def make_pages(dtype: torch.dtype, num_kv_heads: int) -> LayerPages:
    """The second layer of an arena of 12 blocks full of NaN."""
    arena = torch.full((12 * 3 * num_kv_heads * 2 * HEAD_DIM * BLOCK_TOKENS,), float("nan"))
    return arena_pages(
        arena.to(dtype),
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
    )[1]


def make_kv(num_tokens: int, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[num_tokens, 2, num_kv_heads, HEAD_DIM], in values that `dtype` has exactly."""
    return torch.randn(num_tokens, 2, num_kv_heads, HEAD_DIM).to(dtype).float()


def fill(pages: LayerPages, kv: Tensor, blocks: Tensor) -> None:
    positions = torch.arange(len(kv))
    store_kv(pages, (blocks[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS), kv)


@pytest.mark.parametrize("window", [None, 1, 20, 32, 40])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 97])
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_of_one_row_equals_the_reference(
    dtype: torch.dtype, num_heads: int, num_tokens: int, window: int | None
) -> None:
    torch.manual_seed(0)
    pages, kv = make_pages(dtype, 2), make_kv(num_tokens, 2, dtype)
    blocks = torch.tensor([7, 2, 11, 4])[: -(-num_tokens // BLOCK_TOKENS)]
    fill(pages, kv, blocks)
    q = torch.randn(1, num_heads, HEAD_DIM)
    first = 0 if window is None else max(0, num_tokens - window)
    span = slice(first, num_tokens)
    out = decode_attention(q, pages, blocks[None], scale=0.3, span=span)
    expected = reference_attention(q, kv[:, 0], kv[:, 1], scale=0.3, window=window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_decode_attention_of_several_rows_skips_what_is_not_theirs() -> None:
    """Rows of 5 and 40 tokens; the shorter is padded with its own block."""
    torch.manual_seed(0)
    pages, lengths = make_pages(torch.float32, 2), (5, 40)
    table = torch.tensor([[3, 3], [9, 1]])
    texts = [make_kv(length, 2, torch.float32) for length in lengths]
    for kv, blocks in zip(texts, table, strict=True):
        fill(pages, kv, blocks)
    slots = torch.arange(64)
    hidden = slots >= torch.tensor(lengths)[:, None]
    in_last = slots // BLOCK_TOKENS == torch.tensor([[0], [1]])
    row_idx, token_idx = torch.nonzero(hidden & in_last, as_tuple=True)
    q = torch.randn(2, 4, HEAD_DIM)
    # The padding's slots 37 to 63 of row 0 are the unwritten ones of its block again.
    pages.v_slots[3, 5:] = 1e30
    out = decode_attention(
        q,
        pages,
        table,
        scale=0.3,
        hidden=hidden[:, None, None],
        unwritten=(row_idx, token_idx),
    )
    for i, kv in enumerate(texts):
        expected = reference_attention(q[i : i + 1], kv[:, 0], kv[:, 1], scale=0.3)
        torch.testing.assert_close(out[i : i + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("start", "end"), [(0, 33), (0, 97), (31, 64), (33, 97)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_attention_equals_the_reference(
    dtype: torch.dtype, start: int, end: int, window: int | None
) -> None:
    torch.manual_seed(0)
    pages, kv = make_pages(dtype, 2), make_kv(end, 2, dtype)
    blocks = torch.tensor([7, 2, 11, 4])[: -(-end // BLOCK_TOKENS)]
    fill(pages, kv, blocks)
    q = torch.randn(end - start, 6, HEAD_DIM).to(dtype)
    query, key = torch.arange(start, end)[:, None], torch.arange(end)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    is_causal = start == 0 and window is None
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))
    out = prefill_attention(
        q, pages, blocks, scale=0.3, span=slice(0, end), mask=None if is_causal else mask
    )
    expected = reference_attention(q.float(), kv[:, 0], kv[:, 1], scale=0.3, window=window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_arena_pages_are_views_in_the_contracts_order() -> None:
    """Block-major; per block: layer, KV head, K as [dim][token], V as [token][dim]."""
    blocks, layers, heads, dim, tokens = 2, 3, 2, 4, 8
    arena = torch.arange(blocks * layers * heads * 2 * dim * tokens, dtype=torch.float32)
    pages = arena_pages(
        arena, num_layers=layers, num_kv_heads=heads, head_dim=dim, block_tokens=tokens
    )
    page = pages[2]
    head = ((1 * layers + 2) * heads + 1) * 2 * dim * tokens
    assert page.k_slots[1, 5, 1, 3] == head + 3 * tokens + 5
    assert page.v_slots[1, 5, 1, 3] == head + dim * tokens + 5 * dim + 3
    page.v_slots[1, 5, 1, 3] = -1
    assert (arena < 0).sum() == 1


def test_rms_norm_is_its_formula() -> None:
    x, weight = torch.randn(3, 5, 48), torch.randn(48)
    values = x.double().numpy()
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
    got = rms_norm(x, weight, torch.tensor([1e-3]))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 16])
def test_rotate_turns_each_pair_by_its_angle(is_interleaved: bool, rotary_dim: int) -> None:
    inv_freq = torch.rand(rotary_dim // 2)
    positions = torch.tensor([0, 3, 200])
    x = torch.randn(3, 2, 16)
    before = x.clone().numpy()
    got = rotate(x, rope_angles(positions, inv_freq, 1.5), is_interleaved=is_interleaved).numpy()
    for i in range(rotary_dim // 2):
        a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + rotary_dim // 2)
        angle = positions.numpy()[:, None] * inv_freq.numpy()[i]
        turned = 1.5 * (before[..., a] + 1j * before[..., b]) * np.exp(1j * angle)
        np.testing.assert_allclose(got[..., a], turned.real, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got[..., b], turned.imag, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_is_its_formula(activation: str) -> None:
    gate_up = torch.randn(4, 20)
    gate, up = gate_up.double().numpy()[:, :10], gate_up.double().numpy()[:, 10:]
    if activation == "silu":
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        expected = 0.5 * gate * (1 + np.tanh(inner)) * up
    np.testing.assert_allclose(gated(gate_up, activation).numpy(), expected, rtol=1e-4, atol=1e-6)
