"""Which weights are packed together, and where they lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llmrt.kernels.cpu.library import Format, Source, pack, packed_bytes
from llmrt.models.loading import open_model
from llmrt.models.packing import (
    PackRequest,
    can_become,
    fill,
    format_of,
    make_plan,
    pack_weights,
    views,
)
from llmrt.models.quants import BLOCK_OF_KIND, dequantize, size_bytes
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Maker = Callable[..., Path]


def stored(name: str, rows: int, columns: int = 64, kind: str = "Q8_0") -> StoredTensor:
    """Random bytes of quants; random values of floats."""
    rng = np.random.default_rng(len(name) + rows)
    if kind in ("F32", "F64"):
        values = rng.normal(0, 0.02, rows * columns).astype({"F32": "<f4", "F64": "<f8"}[kind])
        raw = values.view(np.uint8)
    else:
        raw = rng.integers(0, 256, size_bytes(kind, rows * columns), np.uint8)
    return StoredTensor(name, (rows, columns), kind, raw)


def named(*tensors: StoredTensor) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in tensors}


def alone(tensor: StoredTensor, format: Format) -> Bytes:
    rows, columns = tensor.shape
    out = np.zeros(packed_bytes(rows, columns, format), np.uint8)
    pack(Source[tensor.kind], tensor.data, rows, columns, format, out)
    return out


def test_every_kind_has_a_format_it_can_become() -> None:
    assert {kind: format_of(kind).name for kind in BLOCK_OF_KIND} == {
        "F32": "BF16",
        "F16": "BF16",
        "BF16": "BF16",
        "F64": "BF16",
        "Q4_0": "Q4",
        "Q4_1": "Q4M",
        "Q5_0": "Q8",
        "Q5_1": "Q8M",
        "Q8_0": "Q8",
        "Q4_K": "Q4M",
        "Q5_K": "Q8M",
        "Q6_K": "Q8",
    }
    assert all(can_become(kind, format_of(kind)) for kind in BLOCK_OF_KIND)


@pytest.mark.parametrize("kind", [source.name for source in Source])
@pytest.mark.parametrize("format", list(Format))
def test_what_can_become_a_format_is_what_is_packed(kind: str, format: Format) -> None:
    tensor = stored("x", 16, 256, kind)
    if can_become(kind, format):
        assert alone(tensor, format).any()
    else:
        with pytest.raises(ValueError, match="cannot be packed"):
            alone(tensor, format)


def test_rows_of_parts_follow_each_other() -> None:
    """The last one may end within a strip."""
    q, k, v = stored("q", 32), stored("k", 16), stored("v", 21)
    packed = pack_weights(named(q, k, v), [PackRequest("qkv", ("q", "k", "v"), Format.Q8)])
    weight = packed.tensors["qkv"]
    assert (weight.format, weight.rows, weight.columns) == (Format.Q8, 80, 64)
    expected = np.concatenate([alone(part, Format.Q8) for part in (q, k, v)])
    assert np.array_equal(weight.data, expected)


def test_strips_of_gate_and_up_take_turns() -> None:
    gate, up = stored("gate", 40), stored("up", 40, kind="Q4_0")
    request = PackRequest("gate_up", ("gate", "up"), Format.Q8, is_interleaved=True)
    weight = pack_weights(named(gate, up), [request]).tensors["gate_up"]
    assert weight.rows == 96
    strips = [alone(part, Format.Q8).reshape(3, -1) for part in (gate, up)]
    assert np.array_equal(weight.data, np.stack(strips, axis=1).reshape(-1))


def test_pieces_and_threads_change_nothing() -> None:
    """The weight is packed in three pieces of about a megabyte."""
    big = stored("big", 1003, 2048)
    requests = [PackRequest("big", ("big",), Format.Q8)]
    calls: list[tuple[int, int]] = []
    for num_threads in (1, 3):
        packed = pack_weights(
            named(big), requests, lambda *call: calls.append(call), num_threads=num_threads
        )
        assert np.array_equal(packed.tensors["big"].data, alone(big, Format.Q8))
    size = big.data.size
    assert calls[:3] == calls[3:]
    assert [total for _, total in calls] == [size] * 6
    assert calls[0][0] < calls[1][0] < calls[2][0] == size


def test_doubles_are_packed_from_float32() -> None:
    double = stored("x", 20, kind="F64")
    single = StoredTensor("x", double.shape, "F32", dequantize(double).reshape(-1).view(np.uint8))
    weight = pack_weights(named(double), [PackRequest("x", ("x",), Format.F32)]).tensors["x"]
    assert np.array_equal(weight.data, alone(single, Format.F32))


def test_everything_is_aligned_and_read_only() -> None:
    norm = StoredTensor("norm", (5,), "F16", np.arange(5, dtype=np.float16).view(np.uint8))
    bias = StoredTensor("bias", (3,), "F32", np.ones(3, np.float32).view(np.uint8))
    tensors = named(norm, stored("a", 16, 32, "Q4_0"), bias, stored("b", 7))
    packed = pack_weights(
        tensors, [PackRequest("a", ("a",), Format.Q4), PackRequest("b", ("b",), Format.Q8)]
    )
    assert {name: vector.tolist() for name, vector in packed.vectors.items()} == {
        "norm": [0, 1, 2, 3, 4],
        "bias": [1, 1, 1],
    }
    arrays: list[npt.NDArray[Any]] = [tensor.data for tensor in packed.tensors.values()]
    for array in (*arrays, *packed.vectors.values()):
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_a_weight_can_be_packed_twice_under_two_names() -> None:
    """A tied head may want another format than the embedding."""
    requests = [PackRequest("a", ("x",), Format.Q8), PackRequest("b", ("x",), Format.BF16)]
    packed = pack_weights(named(stored("x", 16)), requests)
    assert [tensor.format for tensor in packed.tensors.values()] == [Format.Q8, Format.BF16]


@pytest.mark.parametrize(
    ("parts", "format", "is_interleaved", "words"),
    [
        ([("a", 16, 48, "F32")], Format.BF16, False, "columns must be a multiple of 32"),
        ([("a", 24, 64, "F32"), ("b", 16, 64, "F32")], Format.BF16, False, "rows must be"),
        ([("a", 16, 64, "F32"), ("b", 16, 96, "F32")], Format.BF16, False, "equal columns"),
        ([("a", 16, 64, "F32"), ("b", 32, 64, "F32")], Format.BF16, True, "equal rows"),
        ([("a", 16, 64, "Q8_0")], Format.Q4, False, "Q8_0 does not become Q4"),
        ([("a", 16, 64, "Q4_0"), ("b", 16, 64, "F32")], Format.Q4M, False, "F32 does not become"),
    ],
)
def test_what_does_not_go_together_is_named(
    parts: list[tuple[str, int, int, str]], format: Format, is_interleaved: bool, words: str
) -> None:
    tensors = named(*(stored(*part) for part in parts))
    with pytest.raises(ModelError, match=words) as raised:
        make_plan(tensors, [PackRequest("x", tuple(tensors), format, is_interleaved)])
    assert all(name in raised.value.message for name in tensors)
    assert "--device torch" in raised.value.message


def test_a_vector_is_no_matrix() -> None:
    norm = StoredTensor("norm", (32,), "F32", np.ones(32, np.float32).view(np.uint8))
    with pytest.raises(ModelError, match="matrices"):
        make_plan(named(norm), [PackRequest("x", ("norm",), Format.F32)])


def test_the_digest_of_a_plan_tells_its_layouts_apart() -> None:
    a, b = stored("a", 16), stored("b", 16)
    plans = [
        make_plan(named(a, b), [PackRequest("x", ("a", "b"), Format.Q8)]),
        make_plan(named(a, b), [PackRequest("x", ("b", "a"), Format.Q8)]),
        make_plan(named(a, b), [PackRequest("x", ("a", "b"), Format.Q8M)]),
        make_plan(named(a, b), [PackRequest("x", ("a", "b"), Format.Q8, is_interleaved=True)]),
        make_plan(
            named(a, stored("b", 16, kind="Q5_0")), [PackRequest("x", ("a", "b"), Format.Q8)]
        ),
    ]
    assert len({plan.digest() for plan in plans}) == 5
    again = make_plan(named(a, b), [PackRequest("x", ("a", "b"), Format.Q8)])
    assert again.digest() == plans[0].digest()


def test_a_plan_fills_any_buffer(gguf_file: Maker) -> None:
    """As that of a file does."""
    model = open_model(gguf_file(kind="Q8_0"))
    requests = [
        PackRequest(name, (name,), format_of(tensor.kind))
        for name, tensor in model.tensors.items()
        if len(tensor.shape) == 2
    ]
    plan = make_plan(model.tensors, requests)
    data = np.zeros(plan.size_bytes, np.uint8)
    fill(plan, model.tensors, data)
    there, here = views(plan, data), pack_weights(model.tensors, requests)
    for name, weight in here.tensors.items():
        assert np.array_equal(there.tensors[name].data, weight.data)
    for name, vector in here.vectors.items():
        assert np.array_equal(vector, dequantize(model.tensors[name]))
        assert np.array_equal(there.vectors[name], vector)
