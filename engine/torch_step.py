"""How the rows of a batch meet the KV arenas: where their KV goes and what they attend to.

Built once per step, used once per layer. Rows are put in an order in which those that attend
together lie side by side: decodes of one arena with similar lengths, then each prefill chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmrt.engine.batch import ArenaId, Row
from llmrt.kernels.torch_ops import LayerPages, decode_attention, prefill_attention, store_kv
from llmrt.models.spec import AttentionSpec
from llmrt.wire.kv import BLOCK_TOKENS

Pages = list[LayerPages]
"""An arena, layer by layer."""

Ints = npt.NDArray[np.int64]


class _Part(Protocol):
    def attend(self, q: Tensor, pages: LayerPages, spec: AttentionSpec) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part, its tokens in the step, and the slots (block, offset) of these."""

    part: _Part
    tokens: slice
    pages: Pages
    slots: tuple[Tensor, Tensor]


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
        self._layers = layers
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

        self._placed: list[_Placed] = []
        for _, members in groupby(range(len(order)), key=lambda i: _part_key(ordered[i], order[i])):
            idxs = list(members)
            part_rows = [ordered[i] for i in idxs]
            first = part_rows[0]
            self._placed.append(
                _Placed(
                    part=(
                        _Decodes(part_rows)
                        if len(first.token_ids) == 1
                        else _PrefillChunk(first, prefill_dtype)
                    ),
                    tokens=slice(int(ends[idxs[0]]) - len(first.token_ids), int(ends[idxs[-1]])),
                    pages=arenas[first.arena],
                    slots=_slots(part_rows, [positions[i] for i in idxs]),
                )
            )

    def attend(self, layer_idx: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [M, 2, kv_heads, D], then attend with q [M, heads, D]."""
        spec = self._layers[layer_idx]
        outputs = []
        for placed in self._placed:
            pages = placed.pages[layer_idx]
            store_kv(pages, placed.slots, kv[placed.tokens])
            outputs.append(placed.part.attend(q[placed.tokens], pages, spec))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Decodes:
    """One token per row, all in one arena."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._reaches: dict[int | None, _Reach] = {}

    def attend(self, q: Tensor, pages: LayerPages, spec: AttentionSpec) -> Tensor:
        reach = self._reaches.get(spec.window)
        if reach is None:
            reach = self._reaches[spec.window] = _decode_reach(self._rows, spec.window)
        return decode_attention(
            q,
            pages,
            reach.table,
            scale=spec.scale,
            span=reach.span,
            hidden=reach.hidden,
            unwritten=reach.unwritten,
        )


class _PrefillChunk:
    """Several tokens of one row."""

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        self._row = row
        self._dtype = dtype
        self._reaches: dict[int | None, tuple[Tensor, slice, Tensor | None]] = {}

    def attend(self, q: Tensor, pages: LayerPages, spec: AttentionSpec) -> Tensor:
        reach = self._reaches.get(spec.window)
        if reach is None:
            reach = _prefill_reach(self._row, spec.window, self._dtype)
            self._reaches[spec.window] = reach
        table, span, mask = reach
        return prefill_attention(
            q.to(self._dtype), pages, table, scale=spec.scale, span=span, mask=mask
        )


@dataclass(frozen=True, slots=True)
class _Reach:
    """What decodes see in layers of one window; see `decode_attention`."""

    table: Tensor
    span: slice | None
    hidden: Tensor | None
    unwritten: tuple[Tensor, Tensor] | None


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


def _slots(rows: list[Row], positions: list[Ints]) -> tuple[Tensor, Tensor]:
    blocks = [
        np.asarray(row.blocks, np.int64)[where // BLOCK_TOKENS]
        for row, where in zip(rows, positions, strict=True)
    ]
    offsets = np.concatenate(positions) % BLOCK_TOKENS
    return torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(offsets)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _decode_reach(rows: list[Row], window: int | None) -> _Reach:
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
    if len(rows) == 1:
        origin, last = first_blocks[0] * BLOCK_TOKENS, rows[0].start
        span = slice(_first_seen(last, window) - origin, last + 1 - origin)
        return _Reach(torch.from_numpy(table), span, None, None)

    position = np.array([[row.start] for row in rows])
    seen_from = np.array([[_first_seen(row.start, window)] for row in rows])
    slot = np.array([first_blocks]).T * BLOCK_TOKENS + np.arange(width * BLOCK_TOKENS)
    is_later = slot > position
    hidden = torch.from_numpy(is_later | (slot < seen_from))[:, None, None]
    # Padding repeats a block of the row itself, so only its last block has unwritten slots.
    in_last = is_later & (slot // BLOCK_TOKENS == position // BLOCK_TOKENS)
    row_idx, token_idx = np.nonzero(in_last)
    unwritten = (torch.from_numpy(row_idx), torch.from_numpy(token_idx))
    return _Reach(torch.from_numpy(table), None, hidden, unwritten)


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
