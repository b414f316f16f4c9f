"""Linear layers on CPU: a weight is packed once, for the fastest product that torch has for it.

On float32 and bfloat16 weights, oneDNN's packed product is up to twice as fast as `F.linear`,
whose BLAS is slow on AMD. bfloat16 is used only where the CPU multiplies it: emulated, it is ten
times slower than float32. float16 is emulated everywhere, but for a single row, bound by memory,
it is twice as fast as float32.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# oneDNN packs for a batch size and is slower at others. Packed for 32, it is within 15 % of the
# best from 1 to 512 rows; packed for 1, it is half as fast at 8.
_PACKED_FOR_ROWS = 32
# Above, a dense product is faster: from 8 rows on, the 4-bit kernel is bound by unpacking.
_MAX_INT4_ROWS = 4
_INT4_ROWS_MULTIPLE = 16


class Linear(Protocol):
    """y = x @ weight.T, for x [M, columns] of any float type; y [M, rows] has the layer's own."""

    def __call__(self, x: Tensor) -> Tensor: ...


def multiplies_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions that oneDNN uses."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def reads_half() -> bool:
    """Whether `HalfLinear` is the fastest dense product of one row on this CPU."""
    has_f16c = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_f16c and not multiplies_bf16()


def compute_dtype(dtype: str) -> torch.dtype:
    """What `f32` or `bf16` weights are multiplied in on this CPU."""
    return torch.bfloat16 if dtype != "f32" and multiplies_bf16() else torch.float32


class DenseLinear:
    """A weight [rows, columns] in float32 or bfloat16, whose products take that dtype."""

    def __init__(self, weight: Tensor) -> None:
        self._is_packed = bool(torch._C._has_mkldnn)
        self._weight = weight.contiguous()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype)
        if not self._is_packed:
            return torch.nn.functional.linear(x, self._weight)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return y


class HalfLinear:
    """A weight [rows, columns] rounded to float16, which a single row reads as it is.

    More rows are multiplied in float32, by a second copy. torch sums a row's products in
    float32 and rounds each to float16: 11 bits.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: float16, kept and not copied."""
        self._half = weight
        self._dense = DenseLinear(weight.float())

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return torch.nn.functional.linear(x.half(), self._half)
        return self._dense(x)


class Int4Linear:
    """A weight of 4-bit groups, w = (q - 8) * scale + zero, with bfloat16 activations.

    `scale` and `zero` are rounded to bfloat16, as the 4-bit kernel wants them, and the dense
    copy that serves larger batches is made of the rounded ones: the two differ by the order of
    their sums alone, except where the CPU multiplies bfloat16, for which weights are rounded.
    """

    def __init__(
        self,
        q: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        zero: npt.NDArray[np.float32],
    ) -> None:
        """q: [rows, columns]; scale and zero: [rows, groups]. See `fits`."""
        nibbles = torch.from_numpy(q)
        groups = torch.from_numpy(np.stack([scale, zero], -1)).bfloat16()
        self._group_size = q.shape[1] // scale.shape[1]
        self._packed = torch._convert_weight_to_int4pack_for_cpu(nibbles.int(), 2)
        self._groups = groups.transpose(0, 1).contiguous()
        scales, zeros = groups.float().unsqueeze(-1).unbind(2)
        weight = nibbles.view(*scale.shape, self._group_size).float().sub_(8.0)
        weight = weight.mul_(scales).add_(zeros).flatten(1)
        self._dense = DenseLinear(weight.to(compute_dtype("bf16")))

    @staticmethod
    def fits(rows: int) -> bool:
        """Whether the 4-bit kernel takes a weight with so many rows."""
        return rows % _INT4_ROWS_MULTIPLE == 0

    def __call__(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        if x.shape[0] <= _MAX_INT4_ROWS:
            return torch._weight_int4pack_mm_for_cpu(
                x, self._packed, self._group_size, self._groups
            )
        return self._dense(x).bfloat16()
