"""How the rows of a batch meet the KV arenas: where their KV goes and what they attend to.

Built once per step, used once per layer. Rows are put in an order in which those that attend
together lie side by side: decodes of one arena with similar lengths, then each prefill chunk.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmrt.engine.batch import ArenaId, Row
from llmrt.kernels.torch_attention import (
    DecodeKv,
    Pages,
    Reach,
    Slots,
    prefill_attention,
    store_kv,
)
from llmrt.models.spec import AttentionSpec
from llmrt.wire.kv import BLOCK_TOKENS

Ints = npt.NDArray[np.int64]

# Of KV that decodes have at hand as float32: above, it falls out of the caches and costs more than
# the operations that it saves (measured from 64 to 4,096 tokens). A single layer may be more.
_GATHERED_BYTES = 4 << 20


class _Part(Protocol):
    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [M, 2, H, D], then attend with q [M, heads, D], layer after layer."""
        ...


class TorchStep:
    """The tokens of a step and their cache.

    `sampled` are the indices of the last `num_logits` tokens of each row, in the batch's order.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        arenas: Mapping[ArenaId, Pages],
        layers: Sequence[AttentionSpec],
        prefill_dtype: torch.dtype,
    ) -> None:
        order = sorted(range(len(rows)), key=lambda idx: (_part_key(rows[idx], idx), idx))
        ordered = [rows[idx] for idx in order]
        positions = [_positions(row) for row in ordered]
        ends = np.cumsum([len(row.token_ids) for row in ordered])
        self.positions = torch.from_numpy(np.concatenate(positions))
        self.token_ids = torch.from_numpy(
            np.concatenate([np.asarray(row.token_ids, np.int64) for row in ordered])
        )
        end_of = dict(zip(order, ends.tolist(), strict=True))
        sampled = [np.arange(end_of[i] - rows[i].num_logits, end_of[i]) for i in range(len(rows))]
        self.sampled = torch.from_numpy(np.concatenate(sampled))

        self._parts: list[tuple[slice, _Part]] = []
        for _, members in groupby(range(len(order)), key=lambda i: _part_key(ordered[i], order[i])):
            idxs = list(members)
            part_rows = [ordered[i] for i in idxs]
            first = part_rows[0]
            pages, slots = arenas[first.arena], _slots(part_rows, [positions[i] for i in idxs])
            part: _Part = (
                _Decodes(part_rows, pages, slots, layers)
                if len(first.token_ids) == 1
                else _PrefillChunk(first, pages, slots, layers, prefill_dtype)
            )
            begin = int(ends[idxs[0]]) - len(first.token_ids)
            self._parts.append((slice(begin, int(ends[idxs[-1]])), part))

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [M, 2, kv_heads, D], then attend with q [M, heads, D]."""
        outputs = [part.attend(layer, q[tokens], kv[tokens]) for tokens, part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Decodes:
    """One token per row, all in one arena.

    KV is gathered for as many layers of one window as `_GATHERED_BYTES` allow.
    """

    def __init__(
        self, rows: list[Row], pages: Pages, slots: Slots, layers: Sequence[AttentionSpec]
    ) -> None:
        self._rows, self._pages, self._slots, self._layers = rows, pages, slots, layers
        self._reaches: dict[int | None, Reach] = {}
        self._gathered = range(0)
        self._kv: DecodeKv | None = None

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        if layer not in self._gathered or self._kv is None:
            self._kv = self._gather(layer)
        return self._kv.attend(layer - self._gathered.start, q, kv, self._layers[layer].scale)

    def _gather(self, first: int) -> DecodeKv:
        window = self._layers[first].window
        reach = self._reaches.get(window)
        if reach is None:
            reach = self._reaches[window] = _decode_reach(self._rows, window)
        end = min(
            first + DecodeKv.layers_within(_GATHERED_BYTES, self._pages, reach), len(self._layers)
        )
        alike = takewhile(lambda idx: self._layers[idx].window == window, range(first, end))
        self._kv = None  # so that two are never held at once
        self._gathered = range(first, first + sum(1 for _ in alike))
        return DecodeKv(self._pages.of(self._gathered), reach, self._slots)


class _PrefillChunk:
    """Several tokens of one row."""

    def __init__(
        self,
        row: Row,
        pages: Pages,
        slots: Slots,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
    ) -> None:
        self._row, self._pages, self._slots, self._layers = row, pages, slots, layers
        self._dtype = dtype
        self._reaches: dict[int | None, tuple[Tensor, slice, Tensor | None]] = {}

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        spec = self._layers[layer]
        pages = self._pages.of(range(layer, layer + 1))
        store_kv(pages, self._slots, kv.unsqueeze(2))
        reach = self._reaches.get(spec.window)
        if reach is None:
            reach = _prefill_reach(self._row, spec.window, self._dtype)
            self._reaches[spec.window] = reach
        table, span, mask = reach
        return prefill_attention(
            q.to(self._dtype), pages, table, scale=spec.scale, span=span, mask=mask
        )


def _part_key(row: Row, idx: int) -> tuple[bool, str, int]:
    """Rows of equal key attend together.

    Decodes share a key while their numbers of blocks lie within a factor of two, so that at
    most half of what is gathered is padding.
    """
    if len(row.token_ids) > 1:
        return True, row.arena, idx
    return False, row.arena, (row.start // BLOCK_TOKENS).bit_length()


def _positions(row: Row) -> Ints:
    return np.arange(row.start, row.start + len(row.token_ids), dtype=np.int64)


def _slots(rows: list[Row], positions: list[Ints]) -> Slots:
    blocks = [
        np.asarray(row.blocks, np.int64)[where // BLOCK_TOKENS]
        for row, where in zip(rows, positions, strict=True)
    ]
    offsets = np.concatenate(positions) % BLOCK_TOKENS
    return torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(offsets)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _decode_reach(rows: list[Row], window: int | None) -> Reach:
    first_blocks = [_first_seen(row.start, window) // BLOCK_TOKENS for row in rows]
    tables = [
        row.blocks[first : row.start // BLOCK_TOKENS + 1]
        for row, first in zip(rows, first_blocks, strict=True)
    ]
    width = max(map(len, tables))
    table = np.empty((len(rows), width), np.int64)
    for padded, blocks in zip(table, tables, strict=True):
        padded[: len(blocks)] = blocks
        padded[len(blocks) :] = blocks[0]
    position = np.array([[row.start] for row in rows])
    seen_from = np.array([[_first_seen(row.start, window)] for row in rows])
    origin = np.array([first_blocks]).T * BLOCK_TOKENS
    last = torch.from_numpy((position - origin)[:, 0])
    if len(rows) == 1:
        span = slice(int((seen_from - origin)[0, 0]), int(last[0]) + 1)
        return Reach(torch.from_numpy(table), last, span)

    slot = origin + np.arange(width * BLOCK_TOKENS)
    is_later = slot > position
    hidden = torch.from_numpy(is_later | (slot < seen_from))[:, None, None]
    row_idx, token_idx = np.nonzero(is_later)
    unwritten = (torch.from_numpy(row_idx), torch.from_numpy(token_idx))
    return Reach(torch.from_numpy(table), last, hidden=hidden, unwritten=unwritten)


def _prefill_reach(
    row: Row, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, slice, Tensor | None]:
    end = row.start + len(row.token_ids)
    seen_from = _first_seen(row.start, window)
    first_block = seen_from // BLOCK_TOKENS
    blocks = row.blocks[first_block : (end - 1) // BLOCK_TOKENS + 1]
    table = torch.from_numpy(np.asarray(blocks, np.int64))
    origin = first_block * BLOCK_TOKENS
    span = slice(seen_from - origin, end - origin)
    if row.start == 0 and (window is None or end <= window):
        return table, span, None
    query = torch.arange(row.start, end)[:, None]
    key = torch.arange(seen_from, end)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return table, span, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
