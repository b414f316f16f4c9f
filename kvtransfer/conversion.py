"""Blocks of a peer whose block size or KV dtype differs from ours, converted into our blocks.

Everything else in the two contracts must be equal. What is converted is what the peer's step would
read; what is stored is, bit for bit, what our step would have stored of that. So a conversion that
narrows changes numbers once, by at most the stated error, and one that widens changes none but by
the rounding of one product.

A block is, per layer and KV head, K as [head_dim][tokens], V as [tokens][head_dim], and in the
scaled dtypes the float32 scales of K, then of V, [tokens] each.
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from llmrt.kvtransfer.kv_dtypes import (
    KV_DTYPES,
    Elements,
    Floats,
    KvDtype,
    read_values,
    store_values,
)
from llmrt.wire.kv import KvContract, contract_mismatch

# The rounding of q * scale to float32.
_WIDENING_ERROR = 2.0**-24


@dataclass(frozen=True, slots=True)
class Conversion:
    """How blocks of `theirs` become blocks of `ours`.

    `max_error` bounds the change of a number, relative to the largest magnitude of its token, head
    and K or V: 2**-8 into bf16, 1/254 into int8, 1/28 into fp8 (each within 2**-21), 2**-24 from
    int8 or fp8 into f32, 0 from bf16 into f32 and between block sizes. Numbers below 2**-100 may
    become 0.
    """

    ours: KvContract
    theirs: KvContract
    max_error: float

    def __str__(self) -> str:
        return (
            f"{self.theirs.kv_dtype} in blocks of {self.theirs.block_tokens} tokens becomes "
            f"{self.ours.kv_dtype} in blocks of {self.ours.block_tokens}; numbers change by at "
            f"most {self.max_error:.2g} of the largest of their token and head"
        )

    def convert(
        self,
        source: memoryview,
        target: memoryview,
        target_blocks: list[int],
        tokens: range,
        *,
        source_token: int = 0,
    ) -> None:
        """Convert `tokens`, numbered from the start of the prompt, into blocks of our arena.

        `source` holds blocks of theirs end to end, the first one beginning with token
        `source_token`; `target` is our arena, whose block `target_blocks[i]` is block i of the
        prompt. Our blocks are written where `tokens` says and nowhere else. The range begins and
        ends, and `source_token` lies, on a multiple of `grain`: more than a prompt needs at its
        end, where nothing attends to what is behind. Raises `ValueError` otherwise, or if a block
        is missing, before anything is written.
        """
        self._check(source, target, target_blocks, tokens, source_token)
        num_source = len(source) // self.theirs.block_bytes
        num_target = len(target) // self.ours.block_bytes
        theirs = _planes(np.frombuffer(source, np.uint8), num_source, self.theirs)
        ours = _planes(np.frombuffer(target, np.uint8), num_target, self.ours)
        for token in range(tokens.start, tokens.stop, self.grain):
            from_block, from_slot = divmod(token - source_token, self.theirs.block_tokens)
            index, to_slot = divmod(token, self.ours.block_tokens)
            self._copy(
                _slots(theirs, from_block, from_slot, self.grain),
                _slots(ours, target_blocks[index], to_slot, self.grain),
            )

    @property
    def grain(self) -> int:
        """Tokens that lie together in the blocks of both."""
        return min(self.ours.block_tokens, self.theirs.block_tokens)

    def _check(
        self,
        source: memoryview,
        target: memoryview,
        target_blocks: list[int],
        tokens: range,
        source_token: int,
    ) -> None:
        if tokens.step != 1 or any(
            n % self.grain for n in (tokens.start, tokens.stop, source_token)
        ):
            raise ValueError(f"{tokens} from {source_token} on is not in steps of {self.grain}")
        num_bytes = {self.theirs: len(source), self.ours: len(target)}
        for contract, size in num_bytes.items():
            if size % contract.block_bytes:
                raise ValueError(f"{size} bytes are no blocks of {contract.block_bytes} bytes")
        num_tokens = len(source) // self.theirs.block_bytes * self.theirs.block_tokens
        if not source_token <= tokens.start <= tokens.stop <= source_token + num_tokens:
            raise ValueError(f"{tokens} is not in {num_tokens} tokens from {source_token} on")
        if tokens.stop > len(target_blocks) * self.ours.block_tokens:
            raise ValueError(f"{tokens} does not fit into {len(target_blocks)} blocks")
        num_blocks = len(target) // self.ours.block_bytes
        if not all(0 <= block < num_blocks for block in target_blocks):
            raise ValueError(f"a block of {target_blocks} is not in an arena of {num_blocks}")

    def _copy(self, source: "_Planes", target: "_Planes") -> None:
        theirs, ours = KV_DTYPES[self.theirs.kv_dtype], KV_DTYPES[self.ours.kv_dtype]
        if theirs is ours:
            for there, here in zip(source, target, strict=True):
                here[...] = there
            return
        target.k[...], scales = _converted(theirs, ours, source.k, source.k_scales, 1)
        if ours.is_scaled:
            target.k_scales[...] = scales
        target.v[...], scales = _converted(theirs, ours, source.v, source.v_scales, 2)
        if ours.is_scaled:
            target.v_scales[...] = scales


def conversion(ours: KvContract, theirs: KvContract) -> Conversion | None:
    """How to take blocks of `theirs`; None if nothing differs, or if there is no way.

    `contract_mismatch` says which it is, with both values.
    """
    alike = msgspec.structs.replace(theirs, kv_dtype=ours.kv_dtype, block_tokens=ours.block_tokens)
    if contract_mismatch(ours, alike) is not None or contract_mismatch(ours, theirs) is None:
        return None
    sizes = sorted((ours.block_tokens, theirs.block_tokens))
    known = KV_DTYPES.keys()
    if sizes[0] < 1 or sizes[1] % sizes[0] or not {ours.kv_dtype, theirs.kv_dtype} <= known:
        return None
    return Conversion(ours, theirs, _max_error(theirs.kv_dtype, ours.kv_dtype))


def _max_error(source: str, target: str) -> float:
    if source == target:
        return 0.0
    widening = _WIDENING_ERROR if KV_DTYPES[source].is_scaled else 0.0
    # The source may be rounded up by `widening` before it is stored.
    return widening + KV_DTYPES[target].max_error * (1 + widening)


class _Planes(NamedTuple):
    """Views of blocks: `k` [..., heads, head_dim, tokens], `v` [..., heads, tokens, head_dim].

    Heads are those of all layers. The scales keep the axis of head_dim, and have no tokens in the
    dtypes without scales.
    """

    k: Elements
    v: Elements
    k_scales: Floats
    v_scales: Floats


def _planes(memory: npt.NDArray[np.uint8], num_blocks: int, contract: KvContract) -> _Planes:
    dtype, tokens, dim = KV_DTYPES[contract.kv_dtype], contract.block_tokens, contract.head_dim
    heads = memory.reshape(num_blocks, contract.num_layers * contract.num_kv_heads, -1)
    half = dim * tokens * dtype.item.itemsize
    shape = heads.shape[:2]
    scales = heads[..., 2 * half :].view(np.float32).reshape(*shape, 2, -1)
    return _Planes(
        heads[..., :half].view(dtype.item).reshape(*shape, dim, tokens),
        heads[..., half : 2 * half].view(dtype.item).reshape(*shape, tokens, dim),
        scales[..., 0, None, :],
        scales[..., 1, :, None],
    )


def _slots(planes: _Planes, block: int, first: int, count: int) -> _Planes:
    slots = slice(first, first + count)
    k, v, k_scales, v_scales = (plane[block] for plane in planes)
    return _Planes(k[..., slots], v[:, slots], k_scales[..., slots], v_scales[:, slots])


def _converted(
    theirs: KvDtype, ours: KvDtype, elements: Elements, scales: Floats, axis: int
) -> tuple[Elements, Floats]:
    # Slots that no token has filled hold anything.
    with np.errstate(all="ignore"):
        return store_values(ours, read_values(theirs, elements, scales), axis)
