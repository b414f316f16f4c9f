"""Attention against its plain reference, over block edges, head ratios, windows and layers."""

import pytest
import torch
from torch import Tensor

from llmrt.kernels.torch_attention import (
    DecodeKv,
    Pages,
    Reach,
    arena_pages,
    prefill_attention,
    reference_attention,
    store_kv,
)

BLOCK_TOKENS = 32
HEAD_DIM = 16
# Relative to values of size 1: float32 sums in another order; bfloat16 keeps 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def make_pages(dtype: torch.dtype, num_kv_heads: int) -> Pages:
    """The second layer of an arena of 12 blocks full of NaN."""
    arena = torch.full((12 * 3 * num_kv_heads * 2 * HEAD_DIM * BLOCK_TOKENS,), float("nan"))
    return arena_pages(
        arena.to(dtype),
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
    ).of(range(1, 2))


def make_kv(num_tokens: int, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[num_tokens, 2, num_kv_heads, HEAD_DIM], in values that `dtype` has exactly."""
    return torch.randn(num_tokens, 2, num_kv_heads, HEAD_DIM).to(dtype).float()


def slots_of(blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS


def fill(pages: Pages, kv: Tensor, blocks: Tensor) -> None:
    store_kv(pages, slots_of(blocks, torch.arange(len(kv))), kv.unsqueeze(2))


@pytest.mark.parametrize("window", [None, 1, 20, 32, 40])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 97])
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_of_one_row_equals_the_reference(
    dtype: torch.dtype, num_heads: int, num_tokens: int, window: int | None
) -> None:
    """The last token is not in the arena before, and is afterwards."""
    torch.manual_seed(0)
    pages, kv = make_pages(dtype, 2), make_kv(num_tokens, 2, dtype)
    blocks, last = torch.tensor([7, 2, 11, 4])[: -(-num_tokens // BLOCK_TOKENS)], num_tokens - 1
    fill(pages, kv[:last], blocks)
    q = torch.randn(1, num_heads, HEAD_DIM)
    first = 0 if window is None else max(0, num_tokens - window)
    reach = Reach(blocks[None], torch.tensor([last]), span=slice(first, num_tokens))
    slots = slots_of(blocks, torch.tensor([last]))
    out = DecodeKv(pages, reach, slots).attend(0, q, kv[last:], 0.3)
    expected = reference_attention(q, kv[:, 0], kv[:, 1], scale=0.3, window=window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    stored = pages.k_slots[*slots, 0], pages.v_slots[*slots, 0]
    torch.testing.assert_close(torch.stack(stored, 1).float(), kv[last:], atol=0, rtol=0)


def test_decodes_of_several_rows_and_layers_skip_what_is_not_theirs() -> None:
    """Rows of 5 and 40 tokens; the shorter is padded with its own block."""
    torch.manual_seed(0)
    arena = torch.full((12 * 3 * 2 * 2 * HEAD_DIM * BLOCK_TOKENS,), float("nan"))
    pages = arena_pages(
        arena, num_layers=3, num_kv_heads=2, head_dim=HEAD_DIM, block_tokens=BLOCK_TOKENS
    )
    lengths, layers = torch.tensor([5, 40]), range(1, 3)
    table = torch.tensor([[3, 3], [9, 1]])
    texts = [[make_kv(length, 2, torch.float32) for length in lengths.tolist()] for _ in layers]
    for layer, rows in zip(layers, texts, strict=True):
        for kv, blocks in zip(rows, table, strict=True):
            fill(pages.of(range(layer, layer + 1)), kv[:-1], blocks)
    hidden = torch.arange(64) >= lengths[:, None]
    row_idx, token_idx = torch.nonzero(hidden, as_tuple=True)
    reach = Reach(table, lengths - 1, hidden=hidden[:, None, None], unwritten=(row_idx, token_idx))
    slots = (torch.tensor([3, 1]), (lengths - 1) % BLOCK_TOKENS)
    decodes = DecodeKv(pages.of(layers), reach, slots)
    for idx, rows in enumerate(texts):
        q = torch.randn(2, 4, HEAD_DIM)
        out = decodes.attend(idx, q, torch.stack([kv[-1] for kv in rows]), 0.3)
        for i, kv in enumerate(rows):
            expected = reference_attention(q[i : i + 1], kv[:, 0], kv[:, 1], scale=0.3)
            torch.testing.assert_close(out[i : i + 1], expected, atol=1e-5, rtol=1e-5)
    last = [torch.stack([kv[-1] for kv in rows]) for rows in texts]
    torch.testing.assert_close(pages.k_slots[*slots, 1:], torch.stack(last, 1)[:, :, 0])
    assert pages.k_slots[*slots, 0].isnan().all()


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
    head = ((1 * layers + 2) * heads + 1) * 2 * dim * tokens
    assert pages.k_slots[1, 5, 2, 1, 3] == head + 3 * tokens + 5
    assert pages.v_slots[1, 5, 2, 1, 3] == head + dim * tokens + 5 * dim + 3
    pages.v_slots[1, 5, 2, 1, 3] = -1
    assert (arena < 0).sum() == 1
