"""Blocks converted between sizes and dtypes, against torch and the stated error.

`tests/engine/test_kv_conversion.py` compares with the compiled step.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_mismatches import CONTRACT, MISMATCHES, other_contract
from tests.conftest import make_contract

from llmrt.kvtransfer.conversion import Conversion, conversion
from llmrt.kvtransfer.kv_dtypes import KV_DTYPES, Floats, read_values, store_values
from llmrt.wire.kv import KvContract

NAMES = tuple(KV_DTYPES)
CONVERTED = (("kv_dtype", "int8"), ("block_tokens", 16), ("block_tokens", 64))
HEADS, DIM = 6, 16  # 2 layers of 3 KV heads
Bytes = npt.NDArray[np.uint8]


def make(theirs: str | int, ours: str | int) -> Conversion:
    name = "kv_dtype" if isinstance(theirs, str) else "block_tokens"
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": DIM}
    found = conversion(
        make_contract(**sizes, **{name: ours}), make_contract(**sizes, **{name: theirs})
    )
    assert found is not None
    return found


def make_vectors(num_vectors: int = 2000, seed: int = 1) -> Floats:
    """Of all magnitudes, with outliers, zeros, and lengths that a scale maps to ties."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((num_vectors, DIM)) * 2.0 ** rng.integers(
        -90, 90, (num_vectors, 1)
    )
    vectors[::7] *= 10.0 ** rng.uniform(-3, 3, vectors[::7].shape)
    vectors[::11] = np.round(vectors[::11] / np.abs(vectors[::11]).max(1, keepdims=True) * 254) / 2
    vectors[::13] = 0
    return vectors.astype(np.float32)


def stored(contract: KvContract, values: Floats) -> Bytes:
    """Blocks of `values` [K and V, blocks, heads, tokens, dim], written plainly."""
    dtype, parts = KV_DTYPES[contract.kv_dtype], []
    (k, k_scales), (v, v_scales) = (store_values(dtype, half, -1) for half in values)
    for block, head in np.ndindex(values.shape[1:3]):
        parts += [k[block, head].T.tobytes(), v[block, head].tobytes()]
        if dtype.is_scaled:
            parts += [k_scales[block, head].tobytes(), v_scales[block, head].tobytes()]
    return np.frombuffer(b"".join(parts), np.uint8)


def some_blocks(contract: KvContract, num_blocks: int, seed: int = 1) -> tuple[Floats, Bytes]:
    num_vectors = 2 * num_blocks * HEADS * contract.block_tokens
    values = make_vectors(num_vectors, seed)
    values = values.reshape(2, num_blocks, HEADS, contract.block_tokens, DIM)
    return values, stored(contract, values)


