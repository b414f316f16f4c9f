"""The numbers of KV blocks in numpy: bit for bit what the compiled step stores and reads.

`kernels/cpu/kv.h` is the definition. A *vector* is K or V of one token and one head. int8 and fp8
(e4m3) have one float32 scale per vector, which maps its largest magnitude to 127 or 448.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Elements = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class KvDtype:
    """`largest` is what the largest magnitude of a vector is scaled to, 0 without a scale.

    `max_error` bounds what storing changes, relative to the largest magnitude of the vector. It
    holds for finite vectors; below 2**-100 those of a scaled type become 0.
    """

    name: str
    item: np.dtype[Any]
    largest: float
    max_error: float

    @property
    def is_scaled(self) -> bool:
        return self.largest > 0


# Half a unit in the last place of 8 bits; half a step of 127; half a step of 32 at 448. The scaled
# ones round three times more in float32: the scale, its inverse, and each product.
_ROUNDING = 2.0**-22
KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("f32", np.dtype(np.float32), 0.0, 0.0),
        KvDtype("bf16", np.dtype(np.uint16), 0.0, 2.0**-8),
        KvDtype("int8", np.dtype(np.int8), 127.0, 0.5 / 127 + _ROUNDING),
        KvDtype("fp8", np.dtype(np.uint8), 448.0, 16 / 448 + _ROUNDING),
    )
}


def read_values(dtype: KvDtype, elements: Elements, scales: Floats) -> Floats:
    """The numbers that `elements` mean. `scales` broadcasts to them; ignored without scales."""
    match dtype.name:
        case "f32":
            values: Floats = elements
        case "bf16":
            values = (elements.astype(np.uint32) << 16).view(np.float32)
        case "int8":
            values = elements.astype(np.float32) * scales
        case _:
            values = _E4M3[elements] * scales
    return values


def store_values(dtype: KvDtype, values: Floats, axis: int) -> tuple[Elements, Floats]:
    """Elements, and the scale of each vector along `axis` (kept, of length 1).

    A vector that is not finite stays so: its scale is NaN, or its own elements are.
    """
    if dtype.name == "f32":
        return values, _NO_SCALES
    if dtype.name == "bf16":
        return _bf16_of(values), _NO_SCALES
    with np.errstate(invalid="ignore"):
        spoilt = (values * np.float32(0)).sum(axis, keepdims=True)  # 0, or NaN
        largest = np.abs(values).max(axis, keepdims=True) + spoilt
        is_large = largest >= np.float32(2.0**-100)
        top = np.float32(dtype.largest)
        factor = np.divide(top, largest, out=np.zeros_like(largest), where=is_large)
        scaled = values * factor
        scales: Floats = largest / top
        if dtype.name == "int8":
            elements: Elements = np.nan_to_num(np.rint(scaled), nan=0.0).astype(np.int8)
        else:
            elements = _e4m3_of(scaled)
    return elements, scales


def _bf16_of(values: Floats) -> Elements:
    """To the nearest, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    is_nan = bits & 0x7FFFFFFF > 0x7F800000
    return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)


def _e4m3_of(values: Floats) -> Elements:
    """To the nearest, ties to even; 448 and above become 448, a NaN 0x7f."""
    bits = values.view(np.uint32)
    sign: Elements = bits >> 24 & 0x80
    bits = bits & np.uint32(0x7FFFFFFF)
    magnitude = np.minimum(bits, 0x43E00000)
    rounded = (magnitude + np.uint32(0x7FFFF) + (magnitude >> 20 & 1)) >> 20
    subnormal = np.rint(magnitude.view(np.float32) * np.float32(512)).astype(np.uint32)
    normal = rounded - np.uint32(120 << 3)  # wraps below 2**-6, where it is not taken
    stored = sign | np.where(magnitude < 0x3C800000, subnormal, normal)
    return np.where(bits > 0x7F800000, 0x7F, stored).astype(np.uint8)


def _e4m3_table() -> Floats:
    """The values of all 256 bytes; 0x7f and 0xff are read as 480, as the step does."""
    codes = np.arange(256)
    halves = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).astype(np.uint16).view(np.float16)
    return np.float32(256) * halves.astype(np.float32)


_E4M3 = _e4m3_table()
_NO_SCALES = np.ones((), np.float32)
