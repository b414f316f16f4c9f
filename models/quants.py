"""Storage types of tensors: their blocks, and their values in float32.

A row is a sequence of blocks of `elements` weights in `size_bytes` bytes. The block layouts are
those of ggml (`ggml-common.h`, `ggml-quants.c`); results equal gguf-py's bit for bit. All
integers and scales in a block are little-endian; d and m are float16:

    Q4_0  d, 16 nibble pairs                     w = d (q - 8)
    Q4_1  d, m, 16 nibble pairs                  w = d q + m
    Q5_0  d, 32 high bits, 16 nibble pairs       w = d (q - 16)
    Q5_1  d, m, 32 high bits, 16 nibble pairs    w = d q + m
    Q8_0  d, 32 int8                             w = d q
    Q4_K  d, m, 12 bytes of 6-bit scales, 128    w = d s q - m t, s and t per 32 weights
    Q5_K  as Q4_K, 32 bytes of high bits first   w = d s q - m t
    Q6_K  128 low nibble pairs, 64 high pairs,   w = d s (q - 32), s int8 per 16 weights
          16 int8 scales, d
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Block(NamedTuple):
    elements: int
    size_bytes: int


BLOCK_OF_KIND = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "F64": Block(1, 8),
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}
INT4_KINDS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
INT4_GROUP = 32

# Temporaries of a conversion take some 12 bytes per element; while they stay in the second-level
# cache it is 3.5 times faster (240 against 69 M weights/s of Q4_1 with 2**20 elements).
_CHUNK_ELEMENTS = 1 << 16


def size_bytes(kind: str, elements: int) -> int:
    """Bytes of `elements` weights, which must be a multiple of the block's."""
    block = BLOCK_OF_KIND[kind]
    return elements // block.elements * block.size_bytes


def dequantize(tensor: StoredTensor) -> Floats:
    """All values, in the shape of the tensor."""
    return dequantize_rows(tensor, 0, len(_rows(tensor))).reshape(tensor.shape)


def dequantize_rows(tensor: StoredTensor, start: int, stop: int) -> Floats:
    """Rows `start` to `stop` as [stop - start, columns]; a vector is one row."""
    decode = _DECODERS[tensor.kind]
    block = BLOCK_OF_KIND[tensor.kind]
    rows = _rows(tensor)[start:stop]
    num_columns = tensor.shape[-1]
    values = np.empty((len(rows), num_columns), np.float32)
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    # Files may hold infinities and NaNs; they become what IEEE 754 says, without a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(rows), step):
            chunk = rows[first : first + step]
            blocks = chunk.reshape(-1, block.size_bytes)
            values[first : first + step] = decode(blocks).reshape(len(chunk), num_columns)
    return values


def to_int4_groups(tensor: StoredTensor) -> tuple[Bytes, Floats, Floats]:
    """`q` [rows, columns] in 0..15, `scale` and `zero` [rows, columns / 32].

    w = (q - 8) * scale + zero, in float32. Equal to `dequantize` bit for bit wherever `zero`, a
    sum of two exact products, is itself representable: always for Q4_0, and for Q4_1 and Q4_K
    while scale and minimum lie within a factor of 2**12 and 2**6; else within its rounding.
    Raises `ModelError` for other kinds.
    """
    if tensor.kind not in INT4_KINDS:
        raise ModelError(
            f"{tensor.name} is {tensor.kind}; 4-bit groups come from Q4_0, Q4_1 and Q4_K only"
        )
    rows = _rows(tensor)
    blocks = rows.reshape(-1, BLOCK_OF_KIND[tensor.kind].size_bytes)
    with np.errstate(invalid="ignore", over="ignore"):
        if tensor.kind == "Q4_K":
            scale, minimum = _k_scales(blocks)
            q, zero = _k_nibbles(blocks[:, 16:]), np.float32(8) * scale - minimum
        elif tensor.kind == "Q4_1":
            scale = _f16(blocks[:, :2])
            q, zero = _nibbles(blocks[:, 4:]), _f16(blocks[:, 2:4]) + np.float32(8) * scale
        else:
            scale = _f16(blocks[:, :2])
            q, zero = _nibbles(blocks[:, 2:]), np.zeros_like(scale)
    num_rows = len(rows)
    return q.reshape(num_rows, -1), scale.reshape(num_rows, -1), zero.reshape(num_rows, -1)


def _rows(tensor: StoredTensor) -> Bytes:
    """[rows, bytes per row], leading dimensions flattened."""
    return tensor.data.reshape(-1, size_bytes(tensor.kind, tensor.shape[-1]))


# Blocks come as [num_blocks, size_bytes], values leave as [num_blocks, elements].


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, k] -> [n, 2k]: all low nibbles, then all high ones."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def _k_nibbles(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 8, 32]: of every 32 bytes the low nibbles, then the high ones."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum [n, 8, 1] of the groups of 32 in blocks of Q4_K or Q5_K.

    Bytes 0-3 and 4-7 hold six bits of scales and minima 0-3, and above them two bits of those
    4-7, whose other four are the nibbles of bytes 8-11.
    """
    low_s, low_m, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low_s & 63, (rest & 15) | (low_s >> 6 << 4)), axis=-1)
    minima = np.concatenate((low_m & 63, (rest >> 4) | (low_m >> 6 << 4)), axis=-1)
    scale = _f16(blocks[:, 0:2]) * scales.astype(np.float32)
    minimum = _f16(blocks[:, 2:4]) * minima.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def _bits(packed: Bytes) -> Bytes:
    """[..., k] -> [..., 8k], lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _f64(blocks: Bytes) -> Floats:
    return blocks.view("<f8").astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 4:]).astype(np.float32)
    return _f16(blocks[:, :2]) * q + _f16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _f16(blocks[:, :2]) * (q.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _f16(blocks[:, :2]) * q.astype(np.float32) + _f16(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scale, minimum = _k_scales(blocks)
    return scale * _k_nibbles(blocks[:, 16:]).astype(np.float32) - minimum


def _q5_k(blocks: Bytes) -> Floats:
    scale, minimum = _k_scales(blocks)
    # Bit g of byte i is the fifth bit of weight i in group g.
    high = _bits(blocks[:, 16:48]).reshape(-1, 32, 8).transpose(0, 2, 1)
    q = _k_nibbles(blocks[:, 48:]) | (high << 4)
    return scale * q.astype(np.float32) - minimum


def _q6_k(blocks: Bytes) -> Floats:
    # Halves of 128 weights: 64 bytes of low nibbles, 32 bytes of four 2-bit fields each.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scale = _f16(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scale[:, :, None] * q


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "F64": _f64,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
