"""Safetensors: what is checked before a model is served."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llmrt.models.loading import open_model
from llmrt.models.quants import dequantize
from llmrt.models.safetensors_files import open_safetensors, read_safetensors
from llmrt.wire.errors import ModelError

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def write(path: Path, header: Any, data: bytes = b"", *, announced: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(raw) if announced is None else announced
    path.write_bytes(length.to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def sharded(hf_folder: Callable[..., Path]) -> Path:
    """A tiny Llama in 3 shards."""
    folder = hf_folder(save={"max_shard_size": "64KB"})
    assert sorted(path.name for path in folder.glob("*.safetensors")) == SHARDS
    return folder


def test_tensors_are_views_with_the_values_of_the_library(hf_folder: Callable[..., Path]) -> None:
    path = hf_folder() / "model.safetensors"
    ours, theirs = read_safetensors(path), load_file(path)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].shape == array.shape
        assert not ours[name].data.flags.owndata
        assert (dequantize(ours[name]) == array).all()


def test_shards_give_the_whole(sharded: Path, hf_folder: Callable[..., Path]) -> None:
    parts, whole = open_model(sharded), open_model(hf_folder())
    assert parts.spec == whole.spec
    assert parts.weights_hash() == whole.weights_hash()


def test_a_shard_cut_short_is_named(sharded: Path) -> None:
    path = sharded / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=rf"{SHARDS[1]}: tensor 'model.*cut off"):
        open_model(sharded)


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / SHARDS[2]).unlink()
    with pytest.raises(ModelError, match=f"lacks {SHARDS[2]}"):
        open_model(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{SHARDS[0]} lacks tensor 'model.norm.weight'"):
        open_model(sharded)


def test_swapped_shards_are_noticed(sharded: Path) -> None:
    (sharded / SHARDS[1]).rename(sharded / "x")
    (sharded / SHARDS[2]).rename(sharded / SHARDS[1])
    (sharded / "x").rename(sharded / SHARDS[2])
    with pytest.raises(ModelError, match=r"model-0000[23]-of-00003.safetensors lacks tensor"):
        open_model(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3, "", "a" * 300])
def test_an_index_may_only_name_files_of_its_folder(shard: Any, sharded: Path) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="a file in the same folder"):
        open_safetensors(sharded)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"a": 1, "a": 2}', "[" * 99999])
def test_a_bad_index_is_named(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=INDEX):
        open_safetensors(sharded)


def test_shards_without_their_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(ModelError, match=f"has neither model.safetensors nor {INDEX}"):
        open_model(sharded)


def test_an_unused_tensor_is_reported_once_and_ignored(sharded: Path) -> None:
    path = sharded / SHARDS[2]
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    path.unlink()
    # An integer buffer, as old checkpoints have; not in the index either.
    save_file({**tensors, "model.position_ids": np.arange(4)}, path)
    model = open_model(sharded)
    assert model.ignored == ("model.position_ids",)


def test_mixed_dtypes_are_converted(hf_folder: Callable[..., Path]) -> None:
    folder = hf_folder()
    path = folder / "model.safetensors"
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    path.unlink()
    mixed: dict[str, Any] = {
        up: tensors[up].astype(np.float64),
        gate: tensors[gate].astype(np.float16),
    }
    save_file({**tensors, **mixed}, path)
    model = open_model(folder)
    assert (dequantize(model.tensors["layers.0.up"]) == tensors[up]).all()
    assert np.allclose(dequantize(model.tensors["layers.0.gate"]), tensors[gate], atol=1e-3)


def test_a_weight_of_integers_is_refused_by_name(hf_folder: Callable[..., Path]) -> None:
    folder = hf_folder()
    path = folder / "model.safetensors"
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    path.unlink()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int64)
    save_file(tensors, path)
    with pytest.raises(
        ModelError, match=r"model.safetensors: tensor 'model.norm.weight' has type I64"
    ):
        open_model(folder)


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "is not JSON"),
    "a list": ([], "must hold a JSON object"),
    "nesting": (b'{"a":' * 50000, "is not JSON"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    "a tensor twice": (b'{"t": {}, "t": {}}', "'t' comes twice"),
    "no object": ({"t": 3}, "tensor 't' must be an object"),
    "unknown dtype": ({"t": entry("F12")}, "tensor 't' has dtype 'F12'"),
    "dtype of a list": ({"t": entry(dtype=[])}, "tensor 't' has dtype"),  # type: ignore[arg-type] # wrong on purpose
    "negative shape": ({"t": entry(shape=[-2])}, "tensor 't' has shape"),
    "fractional shape": ({"t": entry(shape=[2.0])}, "tensor 't' has shape"),
    "no shape": ({"t": entry(shape=None)}, "tensor 't' has shape"),
    "many dimensions": ({"t": entry(shape=[1] * 9)}, "tensor 't' has shape"),
    "three offsets": ({"t": entry(offsets=[0, 8, 16])}, "tensor 't' has data_offsets"),
    "offsets of another shape": ({"t": entry(shape=[3])}, "tensor 't': shape .* takes 12 bytes"),
    "product wraps": ({"t": entry(shape=[2**62, 2**62])}, "tensor 't': shape .* takes"),
    "backwards": ({"t": entry(offsets=[8, 0])}, "tensor 't': shape .* span -8"),
    "overlap": ({"t": entry(), "u": entry(offsets=[4, 12])}, "tensor 'u' at byte 4 overlaps"),
    "gap": ({"t": entry(offsets=[8, 16])}, "tensor 't' at byte 8 follows a gap"),
    "too little data": ({"t": entry(shape=[8], offsets=[0, 32])}, "tensor 't' ends at byte 32"),
    "too much data": ({"t": entry(shape=[1], offsets=[0, 4])}, "has 12 bytes after its last"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused_naming_file_and_tensor(case: str, tmp_path: Path) -> None:
    header, named = BAD_HEADERS[case]
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    with pytest.raises(ModelError, match=f"x.safetensors.*{named}"):
        read_safetensors(path)


@pytest.mark.parametrize("announced", [17, 2**40, 2**64 - 1])
def test_a_header_beyond_the_file_is_refused(announced: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", announced=announced)
    with pytest.raises(ModelError, match=f"header of {announced} bytes"):
        read_safetensors(path)


def test_a_file_of_a_few_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"12345")
    with pytest.raises(ModelError, match="too few"):
        read_safetensors(path)


@settings(
    max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_give_tensors_or_a_model_error(data: st.DataObject, tmp_path: Path) -> None:
    header = {"a": entry(), "b": entry("BF16", [2, 2], [8, 16]), "__metadata__": {"x": "y"}}
    raw = bytearray(write(tmp_path / "x.safetensors", header, bytes(16)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.safetensors").write_bytes(raw)
    with contextlib.suppress(ModelError):
        read_safetensors(tmp_path / "x.safetensors")
