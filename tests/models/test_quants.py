"""Storage types, compared with gguf-py bit by bit."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from llmrt.models.gguf import read_gguf
from llmrt.models.quants import (
    BLOCK_OF_KIND,
    INT4_GROUP,
    dequantize,
    dequantize_rows,
    size_bytes,
    to_int4_groups,
)
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

QUANTS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
INT4 = ("Q4_0", "Q4_1", "Q4_K")


def stored(kind: str, raw: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> StoredTensor:
    assert raw.size == size_bytes(kind, int(np.prod(shape)))
    return StoredTensor("x", shape, kind, raw.reshape(-1))


def random_tensor(kind: str, rows: int = 37, columns: int = 768) -> StoredTensor:
    rng = np.random.default_rng(11)
    raw = rng.integers(0, 256, size_bytes(kind, rows * columns), np.uint8)
    return stored(kind, raw, (rows, columns))


def typical_tensor(kind: str, rows: int = 16, columns: int = 512) -> StoredTensor:
    """Random quants with scales as in real weights, so that nothing is infinite."""
    tensor = random_tensor(kind, rows, columns)
    rng = np.random.default_rng(12)
    blocks = tensor.data.reshape(-1, BLOCK_OF_KIND[kind].size_bytes)
    scale = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)
    blocks[:, :2] = scale[:, None].view(np.uint8)
    if kind != "Q4_0":
        minimum = (scale * np.float16(-5 if kind == "Q4_1" else 3)).astype(np.float16)
        blocks[:, 2:4] = minimum[:, None].view(np.uint8)
    return tensor


def by_gguf(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])
    return np.asarray(values, np.float32).reshape(tensor.shape)


def assert_same_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> None:
    """NaNs may differ in their payload, zeros not in their sign."""
    differs = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    assert not differs.any()


@pytest.mark.parametrize("kind", QUANTS)
def test_random_bytes_dequantize_as_in_gguf(kind: str) -> None:
    tensor = random_tensor(kind)
    assert_same_bits(dequantize(tensor), by_gguf(tensor))


@pytest.mark.parametrize("kind", QUANTS)
def test_block_sizes_are_those_of_gguf(kind: str) -> None:
    assert BLOCK_OF_KIND[kind] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_doubles_are_rounded_to_float32() -> None:
    values = np.array([[1 / 3, -2.5, 1e300, 5e-324]])
    got = dequantize(stored("F64", values.view(np.uint8), (1, 4)))
    assert got.tolist() == [[float(np.float32(1 / 3)), -2.5, float("inf"), 0.0]]


def test_float32_is_passed_through_from_an_odd_address() -> None:
    values = np.array([[1.5, -0.0, 3e-40, np.nan]], np.float32)
    raw = np.zeros(17, np.uint8)
    raw[1:] = values.view(np.uint8)[0]
    assert_same_bits(dequantize(stored("F32", raw[1:], (1, 4))), values)


@pytest.mark.parametrize("kind", QUANTS)
def test_rows_are_those_of_the_whole(kind: str) -> None:
    tensor = random_tensor(kind, rows=9, columns=256)
    assert_same_bits(dequantize_rows(tensor, 3, 8), dequantize(tensor)[3:8])
    assert dequantize_rows(tensor, 4, 4).shape == (0, 256)


def test_a_vector_is_one_row() -> None:
    values = np.arange(6, dtype=np.float32)
    tensor = stored("F32", values.view(np.uint8), (6,))
    assert dequantize(tensor).tolist() == values.tolist()
    assert dequantize_rows(tensor, 0, 1).tolist() == [values.tolist()]


def test_a_long_tensor_is_converted_in_chunks_without_seams() -> None:
    tensor = random_tensor("Q8_0", rows=1100, columns=1024)
    assert_same_bits(dequantize(tensor), by_gguf(tensor))


@pytest.mark.parametrize("kind", INT4)
def test_int4_groups_give_the_dequantized_weights_exactly(kind: str) -> None:
    tensor = typical_tensor(kind)
    q, scale, zero = to_int4_groups(tensor)
    rows, columns = tensor.shape
    assert q.dtype == np.uint8
    assert q.shape == (rows, columns)
    assert q.max() == 15
    assert scale.shape == zero.shape == (rows, columns // INT4_GROUP)
    groups = q.reshape(rows, -1, INT4_GROUP).astype(np.float32) - np.float32(8)
    weights = groups * scale[..., None] + zero[..., None]
    # Not the bits: -8 * 0 is -0.0 on one side only.
    assert (weights.reshape(rows, columns) == dequantize(tensor)).all()


def test_int4_groups_of_another_kind_are_refused() -> None:
    with pytest.raises(ModelError, match="x is Q8_0"):
        to_int4_groups(random_tensor("Q8_0"))


def test_the_real_model_dequantizes_as_in_gguf(smollm2_path: Path) -> None:
    tensors = read_gguf(smollm2_path).tensors
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        tensor = tensors[name]
        rows = tensor.data.reshape(tensor.shape[0], -1)[:512]
        part = StoredTensor(name, (len(rows), tensor.shape[1]), tensor.kind, rows)
        assert_same_bits(dequantize_rows(tensor, 0, 512), by_gguf(part))


def test_the_real_model_maps_to_int4_groups_exactly(smollm2_path: Path) -> None:
    tensors = read_gguf(smollm2_path).tensors
    for layer in (0, 11, 29):
        tensor = tensors[f"blk.{layer}.ffn_up.weight"]
        q, scale, zero = to_int4_groups(tensor)
        groups = q.reshape(*scale.shape, INT4_GROUP).astype(np.float32) - np.float32(8)
        weights = (groups * scale[..., None] + zero[..., None]).reshape(tensor.shape)
        assert (weights == dequantize(tensor)).all()
