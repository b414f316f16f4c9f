"""Packed weights, decoded by what `abi.h` says of them, against the values of the model file."""

import gc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.kernels.cpu.library import Format, Source, pack, packed_bytes
from llmrt.models.loading import open_model
from llmrt.models.quants import BLOCK_OF_KIND, dequantize, size_bytes
from llmrt.models.tensors import StoredTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

KINDS = tuple(source.name for source in Source)
NATURAL = {
    "Q4_0": Format.Q4,
    "Q4_1": Format.Q4M,
    "Q5_0": Format.Q8,
    "Q5_1": Format.Q8M,
    "Q8_0": Format.Q8,
}
WIDER = (
    ("Q4_0", Format.Q4M),
    ("Q4_0", Format.Q8),
    ("Q4_0", Format.Q8M),
    ("Q4_1", Format.Q8M),
    ("Q5_0", Format.Q8M),
    ("Q8_0", Format.Q8M),
)
GROUP_BYTES = {Format.Q4: 288, Format.Q4M: 320, Format.Q8: 544, Format.Q8M: 576}
HALF_ULP = np.float32(2**-11)
HALF_SUBNORMAL = np.float32(2**-25)


def blocks_of(kind: str, num_weights: int, seed: int = 1) -> Bytes:
    """Random quants, [blocks, bytes]."""
    raw = np.random.default_rng(seed).integers(0, 256, size_bytes(kind, num_weights), np.uint8)
    return raw.reshape(-1, BLOCK_OF_KIND[kind].size_bytes)


def put_scales(kind: str, blocks: Bytes, scales: npt.NDArray[np.float16]) -> None:
    """d and, where the kind has one, m of each block from `scales` [blocks, 2]."""
    first = 208 if kind == "Q6_K" else 0
    blocks[:, first : first + 2] = scales[:, :1].view(np.uint8)
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[:, 2:4] = scales[:, 1:].copy().view(np.uint8)


def typical(kind: str, rows: int = 37, columns: int = 768, spread: float = 0.02) -> StoredTensor:
    """Random weights with scales as in real files."""
    rng = np.random.default_rng(2)
    if kind in ("F32", "F16", "BF16"):
        values = rng.normal(0, spread, rows * columns).astype(np.float32)
        return from_floats(kind, values.reshape(rows, columns))
    blocks = blocks_of(kind, rows * columns)
    scales = rng.uniform(-spread, spread, (len(blocks), 2)).astype(np.float16)
    put_scales(kind, blocks, scales)
    return StoredTensor("x", (rows, columns), kind, blocks.reshape(-1))


def from_floats(kind: str, values: Floats) -> StoredTensor:
    if kind == "F32":
        raw = values.view(np.uint8)
    elif kind == "F16":
        raw = values.astype(np.float16).view(np.uint8)
    else:
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return StoredTensor("x", values.shape, kind, raw.reshape(-1))


def packed(tensor: StoredTensor, format: Format) -> Bytes:
    rows, columns = tensor.shape
    out = np.full(packed_bytes(rows, columns, format), 0xA5, np.uint8)
    pack(Source[tensor.kind], tensor.data.reshape(-1), rows, columns, format, out)
    return out


