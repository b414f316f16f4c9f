"""Safetensors: one file, or shards listed by an index.

A file is 8 bytes of header length (little-endian), a JSON header, and the data, without gaps.
It is read here and not by the `safetensors` package, because the package's numpy side has no
bfloat16 and copies, while its checks do not say which file is at fault. The header is small and
the data is mapped, so that this costs nothing.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from llmrt.models.fields import short
from llmrt.models.json_files import parse_json, read_json
from llmrt.models.mapped_file import map_file
from llmrt.models.tensor_table import TensorTable
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# The limit of the format's own library.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Element sizes; a model's own weights must be F64, F32, F16 or BF16, which is checked later."""


def open_safetensors(folder: Path) -> TensorTable:
    """The tensors of the model in `folder`, every file checked.

    Raises `ModelError` naming the file, and the tensor where there is one.
    """
    if (folder / SINGLE_NAME).is_file():
        return _single(folder / SINGLE_NAME)
    if (folder / INDEX_NAME).is_file():
        return _sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not re.search(r"-\d+-of-\d+\.", files[0].name):
        return _single(files[0])
    raise ModelError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, so nothing says which of its "
        f"{len(files)} *.safetensors files belong together: download the missing one"
    )


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; raises `ModelError`."""
    data = np.frombuffer(map_file(path), np.uint8)
    if data.size < 8:
        raise ModelError(f"{path} has {data.size} bytes, too few for safetensors")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes > data.size - 8:
        raise ModelError(
            f"{path}: a header of {header_bytes} bytes is announced in a file of {data.size}: "
            "it is damaged or cut off, download it again"
        )
    start = 8 + header_bytes
    header = parse_json(data[8:start].tobytes(), f"{path}: the header", has_unique_keys=True)
    header.pop("__metadata__", None)
    entries = [_entry(path, name, value) for name, value in header.items()]
    _check_coverage(path, entries, data.size - start)
    return {
        name: StoredTensor(name, shape, kind, data[start + first : start + last])
        for name, shape, kind, first, last in entries
    }


_Entry = tuple[str, tuple[int, ...], str, int, int]


def _entry(path: Path, name: str, value: Any) -> _Entry:
    """Name, shape, dtype, first and last + 1 byte of one tensor."""
    place = f"{path}: tensor {short(name)}"
    if not isinstance(value, dict):
        raise ModelError(f"{place} must be an object, got {short(value)}")
    kind: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPE_BYTES:
        raise ModelError(f"{place} has dtype {short(kind)}; known are {', '.join(DTYPE_BYTES)}")
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"{place} has shape {short(shape)}; up to {MAX_DIMENSIONS} integers fit")
    if not _is_naturals(offsets) or len(offsets) != 2:
        raise ModelError(f"{place} has data_offsets {short(offsets)}; two integers are expected")
    first, last = offsets
    num_bytes = math.prod(shape) * DTYPE_BYTES[kind]
    if last - first != num_bytes:
        raise ModelError(
            f"{place}: shape {shape} of {kind} takes {num_bytes} bytes, "
            f"but data_offsets {offsets} span {last - first}"
        )
    return name, tuple(shape), kind, first, last


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_coverage(path: Path, entries: list[_Entry], num_bytes: int) -> None:
    """The tensors cover the data exactly: no gap, no overlap, nothing missing at the end."""
    end = 0
    for name, _, _, first, last in sorted(entries, key=lambda entry: entry[3:]):
        if first != end:
            what = "overlaps the tensor before it" if first < end else "follows a gap"
            raise ModelError(f"{path}: tensor {short(name)} at byte {first} {what}, at {end}")
        end = last
        if end > num_bytes:
            raise ModelError(
                f"{path}: tensor {short(name)} ends at byte {end} of the data, but the file has "
                f"only {num_bytes}: it is cut off, download it again"
            )
    if end != num_bytes:
        raise ModelError(f"{path} has {num_bytes - end} bytes after its last tensor")


def _single(path: Path) -> TensorTable:
    tensors = read_safetensors(path)
    return TensorTable(path.parent, tensors, dict.fromkeys(tensors, path))


def _sharded(folder: Path) -> TensorTable:
    index_path = folder / INDEX_NAME
    weight_map = read_json(index_path, has_unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path}: weight_map must be an object, got {short(weight_map)}")
    shards = sorted({_shard_name(index_path, *item) for item in weight_map.items()})
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing[:5])}, which {INDEX_NAME} names: download it"
        )
    tensors: dict[str, StoredTensor] = {}
    file_of: dict[str, Path] = {}
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard).items():
            # The index decides which shard counts; a tensor that it does not name is unused.
            if weight_map.get(name, shard) == shard and name not in tensors:
                tensors[name], file_of[name] = tensor, folder / shard
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ModelError(f"{folder / shard} lacks tensor {short(name)}, which its index names")
    return TensorTable(folder, tensors, file_of)


def _shard_name(index_path: Path, name: str, shard: Any) -> str:
    if not isinstance(shard, str) or not re.fullmatch(r"[\w.+-]{1,200}", shard, re.ASCII):
        raise ModelError(
            f"{index_path}: tensor {short(name)} is said to be in {short(shard)}; "
            "the name of a file in the same folder is expected"
        )
    return shard