# -- which -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "max_error"),
    [
        ({"kv_dtype": "bf16"}, {"kv_dtype": "f32"}, 0.0),
        ({"kv_dtype": "f32"}, {"kv_dtype": "bf16"}, 1 / 256),
        ({"kv_dtype": "bf16"}, {"kv_dtype": "int8"}, 1 / 254),
        ({"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, 1 / 28),
        ({"kv_dtype": "fp8"}, {"kv_dtype": "f32"}, 2.0**-24),
        ({"block_tokens": 16}, {"block_tokens": 64}, 0.0),
        ({"block_tokens": 96}, {"block_tokens": 32, "kv_dtype": "fp8"}, 1 / 28),
    ],
)
def test_sizes_that_divide_and_known_dtypes_are_converted(
    theirs: dict[str, Any], ours: dict[str, Any], max_error: float
) -> None:
    found = conversion(make_contract(**ours), make_contract(**theirs))
    assert found is not None
    assert found.max_error == pytest.approx(max_error, abs=2.0**-21)


@pytest.mark.parametrize(
    ("name", "value"),
    [mismatch for mismatch in MISMATCHES if mismatch not in CONVERTED],
)
def test_all_else_is_refused(name: str, value: object) -> None:
    """Also together with a difference that could be converted."""
    theirs = other_contract(name, value)
    assert conversion(CONTRACT, theirs) is None
    assert conversion(theirs, CONTRACT) is None
    if name != "kv_dtype":
        theirs = msgspec.structs.replace(theirs, kv_dtype="int8")
        assert conversion(CONTRACT, theirs) is None


def test_sizes_that_do_not_divide_are_refused() -> None:
    assert conversion(make_contract(block_tokens=32), make_contract(block_tokens=48)) is None


def test_equal_contracts_need_none() -> None:
    assert conversion(make_contract(), make_contract(numerics_id="another")) is None


def test_the_error_is_told_in_words() -> None:
    assert str(make("bf16", "fp8")) == (
        "bf16 in blocks of 32 tokens becomes fp8 in blocks of 32; numbers change by at most 0.036 "
        "of the largest of their token and head"
    )


# -- the numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", NAMES)
@pytest.mark.parametrize("ours", NAMES)
def test_numbers_change_by_at_most_the_stated_error(theirs: str, ours: str) -> None:
    if theirs == ours:
        return
    source = make(theirs, ours)
    _, raw = some_blocks(source.theirs, 3)
    target = np.zeros(3 * source.ours.block_bytes, np.uint8)
    source.convert(raw.data, target.data, [0, 1, 2], range(96))
    before = read_plainly(source.theirs, raw).astype(np.float64)
    after = read_plainly(source.ours, target).astype(np.float64)
    largest = np.abs(before).max(-1, keepdims=True)
    assert (np.abs(after - before) <= source.max_error * largest + 2.0**-100).all()
    if source.max_error > 1e-6:
        seen = (np.abs(after - before) / np.maximum(largest, 2.0**-100)).max()
        assert seen > 0.9 * source.max_error  # the bound is near what happens


def read_plainly(contract: KvContract, raw: Bytes) -> Floats:
    """[K and V, blocks, heads, tokens, dim]"""
    dtype, tokens = KV_DTYPES[contract.kv_dtype], contract.block_tokens
    size, halves = DIM * tokens * dtype.item.itemsize, []
    heads = raw.reshape(-1, HEADS, contract.block_bytes // HEADS)
    for half in (0, 1):
        part = heads[..., half * size :][..., :size].copy().view(dtype.item)
        elements = (
            part.reshape(len(heads), HEADS, tokens, DIM)
            if half
            else part.reshape(len(heads), HEADS, DIM, tokens).swapaxes(-1, -2)
        )
        scales = np.ones((1, 1, 1, 1), np.float32)
        if dtype.is_scaled:
            first = 2 * size + half * tokens * 4
            scales = heads[..., first : first + tokens * 4].copy().view(np.float32)[..., None]
        halves.append(read_values(dtype, elements, scales))
    return np.stack(halves)


@pytest.mark.parametrize(("wide", "narrow"), [("f32", "bf16"), ("f32", "int8"), ("bf16", "int8")])
def test_a_wider_dtype_and_back_gives_the_same_numbers(wide: str, narrow: str) -> None:
    """bf16 holds no 8 bits of q * scale exactly, but q comes back from it."""
    out, back = make(narrow, wide), make(wide, narrow)
    _, raw = some_blocks(out.theirs, 2)
    between = np.zeros(2 * out.ours.block_bytes, np.uint8)
    after = np.zeros_like(raw)
    out.convert(raw.data, between.data, [0, 1], range(64))
    back.convert(between.data, after.data, [0, 1], range(64))
    before, final = read_plainly(out.theirs, raw), read_plainly(out.theirs, after)
    largest = np.abs(before).max(-1, keepdims=True)
    limit = 0 if narrow == "bf16" else out.max_error + back.max_error
    assert (np.abs(final - before) <= limit * largest + 2.0**-100).all()


def test_every_e4m3_is_read_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    actual = read_values(KV_DTYPES["fp8"], codes, np.ones(1, np.float32))
    is_number = codes & 0x7F != 0x7F  # that one comes with a scale of NaN
    assert np.array_equal(actual[is_number], expected[is_number])


def test_every_kind_of_float32_is_rounded_to_bf16_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, np.uint32)
    bits[: 1 << 16] = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000  # every tie
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    actual, _ = store_values(KV_DTYPES["bf16"], values, -1)
    is_number = ~np.isnan(values)
    assert np.array_equal(actual[is_number], expected[is_number])
    back = read_values(KV_DTYPES["bf16"], actual, np.ones(1, np.float32))
    assert np.isnan(back[~is_number]).all()


@pytest.mark.parametrize("kv_dtype", NAMES)
@pytest.mark.parametrize("fault", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_never_becomes_finite(kv_dtype: str, fault: float) -> None:
    vectors = make_vectors(3)
    vectors[1, 5] = fault
    dtype = KV_DTYPES[kv_dtype]
    values = read_values(dtype, *store_values(dtype, vectors, -1))
    assert not np.isfinite(values[1, 5])
    assert np.isfinite(values[[0, 2]]).all()
    if dtype.is_scaled:
        assert np.isnan(values[1]).all()


# -- blocks ----------------------------------------------------------------------------------


@given(
    ratio=st.integers(1, 4),
    is_ours_larger=st.booleans(),
    dtypes=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    data=st.data(),
)
def test_exactly_the_tokens_asked_for_are_written(
    ratio: int, is_ours_larger: bool, dtypes: tuple[str, str], data: st.DataObject
) -> None:
    """In any order of our blocks, wherever the source begins, nothing beside them."""
    sizes = (8 * ratio, 8) if is_ours_larger else (8, 8 * ratio)
    common = {"num_layers": 2, "num_kv_heads": 3, "head_dim": DIM}
    ours = make_contract(kv_dtype=dtypes[0], block_tokens=sizes[0], **common)
    theirs = make_contract(kv_dtype=dtypes[1], block_tokens=sizes[1], **common)
    found = Conversion(ours, theirs, 1.0)
    _, raw = some_blocks(theirs, 3)
    source_token = 8 * data.draw(st.integers(0, 3))
    end = source_token + 3 * sizes[1]
    start = data.draw(st.integers(source_token // 8, end // 8)) * 8
    stop = data.draw(st.integers(start // 8, end // 8)) * 8
    num_blocks = -(-end // sizes[0])
    blocks = data.draw(st.permutations(range(num_blocks + 1)))[:num_blocks]
    target = np.full((num_blocks + 1) * ours.block_bytes, 0xA5, np.uint8)

    found.convert(raw.data, target.data, blocks, range(start, stop), source_token=source_token)

    with np.errstate(all="ignore"):
        actual, untouched = (
            read_plainly(ours, memory)[:, blocks].swapaxes(2, 3).reshape(2, -1, HEADS, DIM)
            for memory in (target, np.full_like(target, 0xA5))
        )
        expected = read_plainly(theirs, raw).swapaxes(2, 3).reshape(2, -1, HEADS, DIM)
        if ours.kv_dtype != theirs.kv_dtype:
            dtype = KV_DTYPES[ours.kv_dtype]
            expected = read_values(dtype, *store_values(dtype, expected, -1))
    first = start - source_token
    assert np.array_equal(actual[:, start:stop], expected[:, first : first + stop - start])
    for part in (slice(start), slice(stop, None)):
        assert np.array_equal(actual[:, part], untouched[:, part], equal_nan=True)


@pytest.mark.parametrize(
    ("tokens", "blocks", "source_token", "message"),
    [
        (range(33), [0, 1], 0, "not in steps of 32"),
        (range(0, 64, 2), [0, 1], 0, "not in steps of 32"),
        (range(32, 64), [0, 1], 16, "not in steps of 32"),
        (range(96), [0, 1, 2], 0, "not in 64 tokens from 0 on"),
        (range(64), [0, 1], 32, "not in 64 tokens from 32 on"),
        (range(64), [0], 0, "does not fit into 1 blocks"),
        (range(64), [0, 3], 0, "not in an arena of 3"),
        (range(64), [0, -1], 0, "not in an arena of 3"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tokens: range, blocks: list[int], source_token: int, message: str
) -> None:
    found = make("bf16", "int8")
    source = memoryview(bytes(2 * found.theirs.block_bytes))
    target = bytearray(b"\xa5") * (3 * found.ours.block_bytes)
    with pytest.raises(ValueError, match=message):
        found.convert(source, memoryview(target), blocks, tokens, source_token=source_token)
    assert target == b"\xa5" * len(target)
    with pytest.raises(ValueError, match="are no blocks of"):
        found.convert(source[1:], memoryview(target), [0], range(32))