def unpacked(data: Bytes, columns: int, format: Format) -> Floats:
    """[rows, columns] of all strips, q * d + m in float32."""
    groups = columns // 32
    if format in (Format.BF16, Format.F32):
        words = data.view(np.uint16 if format == Format.BF16 else np.uint32)
        bits = words.astype(np.uint32) << (16 if format == Format.BF16 else 0)
        floats = bits.view(np.float32).reshape(-1, groups, 32, 16)
        return floats.transpose(0, 3, 1, 2).reshape(-1, columns)
    used = groups * GROUP_BYTES[format]
    strips = data.reshape(-1, -(-used // 64) * 64)[:, :used]
    by_group = strips.reshape(-1, groups, GROUP_BYTES[format])
    q: Floats
    if format in (Format.Q4, Format.Q4M):
        pairs = by_group[:, :, :256].reshape(-1, groups, 4, 1, 16, 4)
        nibbles = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(-1, groups, 8, 16, 4)
        q, scales = nibbles.astype(np.float32), by_group[:, :, 256:]
    else:
        q = by_group[:, :, :512].view(np.int8).reshape(-1, groups, 8, 16, 4).astype(np.float32)
        scales = by_group[:, :, 512:]
    if format == Format.Q4:
        q = q - np.float32(8)
    halves = scales.copy().view(np.float16).astype(np.float32)
    d, m = (halves[:, :, None, first : first + 16, None] for first in (0, 16))
    with np.errstate(invalid="ignore", over="ignore"):
        values: Floats = q * d + m if m.size else q * d
    return values.transpose(0, 3, 1, 2, 4).reshape(-1, columns)


def round_trip(tensor: StoredTensor, format: Format) -> Floats:
    return unpacked(packed(tensor, format), tensor.shape[1], format)[: tensor.shape[0]]


def group_scales(tensor: StoredTensor) -> Floats:
    """The largest |weight| of each group of 32, at every weight of it."""
    rows, columns = tensor.shape
    largest = np.abs(dequantize(tensor)).reshape(rows, -1, 32).max(axis=2)
    return np.asarray(largest.repeat(32, axis=1).reshape(rows, columns), np.float32)


def bf16(values: Floats) -> Floats:
    """To the nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(("kind", "format"), [*NATURAL.items(), *WIDER])
def test_quants_are_kept_exactly(kind: str, format: Format) -> None:
    tensor = typical(kind)
    assert np.array_equal(round_trip(tensor, format), dequantize(tensor))


@pytest.mark.parametrize(("kind", "format"), [*NATURAL.items(), *WIDER])
def test_extreme_scales_are_kept_exactly(kind: str, format: Format) -> None:
    """Every float16 is the scale of some group: subnormal ones, infinities and NaNs, too."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    blocks = blocks_of(kind, 32 << 16)
    put_scales(kind, blocks, np.stack((halves, halves[::-1]), axis=1))
    tensor = StoredTensor("x", (1 << 11, 32 << 5), kind, blocks.reshape(-1))
    got, expected = round_trip(tensor, format), dequantize(tensor)
    if (kind, format) == ("Q4_0", Format.Q4M):
        # Its minimum is -8 d, which must be a float16 as well.
        fits = (np.abs(halves) <= 65504 / 8).repeat(32).reshape(tensor.shape)
        assert fits.mean() > 0.8
        got, expected = got[fits], expected[fits]
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_its_values(kind: str) -> None:
    tensor = typical(kind)
    expected = dequantize(tensor)
    assert np.array_equal(round_trip(tensor, Format.F32), expected)
    assert np.array_equal(round_trip(tensor, Format.BF16), bf16(expected))


@pytest.mark.parametrize(("kind", "format"), [("Q4_K", Format.Q4M), ("Q5_K", Format.Q8M)])
@pytest.mark.parametrize("spread", [1e-6, 1e-4, 0.02, 100])
def test_k_scales_are_off_by_a_rounding_to_float16(
    kind: str, format: Format, spread: float
) -> None:
    """q d and m, each within half a unit in the last place of a float16."""
    tensor = typical(kind, spread=spread)
    largest_q = 15 if kind == "Q4_K" else 31
    blocks = tensor.data.reshape(-1, BLOCK_OF_KIND[kind].size_bytes)
    error = np.abs(round_trip(tensor, format) - dequantize(tensor)).reshape(-1, 8, 32).max(axis=2)
    d, m = (np.abs(blocks[:, i : i + 2].copy().view(np.float16)).astype(np.float32) for i in (0, 2))
    scale, minimum = d * six_bits(blocks)[0], m * six_bits(blocks)[1]
    bound = HALF_ULP * (largest_q * scale + minimum) + HALF_SUBNORMAL * (largest_q + 1)
    assert (error <= bound * np.float32(1.001)).all()


def six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the groups of Q4_K and Q5_K, [blocks, 8] each."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=1)
    minima = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def test_products_of_scales_are_rounded_as_numpy_does() -> None:
    """All float16 times 1 and times 63: ties, subnormal results, overflow to the largest one."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for factor in (1, 63):
        blocks = np.zeros((1 << 16, 144), np.uint8)
        blocks[:, 4] = factor  # of group 0
        blocks[:, 8] = factor
        put_scales("Q4_K", blocks, np.stack((halves, halves), axis=1))
        data = packed(StoredTensor("x", (1 << 16, 256), "Q4_K", blocks.reshape(-1)), Format.Q4M)
        of_group = data.reshape(1 << 12, 8, 320)[:, 0, 256:].copy().view(np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            wide = halves.astype(np.float32) * np.float32(factor)
            expected = wide.astype(np.float16)
        too_large = np.isinf(expected) & np.isfinite(wide)
        expected[too_large] = np.copysign(np.float16(65504), wide[too_large])
        d, m = of_group[:, :16].reshape(-1), of_group[:, 16:].reshape(-1)
        assert np.array_equal(d, expected, equal_nan=True)
        assert np.array_equal(m, -expected, equal_nan=True)


def test_every_float16_is_read_as_numpy_does() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    tensor = StoredTensor("x", (1 << 6, 1 << 10), "F16", halves.view(np.uint8))
    got = round_trip(tensor, Format.F32)
    expected = halves.view(np.float16).astype(np.float32).reshape(tensor.shape)
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


def test_the_larger_scale_of_a_q6_k_group_is_kept() -> None:
    """The half with the larger scale changes by the rounding of the scale only, the other by at
    most an eighth of that scale (a quarter where 4 q would be 128)."""
    tensor = typical("Q6_K", spread=0.001)
    blocks = tensor.data.reshape(-1, 210)
    d = np.abs(blocks[:, 208:].copy().view(np.float16)).astype(np.float32)
    sizes = np.abs(blocks[:, 192:208].view(np.int8).astype(np.float32)).reshape(-1, 8, 2)
    expected = dequantize(tensor).reshape(-1, 8, 2, 16)
    got = round_trip(tensor, Format.Q8).reshape(-1, 8, 2, 16)
    larger = sizes.max(axis=2)[:, :, None, None]
    unit = d[:, :, None, None] * larger / np.float32(4)
    is_larger = sizes[:, :, :, None] == larger
    rounding = HALF_ULP * np.abs(expected) + HALF_SUBNORMAL * 128
    error = np.abs(got - expected) - rounding * np.float32(1.001)
    is_end = np.abs(expected) >= unit * np.float32(127.4)
    is_kept = is_larger & ~is_end
    assert (error <= unit * np.where(is_end, np.float32(1), np.float32(0.5001))).all()
    assert (error[is_kept] <= 0).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_other_kinds_become_8_bits_within_half_a_step(kind: str) -> None:
    """The step is a 127th of the largest weight of the group."""
    tensor = typical(kind)
    got = round_trip(tensor, Format.Q8)
    step = group_scales(tensor) / np.float32(127)
    assert (np.abs(got - dequantize(tensor)) <= step * np.float32(0.501)).all()


def test_8_bits_hold_tiny_weights_within_half_a_step() -> None:
    """A subnormal scale is rounded up if the largest weight would not fit otherwise."""
    largest = np.geomspace(1e-9, 1e-2, 64, dtype=np.float32)[:, None]
    values = largest * np.linspace(-1, 1, 64, dtype=np.float32)
    got = round_trip(from_floats("F32", values), Format.Q8)
    step = np.maximum(largest / 127 * np.float32(1.001), 2 * HALF_SUBNORMAL) + 2 * HALF_SUBNORMAL
    assert (np.abs(got - values) <= step / 2).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e7])
def test_8_bits_show_values_that_no_scale_can_hold(bad: float) -> None:
    """A whole group becomes NaN, and no other one."""
    values = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
    values[3, 40] = bad
    is_nan = np.isnan(round_trip(from_floats("F32", values), Format.Q8))
    assert is_nan[3, 32:].all()
    assert is_nan.sum() == 32


@pytest.mark.parametrize("format", list(Format))
def test_the_last_strip_is_filled_up_with_zeros(format: Format) -> None:
    tensor = typical("Q4_1" if format == Format.Q4M else "Q4_0", rows=19, columns=96)
    data = packed(tensor, format)
    assert data.size % 128 == 0
    rows = unpacked(data, 96, format)
    assert rows.shape == (32, 96)
    assert rows[:19].any(axis=1).all()
    assert not rows[19:].any()


def test_strips_begin_at_multiples_of_64_bytes() -> None:
    """288 and 544 bytes per group are none for an odd number of groups: zeros follow."""
    assert packed_bytes(32, 96, Format.Q4) == 2 * (3 * 288 + 32)
    assert packed_bytes(32, 96, Format.Q8) == 2 * (3 * 544 + 32)
    assert packed_bytes(17, 64, Format.Q4M) == 2 * 2 * 320
    assert packed_bytes(16, 32, Format.Q8M) == 576
    assert packed_bytes(16, 32, Format.BF16) == 1024
    assert packed_bytes(16, 32, Format.F32) == 2048
    data = packed(typical("Q8_0", rows=32, columns=96), Format.Q8)
    assert not data.reshape(2, -1)[:, 3 * 544 :].any()


def test_interleaving_writes_every_other_strip_only() -> None:
    gate = typical("Q8_0", rows=48, columns=64)
    alone = packed(gate, Format.Q8).reshape(3, -1)
    out = np.full((6, alone.shape[1]), 0xA5, np.uint8)
    pack(Source.Q8_0, gate.data, 48, 64, Format.Q8, out.reshape(-1)[: 5 * alone.shape[1]], 2)
    assert np.array_equal(out[::2], alone)
    assert (out[1::2] == 0xA5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_do_not_become_fewer(kind: str) -> None:
    tensor = typical(kind, rows=16, columns=256)
    formats = {Format.Q4: ("Q4_0",), Format.Q4M: ("Q4_0", "Q4_1", "Q4_K")}
    for format, kinds in formats.items():
        if kind not in kinds:
            with pytest.raises(ValueError, match="cannot be packed"):
                packed(tensor, format)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(list(Format)),
    st.integers(1, 35),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_no_bytes_do_harm(kind: str, format: Format, rows: int, blocks: int, seed: int) -> None:
    """Whatever a file holds, exactly the packed bytes are written, and values are as promised."""
    columns = blocks * max(32, BLOCK_OF_KIND[kind].elements)
    raw = blocks_of(kind, rows * columns, seed).reshape(-1)
    size = packed_bytes(rows, columns, format)
    out = np.full(size + 64, 0xA5, np.uint8)
    try:
        pack(Source[kind], raw, rows, columns, format, out[:size])
    except ValueError:
        assert format in (Format.Q4, Format.Q4M)
        size = 0
    assert (out[size:] == 0xA5).all()
    if size and format == Format.F32:
        expected = dequantize(StoredTensor("x", (rows, columns), kind, raw))
        assert np.array_equal(
            unpacked(out[:size], columns, format)[:rows], expected, equal_nan=True
        )


def test_a_real_model_is_kept_exactly(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    matrices = [tensor for tensor in model.tensors.values() if len(tensor.shape) == 2]
    assert {tensor.kind for tensor in matrices} == {"Q4_1", "Q8_0"}
    for tensor in matrices[:9] + matrices[-9:]:
        assert np.array_equal(round_trip(tensor, NATURAL[tensor.kind]), dequantize(tensor))
    model.close()
    gc.collect()
